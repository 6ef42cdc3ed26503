"""Any objective as one function of arrays, for use without the rest of the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from p3o_jax.batch import metrics as metric_types
from p3o_jax.batch.types import AnyArray, Batch, Policy, Support
from p3o_jax.objectives.base import Objective


def objective_loss(
    objective: Objective,
    log_probs: Float[Array, "B T"],
    *,
    behaviour_log_probs: Float[AnyArray, "B T"],
    advantages: Float[AnyArray, "B T"] | Float[AnyArray, " B"],
    mask: Bool[AnyArray, "B T"] | Float[AnyArray, "B T"],
    proximal_log_probs: Float[AnyArray, "B T"] | None = None,
    reference_log_probs: Float[AnyArray, "B T"] | None = None,
    entropy: Float[Array, "B T"] | None = None,
    support: Support | None = None,
    support_log_probs: Float[Array, "B T K"] | None = None,
    segment_ids: Int[AnyArray, "B T"] | None = None,
    axis_name: str | Sequence[str] | None = None,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss and the metrics of one batch; the batch given is the whole optimizer batch.

    Works under jit, grad and vmap, and on global (sharded) arrays under jit as it stands.
    Inside `jax.shard_map` (with its default `check_vma=True`) give `axis_name`: the loss,
    its gradient and the metrics are then those of the batch over all devices of these axes.

    Args:
      objective: an objective, hashable and static under jit.
      log_probs: log pi(y_t | y_<t), what is differentiated.
      behaviour_log_probs: log mu(y_t | y_<t) of the distribution that y_t was drawn from.
      advantages: one a token, or one a row.
      mask: True where a token counts; if numbers, those above 0.5. Everything else in this
        call may hold anything, NaN included, where a token does not count.
      proximal_log_probs: under a snapshot of the learner's policy, `objective.snapshot`.
      reference_log_probs: under a frozen policy, for `reference_kl_coefficient`.
      entropy: of pi at each token, for `entropy_coefficient`; if given it is also logged.
      support: distributions of mu or the snapshot, for kl="exact" and "top_k".
      support_log_probs: those of pi at `support.indices`; also differentiated.
      segment_ids: tells the sequences of a packed row apart.
      axis_name: mesh axes over which the batch is split.

    Returns:
      The scalar loss, aggregated as `objective.aggregation` says (token mean by default),
      in float32 or float64; 0 if no token counts, NaN if a log-ratio of a counted token is
      not finite. Metrics by tag, as arrays (`policy/log_ratio_histogram` a vector).

    Raises:
      ValueError: shapes or dtypes disagree, or something that the objective needs is missing.
    """
    policy = Policy(log_probs, entropy, support_log_probs)
    batch = Batch(mask, behaviour_log_probs, advantages, proximal_log_probs, reference_log_probs, support, segment_ids)
    policy, batch = _checked(policy, batch)

    statistics = objective.statistics(policy, batch)
    if axis_name is not None:
        statistics = metric_types.all_reduce(statistics, axis_name)
    per_token, metrics = objective.loss(policy, batch, statistics)

    total = jnp.sum(objective.aggregation.weights(batch, per_token.dtype) * per_token)
    count = objective.aggregation.count(batch, per_token.dtype)
    if axis_name is not None:
        total, count = jax.lax.psum((total, count), axis_name)
        metrics = metric_types.all_reduce(metrics, axis_name)
    return total / jnp.maximum(count, 1.0), metric_types.values(metrics)


def _checked(policy: Policy, batch: Batch) -> tuple[Policy, Batch]:
    """Makes them JAX arrays, the mask boolean, and the advantages one a token.

    Raises:
      ValueError: one that every objective needs is None, or shapes or dtypes disagree.
    """
    needed: dict[str, Any] = {
        "log_probs": policy.log_probs,
        "behaviour_log_probs": batch.behaviour_log_probs,
        "advantages": batch.advantages,
        "mask": batch.mask,
    }
    for name, x in needed.items():
        if x is None:
            raise ValueError(f"{name} is None: every objective needs it")
    policy, batch = jax.tree.map(jnp.asarray, (policy, batch))
    shape = policy.log_probs.shape
    if len(shape) != 2:
        raise ValueError(f"log_probs has shape {shape}: give [B, T], one log-prob a token")
    if batch.advantages.ndim == 1:
        _check_shape("advantages", batch.advantages, shape[:1])
        batch = batch._replace(advantages=jnp.broadcast_to(batch.advantages[:, None], shape))
    per_token = {name: getattr(batch, name) for name in _PER_TOKEN}
    for name, x in {"log_probs": policy.log_probs, "entropy": policy.entropy, **per_token}.items():
        if x is not None:
            _check_shape(name, x, shape)
            if name == "segment_ids":
                if not jnp.issubdtype(x.dtype, jnp.integer):
                    raise ValueError(f"segment_ids has dtype {x.dtype}: give integers")
            elif name != "mask" and not jnp.issubdtype(x.dtype, jnp.floating):
                raise ValueError(f"{name} has dtype {x.dtype}: give floating-point numbers")
    of_anchors = {} if batch.support is None else batch.support._asdict()
    distributions = {"support_log_probs": policy.support_log_probs}
    distributions |= {f"support.{name}": x for name, x in of_anchors.items()}
    widths = [x.shape[-1] for x in distributions.values() if x is not None]
    for name, x in distributions.items():
        if x is not None:
            _check_shape(name, x, (*shape, widths[0]))
    return policy, batch if batch.mask.dtype == jnp.bool_ else batch._replace(mask=batch.mask > 0.5)


_PER_TOKEN = ("mask", "behaviour_log_probs", "advantages", "proximal_log_probs", "reference_log_probs", "segment_ids")


def _check_shape(name: str, x: AnyArray, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}, which must be {shape}, after log_probs")
