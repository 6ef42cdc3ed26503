"""Log-probabilities, entropy and a distribution's support, of tokens, without holding [B, T, V].

Tokens are taken in chunks; a chunk's logits are recomputed in the backward pass, where the
head's gradient is accumulated in float32. The vocabulary may be sharded over `tensor`.
Softmax is in float32 of float32 logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from p3o_jax.devices import sharding


class TokenDistributions(NamedTuple):
    """What is kept of the distributions softmax(logits / temperature), in float32 and nats."""

    log_probs: Float[Array, "B T"]  # of the targets
    entropy: Float[Array, "B T"]
    support_log_probs: Float[Array, "B T K"] | None = None  # as the caller asks
    indices: Int[Array, "B T K"] | None = None  # of the K most likely tokens, where those were asked for


def token_log_probs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    temperature: Float[Array, "B T"],
    softcap: float | None = None,
    chunk_tokens: int = 1024,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log softmax(head @ hidden / temperature) at the targets, and the entropy in nats, both float32."""
    found = token_distributions(hidden, head, targets, temperature, softcap=softcap, chunk_tokens=chunk_tokens)
    return found.log_probs, found.entropy


def token_distributions(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    temperature: Float[Array, "B T"],
    support: Int[Array, "B T K"] | int | Literal["exact"] | None = None,
    softcap: float | None = None,
    chunk_tokens: int = 1024,
) -> TokenDistributions:
    """softmax(head @ hidden / temperature) at the targets, and at more tokens if asked.

    Differentiable in `hidden` and `head`, unless the most likely tokens are asked for.

    Args:
        head: this device's part of the vocabulary.
        support: which log-probs besides the target's. Indices: those. A number k: of the k most likely tokens
            (of all, if there are fewer), with their indices. "exact": of the whole vocabulary, which is
            [B, T, V] by nature.
        softcap: bounds the logits before the temperature, as `softcapped` does.
        chunk_tokens: at most `chunk_tokens` x V logits exist at a time.
    """
    if isinstance(support, int):
        found = _in_chunks(support, softcap, chunk_tokens, hidden, head, targets, temperature)
        return jax.lax.stop_gradient(found)
    if support is None or isinstance(support, str):
        return _differentiable(support, softcap, chunk_tokens, hidden, head, targets, temperature)
    return _differentiable(None, softcap, chunk_tokens, hidden, head, targets, temperature, support)


