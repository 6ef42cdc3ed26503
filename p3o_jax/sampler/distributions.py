"""What is kept of the distributions that tokens are drawn from, besides the drawn token's own log-prob."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from p3o_jax.batch.types import Support


def empty_support(support: int | str | None, shape: tuple[int, ...], vocab_size: int) -> Support | None:
    """Room for what `distribution` gives, at every token of [B, S]."""
    if support is None:
        return None
    if isinstance(support, str):
        return Support(behaviour_log_probs=jnp.zeros((*shape, vocab_size), jnp.float32))
    room = (*shape, min(support, vocab_size))
    return Support(jnp.zeros(room, jnp.int32), jnp.zeros(room, jnp.float32))


def distribution(log_probs: Float[Array, "B V"], support: int | str | None) -> Support | None:
    """The distribution of every row, as much of it as `support` says; -inf at tokens that cannot be drawn."""
    if support is None:
        return None
    if isinstance(support, str):
        return Support(behaviour_log_probs=log_probs)
    largest, indices = jax.lax.top_k(log_probs, min(support, log_probs.shape[-1]))
    return Support(indices, largest)
