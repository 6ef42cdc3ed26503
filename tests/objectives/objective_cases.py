"""Every objective, batches for them with NaN wherever nothing should be read, and the loss with its gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from p3o_jax.batch.types import Support
from p3o_jax.objectives import (
    P3O,
    P4O,
    Cispo,
    ConstantNormaliser,
    DecoupledCispo,
    DecoupledPpo,
    DrGrpo,
    Grpo,
    Gspo,
    GspoToken,
    MaskedIs,
    P3OSnapshot,
    Ppo,
    Reinforce,
    Rloo,
    Sapo,
    SequenceMean,
    TruncatedIs,
    Vcpo,
    objective_loss,
)

OBJECTIVES = {
    "p3o": P3O(),
    "p3o_reference": P3O(kl="reference", reference_kl_coefficient=0.1, entropy_coefficient=0.01),
    "p3o_importance": P3O(kl="importance"),
    "p3o_reverse": P3O(kl="reverse", reference_kl_coefficient=0.1, reference_kl="k3"),
    "p3o_exact": P3O(kl="exact"),
    "p4o": P4O(),
    "p4o_reverse": P4O(kl="reverse"),
    "p4o_exact": P4O(kl="exact"),
    "snapshot": P3OSnapshot(),
    "snapshot_importance": P3OSnapshot(kl="importance", weight="one_minus_ess"),
    "reinforce": Reinforce(entropy_coefficient=0.01),
    "rloo": Rloo(),
    "ppo_dual": Ppo(dual_clip=1.2, clip_low=0.1, clip_high=0.1),
    "grpo": Grpo(aggregation=SequenceMean()),
    "grpo_proximal": Grpo(ratio_to="proximal"),
    "dapo": Grpo(clip_low=0.2, clip_high=0.28),
    "dr_grpo": DrGrpo(aggregation=ConstantNormaliser(tokens=9)),
    "gspo": Gspo(clip_low=0.05, clip_high=0.05),
    "gspo_token": GspoToken(clip_low=0.05, clip_high=0.05),
    "cispo": Cispo(clip_low=0.2, clip_high=0.2),
    "decoupled_ppo": DecoupledPpo(behaviour_weight_cap=1.1),
    "decoupled_cispo": DecoupledCispo(),
    "truncated_is": TruncatedIs(cap=1.2),
    "truncated_is_sequence": TruncatedIs(level="sequence"),
    "masked_is": MaskedIs(low=0.8, high=1.3),
    "vcpo": Vcpo(),
    "sapo": Sapo(),
}


def random_batch(seed=0, rows=8, tokens=6, vocabulary=5, drift=0.4, dtype=np.float32):
    """Keyword arguments of `objective_loss`: full distributions, ragged rows, the last one fully masked."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, tokens, vocabulary))

    def log_softmax(x):
        return (x - np.log(np.exp(x).sum(-1, keepdims=True))).astype(dtype)

    full = {
        name: log_softmax(logits + scale * rng.normal(size=logits.shape))
        for name, scale in (("pi", 0.0), ("mu", drift), ("snapshot", drift / 2), ("frozen", 1.0))
    }
    token = rng.integers(vocabulary, size=(rows, tokens, 1))
    sampled = {name: np.take_along_axis(x, token, axis=-1)[..., 0] for name, x in full.items()}
    mask = np.arange(tokens) < rng.integers(1, tokens + 1, size=(rows, 1))
    mask[-1] = False
    advantages = rng.normal(size=(rows, 1)).astype(dtype) * np.ones((rows, tokens), dtype)

    def poisoned(x):
        return jnp.asarray(np.where(mask if x.ndim == 2 else mask[..., None], x, np.nan).astype(dtype))

    return {
        "log_probs": poisoned(sampled["pi"]),
        "behaviour_log_probs": poisoned(sampled["mu"]),
        "advantages": poisoned(advantages),
        "mask": jnp.asarray(mask),
        "proximal_log_probs": poisoned(sampled["snapshot"]),
        "reference_log_probs": poisoned(sampled["frozen"]),
        "entropy": poisoned(-(np.exp(full["pi"]) * full["pi"]).sum(-1)),
        "support": Support(None, poisoned(full["mu"]), poisoned(full["snapshot"])),
        "support_log_probs": poisoned(full["pi"]),
    }


def loss_and_gradient(objective, **arguments):
    """Op by op, in one shape for all (few programs): what is added is masked, and NaN."""
    rows, tokens = arguments["log_probs"].shape

    def pad(x):
        fill = jnp.zeros((), x.dtype) if x.dtype == jnp.bool_ else jnp.nan
        widths = ((0, 8 - rows), (0, 6 - tokens), *((0, 0),) * (x.ndim - 2))
        return jnp.pad(x, widths, constant_values=fill) if (rows, tokens) != (8, 6) else x

    arguments = jax.tree.map(pad, arguments)
    log_probs = arguments.pop("log_probs")
    (loss, logged), gradient = jax.value_and_grad(lambda x: objective_loss(objective, x, **arguments), has_aux=True)(
        log_probs
    )
    return float(loss), logged, np.asarray(gradient)[:rows, :tokens]


def two_tokens(ratios, advantages, **rest):
    """One row of tokens with log pi = -1 and these ratios."""
    log_probs = jnp.full((1, len(ratios)), -1.0)
    return {
        "log_probs": log_probs,
        "behaviour_log_probs": log_probs - jnp.log(jnp.asarray([ratios], jnp.float32)),
        "advantages": jnp.asarray([advantages], jnp.float32),
        "mask": jnp.ones((1, len(ratios)), bool),
    } | rest
