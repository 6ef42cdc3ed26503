"""Attention, in the one place where an implementation is chosen."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int


def causal_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N H"]:
    """Every token attends to itself and to the tokens before it, of its own segment if those are given."""
    mask = None if segment_ids is None else segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    with jax.numpy_dtype_promotion("standard"):  # JAX's implementation mixes bfloat16 and float32
        return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True)


def cached_attention(
    query: Float[Array, "B 1 N H"],
    keys: Float[Array, "B S K H"],
    values: Float[Array, "B S K H"],
    num_slots: Int[Array, " B"],
) -> Float[Array, "B 1 N H"]:
    """One token a row attends to the first `num_slots` slots of its cache."""
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(query, keys, values, key_value_seq_lengths=num_slots)
