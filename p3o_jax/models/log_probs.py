"""Log-probabilities and entropy of tokens without holding [B, T, V].

Tokens are taken in chunks; a chunk's logits are recomputed in the backward pass. The
vocabulary may be sharded over `tensor`. Softmax is in float32 of float32 logits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from p3o_jax import sharding


def token_log_probs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    temperature: Float[Array, "B T"],
    chunk_tokens: int = 1024,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log softmax(head @ hidden / temperature) at the targets, and the entropy in nats, both float32.

    `head` is this device's part of the vocabulary. At most `chunk_tokens` x V logits exist at a time.
    """
    batch, length, _ = hidden.shape
    tokens = batch * length
    chunk = min(chunk_tokens, tokens)
    padding = -tokens % chunk

    def split(array: Array) -> Array:
        flat = array.reshape(tokens, *array.shape[2:])
        flat = jnp.concatenate([flat, jnp.ones((padding, *flat.shape[1:]), flat.dtype)]) if padding else flat
        return flat.reshape(-1, chunk, *flat.shape[1:])

    @jax.checkpoint
    def one_chunk(hidden: Float[Array, "N D"], targets: Int[Array, " N"], temperature: Float[Array, " N"]):
        logits = jnp.einsum("ND,VD->NV", hidden, head, preferred_element_type=jnp.float32) / temperature[:, None]
        return _log_prob_and_entropy(logits, targets)

    chunks = tuple(split(array) for array in (hidden, targets, temperature))
    if padding == 0 and tokens == chunk:
        log_probs, entropy = one_chunk(*(array[0] for array in chunks))
    else:
        log_probs, entropy = jax.lax.map(lambda arrays: one_chunk(*arrays), chunks)
    return tuple(array.reshape(-1)[:tokens].reshape(batch, length) for array in (log_probs, entropy))


def _log_prob_and_entropy(
    logits: Float[Array, "N V"], targets: Int[Array, " N"]
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """The softmax over a vocabulary of which this device holds V entries."""
    shifted = logits - sharding.max_over_tensor(logits.max(axis=-1))[:, None]
    exponentials = jnp.exp(shifted)
    total = sharding.sum_over_tensor(exponentials.sum(axis=-1))
    log_total = jnp.log(total)

    local = targets - sharding.tensor_index() * logits.shape[-1]
    here = (local >= 0) & (local < logits.shape[-1])
    at_target = jnp.take_along_axis(shifted, jnp.where(here, local, 0)[:, None], axis=-1)[:, 0]
    target_logit = sharding.sum_over_tensor(jnp.where(here, at_target, 0.0))

    mean_logit = sharding.sum_over_tensor((exponentials * shifted).sum(axis=-1)) / total
    return target_logit - log_total, log_total - mean_logit
