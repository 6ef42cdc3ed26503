"""Every implementation of attention against the dense one, values and gradients."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from p3o_jax.devices import sharding
from p3o_jax.devices.sharding import MeshShape, make_mesh
from p3o_jax.models import attention
from p3o_jax.models.attention import AttentionForm, causal_attention, chunked_attention, dense_attention
from p3o_jax.models.splash import splash_attention

LENGTH = 150  # no multiple of any block
ROWS, HEADS, KV_HEADS, WIDTH = 4, 4, 2, 24


def problem(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(ROWS, LENGTH, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    arrays = [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=False)]
    segments = jnp.sort(jax.random.randint(keys[3], (ROWS, LENGTH), -1, 3), axis=1)
    return *arrays, segments


def weighted(attend, query, *rest):
    out = attend(query, *rest)
    return (jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape) * out.astype(jnp.float32)).sum()


def values_and_gradients(attend, arrays, segments):
    gradients = jax.jit(jax.grad(partial(weighted, attend), argnums=(0, 1, 2)))
    return jax.jit(attend)(*arrays, segments), *gradients(*arrays, segments)


IMPLEMENTATIONS = {
    "chunked": partial(chunked_attention, chunk=64),
    "splash": partial(splash_attention, block=128, interpret=True),
}


@pytest.fixture(scope="module")
def expected():
    *arrays, segments = problem()
    return {packed: values_and_gradients(dense_attention, arrays, segments * packed) for packed in (0, 1)}


@pytest.mark.parametrize("packed", [0, 1])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_values_and_gradients_equal_dense_attention(name, packed, expected):
    *arrays, segments = problem()
    got = values_and_gradients(IMPLEMENTATIONS[name], arrays, segments * packed)
    for a, b in zip(got, expected[packed], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * float(jnp.abs(b).max()) + 1e-6)
    assert jnp.abs(expected[0][0] - expected[1][0]).max() > 0.1  # segments matter


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_sharded_rows_and_heads(name, expected):
    """Inside the learner's kind of `shard_map`, which checks what varies, with its gradient taken inside as well."""
    *arrays, segments = problem()
    mesh = make_mesh(MeshShape(data=2, fsdp=2, tensor=2))
    rows, heads = PartitionSpec(("data", "fsdp")), PartitionSpec(("data", "fsdp"), None, "tensor")

    def local(weights, query, key, value, segments):
        def loss(*arrays):
            return (weights * IMPLEMENTATIONS[name](*arrays, segments)).sum()

        return IMPLEMENTATIONS[name](query, key, value, segments), *jax.grad(loss, argnums=(0, 1, 2))(query, key, value)

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(heads,) * 4 + (rows,), out_specs=(heads,) * 4))
    weights = jnp.cos(jnp.arange(arrays[0].size, dtype=jnp.float32)).reshape(arrays[0].shape)
    for a, b in zip(run(weights, *arrays, segments), expected[1], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * float(jnp.abs(b).max()) + 1e-6)


FORM = AttentionForm(scale=0.3, softcap=1.5, window=37)


@pytest.fixture(scope="module")
def expected_of_form():
    *arrays, segments = problem()
    attend = jax.jit(lambda q, k, v, s, sliding: dense_attention(q, k, v, s, FORM, sliding))
    gradients = jax.jit(jax.grad(partial(weighted, attend), argnums=(0, 1, 2)))
    return {
        sliding: (attend(*arrays, segments, sliding), *gradients(*arrays, segments, sliding))
        for sliding in (False, True)
    }


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_scale_soft_cap_and_a_window_in_some_layers(name, expected_of_form):
    """Which layers have the window is decided in the program, as it is in a scan over layers."""
    *arrays, segments = problem()
    form = dict(zip(("scale", "softcap", "window"), FORM, strict=True)) if name == "splash" else {"form": FORM}

    def attend(q, k, v, s, sliding):
        return IMPLEMENTATIONS[name](q, k, v, s, sliding=sliding, **form)

    run = jax.jit(attend)
    gradients = jax.jit(jax.grad(partial(weighted, attend), argnums=(0, 1, 2)))
    for sliding, expected in expected_of_form.items():
        got = (run(*arrays, segments, sliding), *gradients(*arrays, segments, sliding))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6 * float(jnp.abs(b).max()) + 1e-6)
    assert jnp.abs(expected_of_form[0][0] - expected_of_form[1][0]).max() > 0.1  # the window matters


