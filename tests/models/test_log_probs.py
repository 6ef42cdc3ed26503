"""Chunked log-probs and entropy against the dense ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from p3o_jax.devices.sharding import MeshShape, make_mesh
from p3o_jax.models.log_probs import token_distributions, token_log_probs
from p3o_jax.objectives import kl


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


def supports(vocab=16, shape=(3, 7), k=4):
    """Each kind of support, as [B, T, K] indices too."""
    hidden, head, _, temperature = problem(vocab, shape)
    best = jax.lax.top_k(hidden @ head.T / temperature[..., None], k)[1]
    some = jax.random.permutation(jax.random.key(5), vocab)[: 3 * k].reshape(3, 1, k)
    everything = jnp.broadcast_to(jnp.arange(vocab), (*shape, vocab))
    return {"indices": (jnp.broadcast_to(some, (*shape, k)),) * 2, "top_k": (k, best), "exact": ("exact", everything)}


def dense_support(hidden, head, targets, temperature, indices):
    log_probs = jax.nn.log_softmax(hidden @ head.T / temperature[..., None])
    return *dense(hidden, head, targets, temperature), jnp.take_along_axis(log_probs, indices, axis=-1)


@pytest.mark.parametrize("kind", ["indices", "top_k", "exact"])
@pytest.mark.parametrize("tensor", [1, 4])
def test_support_equals_dense(kind, tensor):
    """Chosen tokens, the most likely or all, with the vocabulary in one piece or sharded, in ragged chunks."""
    support, indices = supports()[kind]
    arguments = problem()
    mesh = make_mesh(MeshShape(data=8 // tensor, tensor=tensor))
    whole, vocabulary = P(), P("tensor") if tensor > 1 else P()

    @jax.jit
    def found(hidden, head, *rest):
        run = lambda *a: token_distributions(*a, support=support, chunk_tokens=4)  # noqa: E731
        specs = (whole, vocabulary, whole, whole)
        return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=whole)(hidden, head, *rest)

    got, expected = found(*arguments), dense_support(*arguments, indices)
    for a, b in zip(got[:3], expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    if kind == "top_k":
        np.testing.assert_array_equal(got.indices, indices)
        return
    assert got.indices is None
    got, expected = (
        jax.grad(weighted(f), argnums=(0, 1))(*arguments)
        for f in (lambda *a: found(*a)[:3], lambda *a: dense_support(*a, indices))
    )
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_top_k_of_everything_is_everything():
    """More tokens than a shard has, and than there are."""
    arguments = problem()
    mesh = make_mesh(MeshShape(data=1, tensor=8))
    specs = (P(), P("tensor"), P(), P())
    run = jax.shard_map(lambda *a: token_distributions(*a, support=99), mesh=mesh, in_specs=specs, out_specs=P())
    found = jax.jit(run)(*arguments)
    np.testing.assert_array_equal(np.sort(found.indices), np.broadcast_to(np.arange(16), (3, 7, 16)))
    assert (np.diff(found.support_log_probs) <= 0).all()
    np.testing.assert_allclose(jnp.exp(found.support_log_probs).sum(-1), 1, rtol=1e-5)


def test_gradient_of_the_head_is_accumulated_in_float32():
    """Many chunks of a bfloat16 model: rounded once at the end, not at every chunk."""
    hidden, head, targets, temperature = problem(vocab=8, shape=(1, 4096), scale=0.5)
    hidden, head = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    exact = jax.grad(lambda h: token_log_probs(hidden.astype(jnp.float32), h, targets, temperature)[0].sum())(
        head.astype(jnp.float32)
    )
    got = jax.grad(lambda h: token_log_probs(hidden, h, targets, temperature, chunk_tokens=4)[0].sum())(head)
    assert got.dtype == jnp.bfloat16
    assert jnp.abs(got.astype(jnp.float32) - exact).max() < 0.01 * jnp.abs(exact).max()


@pytest.mark.parametrize("top_k", [0, 64])
def test_logits_are_never_held_at_full_size(top_k):
    """16,384 tokens and a vocabulary of 151,936: the temporary bytes of values and gradients, compiled, against
    the dense computation's; also with the KL to a distribution's top k."""
    tokens, vocab, width = 16_384, 151_936, 1024
    struct = jax.ShapeDtypeStruct
    hidden, head = struct((1, tokens, width), jnp.bfloat16), struct((vocab, width), jnp.bfloat16)
    targets, temperature = struct((1, tokens), jnp.int32), struct((1, tokens), jnp.float32)
    indices, anchor = struct((1, tokens, top_k), jnp.int32), struct((1, tokens, top_k), jnp.float32)

    def ours(hidden, head, targets, temperature, indices):
        return token_distributions(hidden, head, targets, temperature, indices if top_k else None)[:3]

    def naive(hidden, head, targets, temperature, indices):
        logits = jnp.einsum("BTD,VD->BTV", hidden, head, preferred_element_type=jnp.float32)
        log_probs = jax.nn.log_softmax(logits / temperature[..., None])
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
        of_targets = jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0]
        return of_targets, entropy, jnp.take_along_axis(log_probs, indices, -1)

    def temporary_bytes(function):
        def loss(hidden, head, targets, temperature, indices, anchor):
            log_probs, entropy, support = function(hidden, head, targets, temperature, indices)
            divergence = kl.distribution("top_k", support, anchor).sum() if top_k else 0.0
            return log_probs.sum() + 0.1 * entropy.sum() + divergence

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, head, targets, temperature, indices, anchor)
        return compiled.compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(ours) < 0.15 * temporary_bytes(naive)
