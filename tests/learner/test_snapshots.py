"""Snapshots, distributions, packed rows and kernels in the learner: the same update however they are computed."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from p3o_jax.batch import metrics as metrics_lib
from p3o_jax.batch.types import Batch, Inputs, Support
from p3o_jax.devices.sharding import MeshShape, make_mesh, to_global, to_local
from p3o_jax.experience.packing import pack
from p3o_jax.learner.learner import Learner
from p3o_jax.learner.optimizer import OptimizerConfig
from p3o_jax.learner.plan import StepPlan
from p3o_jax.models import attention
from p3o_jax.models.transformer import Transformer, TransformerConfig, abstract_model
from p3o_jax.objectives import P3O, P4O, DecoupledPpo, Gspo, P3OSnapshot, SequenceMean, objective_loss

VOCAB, ROWS, TOKENS, K = 14, 16, 9, 4
MODEL = TransformerConfig(num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=4, mlp_dim=32)
MESH = MeshShape(data=2, fsdp=2, tensor=2)


def make_batch(seed: int = 0) -> Batch:
    """Ragged rows, two of which are fully masked, prompts of a token or two, NaN wherever nothing is to be read."""
    rng = np.random.default_rng(seed)
    lengths, prompts = rng.integers(2, 6, (ROWS, 1)), rng.integers(0, 2, (ROWS, 1))
    lengths[[3, 8]] = 0
    at = np.arange(TOKENS)
    mask = (at < lengths) & (at >= prompts)
    tokens = rng.integers(0, VOCAB, (ROWS, TOKENS + 1)).astype(np.int32)
    behaviour = jax.nn.log_softmax(rng.normal(size=(ROWS, TOKENS, VOCAB)).astype(np.float32))
    of_token = np.take_along_axis(np.asarray(behaviour), tokens[:, 1:, None], -1)[..., 0]
    # The same weight of every token of a row, as group advantages are.
    advantages = np.broadcast_to(rng.normal(size=(ROWS, 1)), mask.shape)
    return Batch(
        mask=mask,
        behaviour_log_probs=np.where(mask, of_token, np.nan).astype(np.float32),
        advantages=np.where(mask, advantages, np.nan).astype(np.float32),
        support=Support(None, np.where(mask[..., None], behaviour, np.nan)),
        inputs=Inputs(
            tokens[:, :-1],
            tokens[:, 1:],
            np.tile(at.astype(np.int32), (ROWS, 1)),
            np.full(mask.shape, 0.8, np.float32),
        ),
    )


def with_support(batch: Batch, objective) -> Batch:
    """What the sampler would have stored for the objective."""
    if objective.support not in ("behaviour", "both"):
        return batch._replace(support=None)
    if objective.support_form == "exact":
        return batch
    indices = np.argsort(-np.nan_to_num(batch.support.behaviour_log_probs), axis=-1)[..., :K].astype(np.int32)
    return batch._replace(support=Support(indices, np.take_along_axis(batch.support.behaviour_log_probs, indices, -1)))


@cache  # and with it what it has compiled
def make_learner(objective, shape=None, micro_batches=1) -> Learner:
    mesh = make_mesh(shape) if shape else make_mesh(devices=jax.devices()[:1])
    plan = StepPlan(objective, micro_batches=micro_batches, support_tokens=K)
    return Learner(MODEL, VOCAB, plan, OptimizerConfig(), mesh, num_updates=10)


@cache
def random_params(seed: int):
    return jax.tree.map(jnp.asarray, jax.device_get(nnx.state(Transformer(MODEL, VOCAB, nnx.Rngs(seed)))))


def params_of(learner: Learner, seed: int):
    return jax.device_put(random_params(seed), learner.state_shardings().params)


def gradients(learner: Learner, batch: Batch):
    """Gradients as one vector, loss and metrics, with a snapshot at other parameters where the objective wants the
    rollout's, and the learner's own where it wants the epoch's."""
    batch = to_global(batch, learner.mesh)
    if learner.objective.snapshot == "rollout":
        batch = learner.snapshot(params_of(learner, 1), batch)
    found, loss, _, metrics, *_ = learner.gradients(params_of(learner, 0), batch)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(found))])
    return flat, float(loss), jax.device_get(metrics_lib.values(metrics))


def assert_equal(got, expected):
    assert got[1] == pytest.approx(expected[1], rel=1e-5)
    np.testing.assert_allclose(got[0], expected[0], atol=1e-5 * np.abs(expected[0]).max())
    for tag, value in expected[2].items():
        if "micro_batch" not in tag:
            np.testing.assert_allclose(got[2][tag], value, rtol=1e-4, atol=1e-5, err_msg=tag)


