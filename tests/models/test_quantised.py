"""Quantised weights, activations and caches against arithmetic written out in numpy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import qwix
from flax import nnx

from p3o_jax.devices import sharding
from p3o_jax.devices.precision import DTYPES, Precision, multiplied_as
from p3o_jax.devices.sharding import MeshShape, make_mesh
from p3o_jax.models.kv_cache import KVCache
from p3o_jax.models.quantised import check_fits, product, quantise, quantise_weights
from p3o_jax.models.transformer import TransformerConfig, abstract_model, weight_specs

CONFIG = TransformerConfig(num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=32)
VOCAB = 12
# The largest number, and the largest relative step between neighbours in its binade (or for integers the step).
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0, "int4": 7.0}
MANTISSA = {"fp8_e4m3": 2.0**-3, "fp8_e5m2": 2.0**-2}


@pytest.fixture(scope="module")
def params() -> nnx.State:
    """Weights whose channels have very different sizes, up to 1e4."""
    rng, (_, abstract) = np.random.default_rng(0), abstract_model(CONFIG, VOCAB)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.standard_normal(leaf.shape) * np.logspace(-3, 4, leaf.shape[-1])
        return jnp.asarray(values.astype(np.float32))

    return jax.tree.map(draw, abstract)


@pytest.fixture(scope="module")
def quantised(params) -> dict[tuple[str, str], dict]:
    """The layers' weights in every format, with every kind of scales: by both."""
    precisions = {
        (format, scales): Precision(format, "bfloat16", "bfloat16", scales, 8 if scales == "block" else 32)
        for format in LARGEST
        for scales in ("tensor", "channel", "block")
    }
    precisions["bfloat16", "channel"] = Precision("bfloat16", "bfloat16")

    @jax.jit
    def all_of_them(params):
        return [quantise_weights(params, precision) for precision in precisions.values()]

    return {key: nnx.to_pure_dict(state) for key, state in zip(precisions, all_of_them(params), strict=True)}


def bfloat16(array) -> np.ndarray:
    return np.asarray(array).astype(ml_dtypes.bfloat16).astype(np.float64)


