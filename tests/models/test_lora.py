"""Adapters: the model they leave, what they are trained by, and what they leave alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from p3o_jax.devices.precision import Precision
from p3o_jax.devices.sharding import MeshShape, make_mesh, to_global
from p3o_jax.learner.learner import Learner
from p3o_jax.learner.optimizer import OptimizerConfig
from p3o_jax.learner.plan import StepPlan
from p3o_jax.models import lora
from p3o_jax.models.lora import Lora
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.objectives import P3O
from p3o_jax.sampler import Sampler, SamplingLimits
from tests.learner.test_learner import VOCAB, make_batch

PLAIN = TransformerConfig(
    num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=32, qk_norm=True, attention_bias=True
)
ADAPTERS = Lora(rank=3, alpha=6.0)
MODEL = replace(PLAIN, lora=ADAPTERS)


@cache  # and with it what it has compiled
def make_learner(model: TransformerConfig, shape: MeshShape | None = None, micro_batches: int = 1) -> Learner:
    mesh = make_mesh(shape) if shape else make_mesh(devices=jax.devices()[:1])
    optimizer = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
    return Learner(model, VOCAB, StepPlan(P3O(), micro_batches=micro_batches), optimizer, mesh, num_updates=10)


def log_probs(learner: Learner, params) -> np.ndarray:
    mask = make_batch().mask
    return np.where(mask, learner.log_probs(params, to_global(make_batch(), learner.mesh))[0], 0)


def flat(state) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}


@pytest.fixture(scope="module")
def updated() -> tuple:
    """A learner of adapters, its state before and after three updates, on one device."""
    learner = make_learner(MODEL)
    before = learner.init(jax.random.key(0))
    start, state = jax.device_get(before.params), before
    for _ in range(3):
        state, _ = learner.update(state, to_global(make_batch(), learner.mesh))
    return learner, start, state


def test_with_b_at_zero_it_is_the_model_without():
    plain, adapted = make_learner(PLAIN), make_learner(MODEL)
    base, params = plain.init(jax.random.key(0)).params, adapted.init(jax.random.key(0)).params
    jax.tree.map(np.testing.assert_array_equal, lora.without_adapters(params), base)
    np.testing.assert_array_equal(log_probs(adapted, params), log_probs(plain, base))


@pytest.mark.parametrize("model", [PLAIN, MODEL])
def test_given_weights_are_taken_over_with_random_adapters_beside_them(model):
    key = jax.random.key(0)
    plain, learner = (make_learner(config, MeshShape(fsdp=2, tensor=2)) for config in (PLAIN, model))
    state = learner.init_with(key, plain.init(key).params)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(learner.init(key)))
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == learner.state_shardings()


def test_only_adapters_change_and_only_they_have_moments(updated):
    _, start, state = updated
    before, after = flat(start), flat(state.params)
    assert before.keys() == after.keys()
    adapters = [name for name in before if "_a'" in name or "_b'" in name]
    assert len(adapters) == 2 * 7
    for name in before:
        if name in adapters:
            assert not np.array_equal(before[name], after[name]), name
        else:
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    sizes = sum(after[name].size for name in adapters)
    assert sum(leaf.size for leaf in moments) == 2 * sizes  # first and second


def test_merged_weights_are_the_same_policy(updated):
    learner, _, state = updated
    plain = make_learner(PLAIN)
    merged = jax.jit(lambda params: lora.merged(params, ADAPTERS))(state.params)
    assert np.abs(log_probs(plain, merged) - log_probs(plain, lora.without_adapters(state.params))).max() > 1e-2
    np.testing.assert_allclose(log_probs(plain, merged), log_probs(learner, state.params), atol=1e-5)


def test_gradients_are_those_of_the_merged_weights(updated):
    """dL/dA = s dL/dW B^T and dL/dB = s A^T dL/dW, layer by layer."""
    learner, _, state = updated
    plain = make_learner(PLAIN)
    batch = to_global(make_batch(), learner.mesh)
    merged = jax.jit(lambda params: lora.merged(params, ADAPTERS))(state.params)
    of_weights = nnx.to_pure_dict(plain.gradients(merged, batch)[0])["layers"]
    of_adapters = nnx.to_pure_dict(learner.gradients(state.params, batch)[0])["layers"]
    assert len(of_adapters) == 2 * 7
    params = nnx.to_pure_dict(state.params)["layers"]
    for target in ADAPTERS.targets:
        a, b, gradient = params[f"{target}_a"], params[f"{target}_b"], of_weights[target]
        layers, rank = a.shape[0], ADAPTERS.rank
        a, b = a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
        gradient = gradient.reshape(layers, a.shape[1], b.shape[2]) * ADAPTERS.scale
        for got, expected in (
            (of_adapters[f"{target}_a"].reshape(a.shape), jnp.einsum("LIO,LRO->LIR", gradient, b)),
            (of_adapters[f"{target}_b"].reshape(b.shape), jnp.einsum("LIR,LIO->LRO", a, gradient)),
        ):
            np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max(), err_msg=target)


@pytest.mark.parametrize(
    ("shape", "micro_batches"), [(MeshShape(data=2, fsdp=2, tensor=2), 2), (MeshShape(slice=2, fsdp=4), 1)]
)
def test_sharded_updates_are_those_of_one_device(updated, shape, micro_batches):
    _, _, expected = updated
    learner = make_learner(MODEL, shape, micro_batches)
    state = learner.init(jax.random.key(0))
    for _ in range(3):
        state, _ = learner.update(state, to_global(make_batch(), learner.mesh))
    got, expected = flat(state.params), flat(expected.params)
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], atol=2e-4, err_msg=name)


def test_the_sampler_gets_merged_weights(updated):
    _, _, state = updated
    limits = SamplingLimits(prompt_tokens=4, response_tokens=4, eos_ids=(0,))
    mesh = make_mesh(devices=jax.devices()[:1])
    sampler = Sampler(MODEL, VOCAB, limits, Precision(), mesh)
    weights = sampler.publish(state.params, 3)
    expected = jax.jit(lambda params: lora.merged(params, ADAPTERS))(state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), weights.params, expected)
    assert jax.tree.structure(weights) == jax.tree.structure(sampler.abstract_weights())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "rank must be positive"),
        ({"alpha": 0.0}, "alpha must be positive"),
        ({"targets": ("querry",)}, "targets must be different names among query, key"),
        ({"targets": ()}, "targets must be different names"),
        ({"targets": ("up", "up")}, "targets must be different names"),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(ValueError, match=message):
        Lora(**fields)