def softcapped(logits: Float[Array, "..."], softcap: float | None) -> Float[Array, "..."]:
    """softcap * tanh(logits / softcap), which is within +- softcap; None: the logits."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _in_chunks(
    select: int | str | None, softcap: float | None, chunk_tokens: int, hidden: Array, head: Array, *rest: Array
):
    def one_chunk(hidden: Float[Array, "N D"], *rest: Array) -> TokenDistributions:
        return _of_chunk(select, softcap, _product(hidden, head), *rest)

    split, join = _chunks(hidden.shape[:2], chunk_tokens)
    return join(_map(one_chunk, tuple(map(split, (hidden, *rest)))))


_differentiable = partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))(_in_chunks)


def _forward(select: str | None, softcap: float | None, chunk_tokens: int, *arrays: Array):
    return _in_chunks(select, softcap, chunk_tokens, *arrays), arrays


def _backward(
    select: str | None, softcap: float | None, chunk_tokens: int, arrays: tuple, gradient: TokenDistributions
):
    hidden, head, *rest = arrays

    def accumulate(head_gradient: Float[Array, "V D"], chunk: tuple):
        hidden, gradient, *rest = chunk
        _, of_logits = jax.vjp(lambda product: _of_chunk(select, softcap, product, *rest), _product(hidden, head))
        (of_product,) = of_logits(gradient)
        of_product = of_product.astype(hidden.dtype)
        part = jnp.einsum("NV,ND->VD", of_product, hidden, preferred_element_type=jnp.float32)
        of_hidden = jnp.einsum("NV,VD->ND", of_product, head, preferred_element_type=jnp.float32)
        return head_gradient + part, of_hidden.astype(hidden.dtype)

    split, join = _chunks(hidden.shape[:2], chunk_tokens)
    chunks = (split(hidden), jax.tree.map(partial(split, filler=0), gradient), *map(split, rest))
    zeros = sharding.match_variance(jnp.zeros(head.shape, jnp.float32), (head, hidden))
    head_gradient, hidden_gradient = jax.lax.scan(accumulate, zeros, chunks)
    head_gradient = sharding.sum_as_varied(head_gradient, head).astype(head.dtype)
    hidden_gradient = sharding.sum_as_varied(join(hidden_gradient), hidden)
    return hidden_gradient, head_gradient, *(None for _ in rest)


_differentiable.defvjp(_forward, _backward)


def _chunks(shape: tuple[int, ...], chunk_tokens: int) -> tuple[Callable, Callable]:
    """How arrays [B, T, ...] become chunks of tokens [C, N, ...], and trees of those whole again."""
    tokens = shape[0] * shape[1]
    chunk = min(chunk_tokens, tokens)
    padding = -tokens % chunk

    def split(array: Array, filler: int = 1) -> Array:
        flat = array.reshape(tokens, *array.shape[2:])
        if padding:
            flat = jnp.concatenate([flat, jnp.full((padding, *flat.shape[1:]), filler, flat.dtype)])
        return flat.reshape(-1, chunk, *flat.shape[1:])

    def join(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:tokens].reshape(*shape, *leaf.shape[2:]), tree
        )

    return split, join


def _map(function: Callable, chunks: tuple) -> Any:
    if chunks[0].shape[0] == 1:  # no loop, so that XLA may fuse across it
        return jax.tree.map(lambda leaf: leaf[None], function(*(array[0] for array in chunks)))
    return jax.lax.map(lambda arrays: function(*arrays), chunks)


def _product(hidden: Float[Array, "N D"], head: Float[Array, "V D"]) -> Float[Array, "N V"]:
    return jnp.einsum("ND,VD->NV", hidden, head, preferred_element_type=jnp.float32)


def _of_chunk(
    select: int | str | None,
    softcap: float | None,
    product: Float[Array, "N V"],
    targets: Int[Array, " N"],
    temperature: Float[Array, " N"],
    at: Int[Array, "N K"] | None = None,
) -> TokenDistributions:
    return _of_logits(softcapped(product, softcap) / temperature[:, None], targets, select if at is None else at)


def _of_logits(
    logits: Float[Array, "N V"], targets: Int[Array, " N"], support: Int[Array, "N K"] | int | str | None
) -> TokenDistributions:
    """The softmax over a vocabulary of which this device holds V entries."""
    shifted = logits - sharding.max_over_tensor(logits.max(axis=-1))[:, None]
    exponentials = jnp.exp(shifted)
    total = sharding.sum_over_tensor(exponentials.sum(axis=-1))
    log_total = jnp.log(total)
    mean_logit = sharding.sum_over_tensor((exponentials * shifted).sum(axis=-1)) / total
    found = TokenDistributions(_at(shifted, targets[:, None])[:, 0] - log_total, log_total - mean_logit)

    if support is None:
        return found
    if isinstance(support, str):
        return found._replace(support_log_probs=sharding.gather_over_tensor(shifted - log_total[:, None]))
    indices = None
    if isinstance(support, int):
        support = indices = most_likely(shifted, support)
    return found._replace(support_log_probs=_at(shifted, support) - log_total[:, None], indices=indices)


def _at(values: Float[Array, "N V"], indices: Int[Array, "N K"]) -> Float[Array, "N K"]:
    """Values at indices into the whole vocabulary, of which this device holds V entries."""
    local = indices - sharding.tensor_index() * values.shape[-1]
    here = (local >= 0) & (local < values.shape[-1])
    found = jnp.take_along_axis(values, jnp.where(here, local, 0), axis=-1)
    return sharding.sum_over_tensor(jnp.where(here, found, 0.0))


def most_likely(logits: Float[Array, "N V"], count: int) -> Int[Array, "N K"]:
    """Indices into the whole vocabulary of the `count` largest logits (or all), largest first."""
    largest, indices = jax.lax.top_k(jax.lax.stop_gradient(logits), min(count, logits.shape[-1]))
    indices = indices + sharding.tensor_index() * logits.shape[-1]
    largest, indices = (sharding.gather_over_tensor(part) for part in (largest, indices))
    _, best = jax.lax.top_k(largest, min(count, largest.shape[-1]))
    return jnp.take_along_axis(indices, best, axis=-1)