def dense(objective, batch: Batch):
    """Loss and gradients by `objective_loss` on whole distributions."""
    params, other = random_params(0), random_params(1)

    def log_softmax(params):
        model = nnx.merge(abstract_model(MODEL, VOCAB)[0], params)
        hidden, _ = model.hidden(jnp.asarray(batch.inputs.tokens), jnp.asarray(batch.inputs.positions))
        return jax.nn.log_softmax(model.logits(hidden) / batch.inputs.temperature[..., None])

    def at(log_probs, indices):
        return log_probs if indices is None else jnp.take_along_axis(log_probs, indices, axis=-1)

    targets = batch.inputs.targets[..., None]
    snapshot = log_softmax(other if objective.snapshot == "rollout" else params)
    support = batch.support or Support()
    if objective.support == "proximal" and objective.support_form == "top_k":
        support = support._replace(indices=jax.lax.top_k(snapshot, K)[1])
    if objective.support in ("proximal", "both"):
        support = support._replace(proximal_log_probs=at(snapshot, support.indices))

    def loss(params):
        log_probs = log_softmax(params)
        return objective_loss(
            objective,
            at(log_probs, targets)[..., 0],
            behaviour_log_probs=batch.behaviour_log_probs,
            advantages=batch.advantages,
            mask=batch.mask,
            proximal_log_probs=at(snapshot, targets)[..., 0] if objective.snapshot else None,
            support=support if objective.support else None,
            support_log_probs=at(log_probs, support.indices) if objective.support else None,
        )[0]

    value, found = jax.jit(jax.value_and_grad(loss))(params)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(found)]), float(value)


OBJECTIVES = {
    "p3o_snapshot_top_k": P3OSnapshot(kl="top_k"),
    "p4o_exact": P4O(kl="exact"),
    "p4o_top_k": P4O(kl="top_k"),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_split_and_sharded_equals_dense(name):
    """Two micro-batches on a mesh of all axes: snapshots taken and distributions gathered from their shards."""
    objective = OBJECTIVES[name]
    batch = with_support(make_batch(), objective)
    learner = make_learner(objective, MESH, 2)
    got = gradients(learner, batch)
    expected, loss = dense(objective, batch)
    assert got[1] == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(got[0], expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("objective", [P4O(kl="exact"), DecoupledPpo()], ids=["p4o", "decoupled_ppo"])
def test_a_single_micro_batch_is_its_own_snapshot(objective):
    """Without a gradient-free pass; and a snapshot given explicitly, of the same parameters, changes nothing."""
    batch = with_support(make_batch(), objective)
    learner = make_learner(objective)
    own = gradients(learner, batch)
    given = learner.snapshot(params_of(learner, 0), to_global(batch, learner.mesh))
    assert_equal(gradients(learner, to_local(given)), own)
    assert own[2]["policy/ess/policy_to_proximal"] == 1
    assert own[2]["policy/ess"] < 0.9


def test_snapshot_is_what_an_update_sees():
    """Log-probs and distributions of the parameters given, at the learner's temperature, constants of the update."""
    learner = make_learner(P3OSnapshot(kl="top_k"))
    batch, params = to_global(with_support(make_batch(), learner.objective), learner.mesh), params_of(learner, 0)
    seen = learner.snapshot(params, batch)
    log_probs, _ = learner.log_probs(params, batch)
    np.testing.assert_array_equal(seen.proximal_log_probs, log_probs)
    assert seen.support.indices.shape == (ROWS, TOKENS, K)
    metrics = learner.gradients(params, seen).metrics
    values = metrics_lib.values(metrics)
    assert float(values["loss/snapshot_kl"]) == pytest.approx(0, abs=1e-6)
    assert float(values["policy/ess/policy_to_proximal"]) == pytest.approx(1, abs=1e-6)
    assert float(values["policy/precision_gap_kl"]) > 0.1  # the behaviour policy is another


def test_what_an_objective_needs_is_asked_for_by_name():
    learner = make_learner(P3O(kl="exact"))
    with pytest.raises(ValueError, match="P3O needs support"):
        gradients(learner, make_batch()._replace(support=None))


PACKED = {
    "gspo": (Gspo(), None, 1),
    "sequence_mean": (P3O(aggregation=SequenceMean()), MeshShape(data=4, tensor=2), 1),
    "p3o_snapshot": (P3OSnapshot(kl="top_k"), MESH, 2),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_equals_padded(name):
    objective, shape, micro_batches = PACKED[name]
    padded = with_support(make_batch(), objective)
    (packed,) = pack([padded], unit=8)
    assert packed.mask.shape == (ROWS // 2, TOKENS)
    # Poison what no one may read.
    for field in ("behaviour_log_probs", "advantages"):
        getattr(packed, field)[packed.segment_ids == -1] = np.nan
    learner = make_learner(objective, shape, micro_batches)
    assert_equal(gradients(learner, packed), gradients(learner, padded))


def test_packing_needs_the_segments():
    """What the equality above is worth: sequences that see one another give another loss."""
    (packed,) = pack([make_batch()._replace(support=None)], unit=1)
    learner = make_learner(P3O())
    expected = gradients(learner, packed)[1]
    assert abs(gradients(learner, packed._replace(segment_ids=None))[1] - expected) > 1e-3 * abs(expected)


def test_a_kernel_gives_the_same_update(monkeypatch):
    """Splash attention, emulated, in the rematerialised scan of layers of a sharded learner, on packed rows."""
    (packed,) = pack([make_batch()._replace(support=None)], unit=8)
    expected = gradients(make_learner(P3O()), packed)
    kernel = partial(attention.splash_attention, block=128, interpret=True)
    monkeypatch.setattr(attention, "LONG", 1)
    monkeypatch.setattr(attention.sharding, "platform", lambda: "tpu")
    monkeypatch.setattr(attention, "splash_attention", kernel)
    of_its_own = make_learner.__wrapped__(P3O(), MESH)
    assert_equal(gradients(of_its_own, packed), expected)