def numbers(array: qwix.QArray | jax.Array) -> np.ndarray:
    """A quantised array written out, in float64."""
    if not isinstance(array, qwix.QArray):
        return np.asarray(array).astype(np.float64)
    scale = np.asarray(array.scale, np.float64)
    for axis, (whole, own) in enumerate(zip(array.qvalue.shape, scale.shape, strict=True)):
        scale = scale.repeat(whole // own, axis)
    return np.asarray(array.qvalue).astype(np.float64) * scale


def largest_error(format: str, magnitude: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Half a step of the format, at a scale at which `magnitude` is its largest number."""
    scale = magnitude / LARGEST[format]
    if "int" in format:
        return np.broadcast_to(0.5 * scale, x.shape)
    subnormal = {"fp8_e4m3": 2.0**-9, "fp8_e5m2": 2.0**-16}[format] * scale
    return 0.5 * np.maximum(MANTISSA[format] * np.abs(x), subnormal)


@pytest.mark.parametrize("format", LARGEST)
@pytest.mark.parametrize("scales", ["tensor", "channel", "block"])
def test_weights_are_within_half_a_step_of_their_bfloat16_copy(params, quantised, format, scales):
    """And only of what is not left out. The scale is that of the numbers that are said to share it."""
    of_model = quantised[format, scales]
    plain, kept = nnx.to_pure_dict(params)["layers"], of_model["layers"]
    for name, inputs in (("query", (1,)), ("attention_out", (1, 2)), ("down", (1,))):
        assert kept[name].qvalue.dtype == DTYPES[format]
        assert kept[name].scale.dtype == jnp.float32
        x = bfloat16(plain[name])
        if scales == "block":
            last = inputs[-1]
            tiled = x.reshape(*x.shape[:last], -1, 8, *x.shape[last + 1 :])
            magnitude = np.abs(tiled).max(axis=last + 1, keepdims=True)
            magnitude = np.broadcast_to(magnitude, tiled.shape).reshape(x.shape)
        else:
            magnitude = np.abs(x).max(axis=tuple(range(1, x.ndim)) if scales == "tensor" else inputs, keepdims=True)
        error = np.abs(numbers(kept[name]) - x)
        # qwix scales integers so that the largest is a half step beyond the last: less error elsewhere.
        assert (error <= largest_error(format, magnitude, x) * (1 + 1e-5)).all()
        assert error.max() > 0
    for name in ("attention_norm", "mlp_norm"):
        np.testing.assert_array_equal(bfloat16(plain[name]), np.asarray(kept[name], np.float64))
    for name in ("embedding", "head"):
        assert of_model[name].dtype == jnp.bfloat16


def test_parts_left_out_can_be_included(params):
    precision = Precision("int8", include=("embedding", "head", "norms"))
    weights = jax.jit(lambda params: quantise_weights(params, precision))(params)
    plain, kept = nnx.to_pure_dict(params), nnx.to_pure_dict(weights)
    norms = [(plain["layers"]["mlp_norm"], kept["layers"]["mlp_norm"]), (plain["final_norm"], kept["final_norm"])]
    for x, stored in [*norms, *((plain[name], kept[name]) for name in ("embedding", "head"))]:
        assert isinstance(stored, qwix.QArray)
        x = bfloat16(x)
        bound = largest_error("int8", np.abs(x).max(axis=-1, keepdims=True), x)
        assert (np.abs(numbers(stored) - x) <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_casts_saturate_and_what_is_not_finite_stays_so(format):
    """A cast of 500 to e4m3fn is NaN and of 60,000 to e5m2 infinite; here both end at the largest number."""
    x = jnp.array([[1e4, -1e4, 3.0], [1e30, 1.0, 1e-30], [0.0, 0.0, 0.0], [1e-42, 0.0, 0.0]], jnp.float32)
    values, scale = quantise(x, DTYPES[format])
    back = np.asarray(values.astype(jnp.float32) * scale)
    assert np.isfinite(back).all()
    np.testing.assert_allclose(back[0, :2], [1e4, -1e4], rtol=1e-6)
    np.testing.assert_allclose(back[1, 0], 1e30, rtol=1e-6)
    assert (back[2:] == 0).all()
    assert np.isnan(np.asarray(jnp.array(500.0).astype(jnp.float8_e4m3fn), np.float32))
    for bad in (jnp.nan, jnp.inf):
        values, scale = quantise(x.at[0, 1].set(bad), DTYPES[format])
        back = np.asarray(values.astype(jnp.float32) * scale)
        assert np.isnan(back[0]).any()
        assert np.isfinite(back[1:]).all()


def test_a_product_is_that_of_the_rounded_sides(quantised):
    """In whichever order it is computed: equal to the product of both sides, rounded, in float64. With a float32 side,
    two of a kind, two of different kinds, and blocks."""
    x = np.random.default_rng(1).standard_normal((3, 5, 4, 8)) * np.logspace(-2, 2, 5)[:, None, None]
    x = jnp.asarray(x.astype(np.float32))
    weights = {
        key: jax.tree.map(lambda leaf: leaf[1], of_model["layers"]["attention_out"])
        for key, of_model in quantised.items()
        if key[1] != "tensor"
    }
    activations = ("float32", "fp8_e4m3", "fp8_e5m2", "int8")

    @jax.jit
    def all_of_them(x, weights):
        found = [[product(x, weight, 2, format) for format in activations] for weight in weights]
        return found, [quantise(x, DTYPES[format], (-2, -1)) for format in activations[1:]]

    found, quantised_x = all_of_them(x, list(weights.values()))
    rounded = [np.asarray(x, np.float64), *(numbers(qwix.QArray(*pair)) for pair in quantised_x)]
    for of_weight, weight in zip(found, weights.values(), strict=True):
        for got, side in zip(of_weight, rounded, strict=True):
            expected, size = (np.tensordot(f(side), f(numbers(weight)), 2) for f in (np.asarray, np.abs))
            assert (np.abs(np.asarray(got) - expected) <= 1e-5 * size).all()


@pytest.mark.parametrize("format", LARGEST)
@pytest.mark.parametrize("scales", ["tensor", "channel", "block"])
@pytest.mark.parametrize("activations", ["float32", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_products_are_in_the_formats_that_are_said(quantised, format, scales, activations):
    """`multiplied_as` against what is traced, for weights with one contracted axis and with two."""
    precision = Precision(format, activations, scales=scales, block_size=8 if scales == "block" else 32)
    for name, inputs in (("query", 1), ("attention_out", 2), ("down", 1)):
        weight = jax.tree.map(lambda leaf: leaf[0], quantised[format, scales]["layers"][name])
        x = jax.ShapeDtypeStruct((3, *weight.qvalue.shape[:inputs]), DTYPES[precision.compute])
        traced = jax.make_jaxpr(lambda x, weight, n=inputs: product(x, weight, n, activations))(x, weight)
        (operands,) = products_in(traced.jaxpr)
        assert operands == [DTYPES[one] for one in multiplied_as(precision)]


def products_in(jaxpr) -> list[list]:
    """The dtypes of both sides of every product."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append([operand.aval.dtype for operand in equation.invars])
        for inner in equation.params.values():
            found += products_in(inner.jaxpr) if hasattr(inner, "jaxpr") else []
    return found


def test_scales_of_a_shared_input_do_not_depend_on_the_mesh(quantised):
    """Each device of a tensor group holds a part of a token's numbers; they agree on its scale."""
    weight = jax.tree.map(lambda leaf: leaf[0], quantised["int8", "channel"]["layers"]["down"])
    x = np.random.default_rng(1).standard_normal((3, 32)) * np.logspace(-2, 2, 32)
    x = jnp.asarray(x.astype(np.float32))
    alone = jax.jit(lambda x, weight: product(x, weight, 1, "int8"))(x, weight)
    mesh = make_mesh(MeshShape(data=1, tensor=8))
    spec = jax.sharding.PartitionSpec
    shared = jax.shard_map(
        lambda x, weight: sharding.sum_over_tensor(product(x, weight, 1, "int8")),
        mesh=mesh,
        in_specs=(spec(None, "tensor"), qwix.QArray(spec("tensor"), spec(), qtype=weight.qtype)),
        out_specs=spec(),
    )
    shared = jax.jit(shared)(x, weight)
    np.testing.assert_allclose(shared, alone, rtol=1e-5)


def test_a_cache_gives_back_what_it_was_given():
    """Within half a step of each token's and head's own scale; a written token leaves the others as they are."""
    rng = np.random.default_rng(0)
    given = rng.standard_normal((2, 2, 3, 4, 2, 8)) * np.logspace(-3, 4, 24).reshape(1, 1, 3, 4, 2, 1)
    new = rng.standard_normal((2, 3, 2, 8)) * 1e4
    given, new = (jnp.asarray(array.astype(np.float32)) for array in (given, new))
    formats = ("float32", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8")
    positions = jnp.array([0, 3, 9])  # slot 9 is out of bounds: not written

    @jax.jit
    def before_and_after(given, new):
        found = []
        for format in formats:
            cache = KVCache(*given.swapaxes(3, 4)).stored_as(format)
            written = cache.write(jnp.int32(1), jnp.arange(3), positions, *new)
            assert written.keys.dtype == DTYPES[format]
            found.append([[c.read(jnp.int32(layer), jnp.float32, 4) for layer in range(2)] for c in (cache, written)])
        return found

    expected = np.asarray(given, np.float64)  # keys and values, layer, ...
    with_new = expected.copy()
    with_new[:, 1, [0, 1], [0, 3]] = np.asarray(new, np.float64)[:, :2]
    for format, of_format in zip(formats, before_and_after(given, new), strict=True):
        for got, want in zip(of_format, (expected, with_new), strict=True):
            got = np.asarray(got, np.float64).swapaxes(0, 1).swapaxes(3, 4)
            magnitude = np.abs(want).max(axis=-1, keepdims=True)
            steps = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
            bound = steps[format] * np.abs(want) if format in steps else largest_error(format, magnitude, want)
            assert (np.abs(got - want) <= bound * (1 + 1e-5)).all()
            assert format == "float32" or np.abs(got - want).max() > 0


@pytest.mark.parametrize(
    ("block", "tensor", "message"),
    [
        (12, 1, r"precision.block_size=12 does not divide the 8 head_dim .*'attention_out'"),
        (16, 1, r"the 8 head_dim"),
        (8, 8, r"precision.block_size=8 does not divide the 4 mlp that a device holds of weight .*'down'"),
    ],
)
def test_blocks_that_do_not_divide_are_refused(block, tensor, message):
    config = TransformerConfig(num_layers=1, embed_dim=16, num_heads=8, num_kv_heads=8, head_dim=8, mlp_dim=32)
    _, abstract = abstract_model(config, 16)
    mesh = make_mesh(MeshShape(data=8 // tensor, tensor=tensor))
    with pytest.raises(ValueError, match=message):
        check_fits(
            Precision("int4", scales="block", block_size=block),
            abstract,
            weight_specs(abstract, mesh, sharding.SAMPLER_RULES),
            mesh,
        )


def test_a_head_that_is_the_embedding_cannot_be_included_by_itself():
    config = dataclasses.replace(CONFIG, tied_embeddings=True)
    _, abstract = abstract_model(config, VOCAB)
    mesh = make_mesh(devices=jax.devices()[:1])
    specs = weight_specs(abstract, mesh, sharding.SAMPLER_RULES)
    check_fits(Precision("int8", include=("embedding",)), abstract, specs, mesh)
    with pytest.raises(ValueError, match=r"precision.include has head, but the embedding .* include embedding"):
        check_fits(Precision("int8", include=("head",)), abstract, specs, mesh)