@pytest.mark.long
def test_windows_inside_the_learners_kind_of_program():
    """Splash under `shard_map`, in a scan over layers of which one has the window, recomputed in the backward pass."""
    query, key, value, segments = (array[:, :128] for array in problem())
    weights = jnp.cos(jnp.arange(query.size, dtype=jnp.float32)).reshape(query.shape)
    sliding = jnp.array([True, False])
    rows, heads = PartitionSpec(("data", "fsdp")), PartitionSpec(("data", "fsdp"), None, "tensor")

    def gradients(attend, weights, query, key, value, segments, sliding):
        @jax.checkpoint
        def layer(x, sliding, key, value):
            return attend(x, key, value, segments, sliding), None

        def loss(query, key, value):
            out, _ = jax.lax.scan(lambda x, of_layer: layer(x, of_layer, key, value), query, sliding)
            return (weights * out).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)

    def splash(query, key, value, segments, sliding):
        return splash_attention(query, key, value, segments, *FORM, sliding, block=128, interpret=True)

    def dense(query, key, value, segments, sliding):
        return dense_attention(query, key, value, segments, FORM, sliding)

    sharded = jax.shard_map(
        partial(gradients, splash),
        mesh=make_mesh(MeshShape(data=2, fsdp=2, tensor=2)),
        in_specs=(heads,) * 4 + (rows, PartitionSpec()),
        out_specs=(heads,) * 3,
    )
    arguments = (weights, query, key, value, segments, sliding)
    for a, b in zip(jax.jit(sharded)(*arguments), jax.jit(partial(gradients, dense))(*arguments), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * float(jnp.abs(b).max()) + 1e-6)


def test_a_window_of_the_whole_row_is_none_and_a_soft_cap_bounds():
    *arrays, segments = problem()
    plain = dense_attention(*arrays, segments)
    wide = dense_attention(*arrays, segments, AttentionForm(window=LENGTH), jnp.array(True))
    np.testing.assert_array_equal(wide, plain)
    uncapped = dense_attention(*arrays, segments, AttentionForm(softcap=1e6))
    np.testing.assert_allclose(uncapped, plain, atol=1e-4)
    alone = dense_attention(*arrays, segments, AttentionForm(window=1), jnp.array(True))
    value = jnp.repeat(arrays[2], HEADS // KV_HEADS, axis=2)
    np.testing.assert_allclose(alone, value, atol=1e-6)


def test_without_segments_a_row_is_one():
    *arrays, segments = problem()
    np.testing.assert_array_equal(chunked_attention(*arrays), chunked_attention(*arrays, segments * 0))
    np.testing.assert_array_equal(dense_attention(*arrays), dense_attention(*arrays, segments * 0))


@pytest.mark.parametrize("name", [*IMPLEMENTATIONS, "dense"])
def test_bfloat16_stays_bfloat16(name, expected):
    """Values and gradients, rounded, under strict promotion."""
    attend = {**IMPLEMENTATIONS, "dense": dense_attention}[name]
    *arrays, segments = problem(jnp.bfloat16)
    for a, b in zip(values_and_gradients(attend, arrays, segments), expected[1], strict=True):
        assert a.dtype == jnp.bfloat16
        assert jnp.abs(a.astype(jnp.float32) - b).max() < 0.03 * jnp.abs(b).max()


def scores_bytes(attend, length):
    """Temporary bytes of the compiled gradient."""
    arrays = [jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32) for heads in (4, 4, 4)]
    gradient = jax.jit(jax.grad(lambda *a: weighted(lambda q, k, v: attend(q, k, v), *a), argnums=(0, 1, 2)))
    return gradient.lower(*arrays).compile().memory_analysis().temp_size_in_bytes


def test_long_rows_do_not_hold_all_scores():
    assert scores_bytes(causal_attention, 4096) < 0.3 * scores_bytes(dense_attention, 4096)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("platform", "dtype", "length", "chosen"),
    [
        ("cpu", jnp.float32, 64, "dense"),
        ("cpu", jnp.float32, 2048, "chunked"),
        ("tpu", jnp.bfloat16, 64, "dense"),
        ("tpu", jnp.bfloat16, 2048, "splash"),
        ("tpu", jnp.float32, 2048, "splash"),
        ("gpu", jnp.bfloat16, 2048, "cudnn"),
        ("gpu", jnp.float32, 2048, "chunked"),
    ],
)
def test_the_platform_decides(monkeypatch, platform, dtype, length, chosen):
    for name in ("dense", "chunked", "splash", "cudnn"):
        monkeypatch.setattr(attention, f"{name}_attention", lambda *_, name=name: name)
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    query = jnp.zeros((1, length, 2, 8), dtype)
    assert causal_attention(query, query, query) == chosen
    capped = causal_attention(query, query, query, None, AttentionForm(softcap=2.0))
    assert capped == ("chunked" if chosen == "cudnn" else chosen)  # which has no soft-cap


def test_cudnn_refuses_what_it_does_not_have():
    query = jnp.zeros((1, 4, 2, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match="cuDNN's has no soft-cap"):
        attention.cudnn_attention(query, query, query, None, AttentionForm(softcap=2.0))


def test_the_platform_is_the_meshs():
    """A program for a described TPU is traced for a TPU, on a machine without one."""
    seen = []

    def local(x):
        seen.append(sharding.platform())
        return x

    device = jax.sharding.AbstractDevice(device_kind="TPU v5p", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((2,), ("data",), abstract_device=device)
    spec = PartitionSpec("data")
    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec), jnp.zeros(4))
    jax.eval_shape(jax.shard_map(local, mesh=make_mesh(), in_specs=spec, out_specs=spec), jnp.zeros(8))
    assert seen == ["tpu", "cpu"]
    assert sharding.platform() == "cpu"
