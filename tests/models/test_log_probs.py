"""Chunked log-probs and entropy against the dense ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from p3o_jax.models.log_probs import token_log_probs
from p3o_jax.sharding import MeshShape, make_mesh


def problem(vocab=16, shape=(3, 7), width=5, scale=3.0):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (*shape, width)) * scale
    head = jax.random.normal(keys[1], (vocab, width))
    targets = jax.random.randint(keys[2], shape, 0, vocab)
    temperature = jax.random.uniform(keys[3], shape, minval=0.5, maxval=2.0)
    return hidden, head, targets, temperature


def dense(hidden, head, targets, temperature):
    log_probs = jax.nn.log_softmax(hidden @ head.T / temperature[..., None])
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    return jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0], entropy


def weighted(function):
    """A scalar that depends on both outputs, for gradients."""
    return lambda hidden, head, *rest: sum(
        (jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) * x).sum() for x in function(hidden, head, *rest)
    )


@pytest.mark.parametrize("chunk", [1, 4, 7, 21, 1000])
def test_values_and_gradients_do_not_depend_on_the_chunk(chunk):
    arguments = problem()
    chunked = lambda *a: token_log_probs(*a, chunk_tokens=chunk)  # noqa: E731
    for got, expected in zip(chunked(*arguments), dense(*arguments), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    got, expected = (jax.grad(weighted(f), argnums=(0, 1))(*arguments) for f in (chunked, dense))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_vocabulary_may_be_sharded():
    arguments = problem()
    mesh = make_mesh(MeshShape(data=2, tensor=4))
    rows, vocabulary = P(), P("tensor")

    @jax.jit
    def sharded(hidden, head, targets, temperature):
        return jax.shard_map(
            token_log_probs, mesh=mesh, in_specs=(rows, vocabulary, rows, rows), out_specs=(rows, rows)
        )(hidden, head, targets, temperature)

    for got, expected in zip(sharded(*arguments), dense(*arguments), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    got, expected = (jax.grad(weighted(f), argnums=(0, 1))(*arguments) for f in (sharded, dense))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_large_logits_stay_finite():
    hidden, head, targets, temperature = problem(scale=1e4)
    log_probs, entropy = token_log_probs(hidden, head, targets, temperature)
    assert jnp.isfinite(log_probs).all()
    assert (entropy >= 0).all()
    assert (log_probs <= 0).all()


def test_the_full_logits_are_never_held():
    """Peak temporary memory of the gradient, compiled: far below the dense computation's."""
    shapes = [(1, 4096, 8), (4096, 8)]
    hidden, head = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    targets = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    temperature = jax.ShapeDtypeStruct((1, 4096), jnp.float32)

    def temporary_bytes(function):
        gradient = jax.jit(jax.grad(weighted(function), argnums=(0, 1)))
        return gradient.lower(hidden, head, targets, temperature).compile().memory_analysis().temp_size_in_bytes

    chunked = temporary_bytes(lambda *a: token_log_probs(*a, chunk_tokens=128))
    assert chunked < 0.15 * temporary_bytes(dense)
