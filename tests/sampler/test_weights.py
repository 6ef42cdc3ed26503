"""The sampler's copy of the weights: which one it is, where it goes, and what travels there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from jax.sharding import NamedSharding

from p3o_jax.devices import sharding
from p3o_jax.devices.hlo import collectives
from p3o_jax.devices.precision import Precision
from p3o_jax.devices.sharding import MeshShape, make_mesh, split_devices, to_local
from p3o_jax.models.quantised import quantise_weights
from p3o_jax.models.transformer import TransformerConfig, abstract_model, weight_specs
from p3o_jax.sampler import Requests, Sampler, SamplingLimits
from p3o_jax.sampler.weights import WeightFormat

VOCAB = 16
CONFIG = TransformerConfig(
    num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=4, head_dim=8, mlp_dim=64, context_tokens=32
)
LIMITS = SamplingLimits(prompt_tokens=4, response_tokens=6, eos_ids=(0,))
PROMPTS = [[1, 2], [5, 6, 8, 9], [2], [4, 4, 4], [9, 8], [1, 2, 4, 5], [11], [10, 1, 8]]
INT8_WEIGHTS = Precision("int8", "float32", "float32")
INT8 = Precision("int8", "bfloat16", "bfloat16")


@pytest.fixture(scope="module")
def numbers() -> nnx.State:
    """Parameters on the host."""
    rng, (_, abstract) = np.random.default_rng(0), abstract_model(CONFIG, VOCAB)

    def draw(leaf):
        return rng.standard_normal(leaf.shape).astype(np.float32) * (2 * leaf.shape[-2] ** -0.5 if leaf.ndim > 2 else 1)

    return jax.tree.map(draw, abstract)


def on_learner(numbers: nnx.State, mesh) -> nnx.State:
    """Parameters as a learner has them."""
    specs = weight_specs(abstract_model(CONFIG, VOCAB)[1], mesh, sharding.LEARNER_RULES)
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), numbers, specs)


def test_the_copy_that_is_quantised_is_the_bfloat16_one(numbers):
    """In a channel scaled by its largest weight, a rounding to bfloat16 moves numbers to other steps of int8:
    quantising the float32 masters gives other weights than those that were synchronised."""
    quantise = jax.jit(lambda params: quantise_weights(params, INT8))
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), numbers)
    for a, b in zip(jax.tree.leaves(quantise(numbers)), jax.tree.leaves(quantise(rounded)), strict=True):
        np.testing.assert_array_equal(a, b)
    masters = qwix.quantize(jnp.asarray(numbers["layers"]["gate"][...]), jnp.int8, channelwise_axes=(0, 2))
    assert (masters.qvalue != quantise(numbers)["layers"]["gate"].get_value().qvalue).mean() > 0.01


def test_a_rollout_names_the_weights_that_made_it_and_no_others_are_used(numbers):
    """Two versions through one sampler, back and forth: nothing of one is left when the other is sampled."""
    mesh = make_mesh(devices=jax.devices()[:1])
    sampler = Sampler(CONFIG, VOCAB, LIMITS, INT8, mesh)
    versions = {3: numbers, 4: jax.tree.map(lambda leaf: leaf * 1.5, numbers)}
    weights = {version: sampler.publish(params, version) for version, params in versions.items()}
    rollouts: dict[int, list] = {3: [], 4: []}
    for version in (3, 4, 3, 4):
        rollout = to_local(sampler.generate(weights[version], Requests(PROMPTS, range(8), jax.random.key(0))))
        assert set(rollout.policy_version.ravel().tolist()) == {version}
        rollouts[version].append(rollout)
    for first, second in rollouts.values():
        jax.tree.map(np.testing.assert_array_equal, first, second)
    assert (rollouts[3][0].behaviour_log_probs != rollouts[4][0].behaviour_log_probs).any()
    assert jax.tree.structure(weights[3]) == jax.tree.structure(sampler.abstract_weights())
    described, found = (jax.tree.leaves(tree) for tree in (sampler.abstract_weights(), weights[3]))
    assert [(a.shape, a.dtype, a.sharding) for a in described] == [(b.shape, b.dtype, b.sharding) for b in found]


MESHES = {
    "tensor-parallel decode beside an FSDP learner": (MeshShape(fsdp=8), MeshShape(data=2, tensor=4), 0),
    "devices of its own": (MeshShape(data=2, fsdp=2), MeshShape(data=2, tensor=2), 4),
}


@pytest.fixture(scope="module")
def expected(numbers):
    """Rollouts of one device."""
    alone = Sampler(CONFIG, VOCAB, LIMITS, INT8_WEIGHTS, make_mesh(devices=jax.devices()[:1]))
    return to_local(alone.generate(alone.publish(numbers, 1), Requests(PROMPTS, range(8), jax.random.key(0))))


@pytest.mark.parametrize("name", MESHES)
def test_the_same_tokens_on_a_mesh_of_its_own(numbers, expected, name):
    """Log-probs differ by rounding, where sums are in another order: to 1e-5 in float32. No draw here is that close."""
    learner, own, apart = MESHES[name]
    of_learner, of_sampler = split_devices(jax.devices(), apart)
    learner_mesh, mesh = make_mesh(learner, of_learner), make_mesh(own, of_sampler)
    sampler = Sampler(CONFIG, VOCAB, LIMITS, INT8_WEIGHTS, mesh, learner_mesh)
    weights = sampler.publish(on_learner(numbers, learner_mesh), 1)
    assert all(leaf.sharding.device_set == set(of_sampler) for leaf in jax.tree.leaves(weights))
    got = to_local(sampler.generate(weights, Requests(PROMPTS, range(8), jax.random.key(0))))
    np.testing.assert_array_equal(got.response_length, expected.response_length)
    for row in range(8):
        written = slice(0, got.prompt_length[row] + got.response_length[row])
        np.testing.assert_array_equal(got.tokens[row, written], expected.tokens[row, written])
        a, b = (rollout.behaviour_log_probs[row, written] for rollout in (got, expected))
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("name", MESHES)
def test_narrow_numbers_travel(numbers, name):
    """Weights are cast where the learner has them. On the same devices, what the collectives of that one program gather
    is at most the narrow weights; on others, nothing is gathered, and what leaves the learner's devices is narrow.
    (In int8: XLA:CPU computes collectives of narrow floating-point numbers in wider ones.)"""
    learner, own, apart = MESHES[name]
    of_learner, of_sampler = split_devices(jax.devices(), apart)
    learner_mesh, mesh = make_mesh(learner, of_learner), make_mesh(own, of_sampler)
    weights = WeightFormat(CONFIG, VOCAB, INT8, mesh, learner_mesh)
    described = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        on_learner(numbers, learner_mesh),
    )
    compiled = weights.quantise.lower(described, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    narrow = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights.abstract().params))
    wide = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(numbers))
    assert narrow < wide / 3
    moved = [found for found in collectives(compiled.as_text()) if found.kind != "all-reduce"]
    if apart:
        assert not moved
        left = compiled.output_shardings
        assert all(place.device_set == set(of_learner) for place in jax.tree.leaves(left))
        assert compiled.memory_analysis().output_size_in_bytes <= narrow
    else:
        assert 0 < sum(found.size_bytes for found in moved) <= 1.01 * narrow


@pytest.mark.parametrize(("count", "message"), [(8, "sampler_devices=8"), (9, "sampler_devices=9")])
def test_devices_that_cannot_be_spared(count, message):
    with pytest.raises(ValueError, match=message):
        split_devices(jax.devices(), count)
