"""Attention, in the one place where an implementation is chosen.

| rows            | CPU          | GPU, 16 bit    | GPU, 32 bit  | TPU          |
|-----------------|--------------|----------------|--------------|--------------|
| short           | XLA          | XLA            | XLA          | XLA          |
| `LONG` and more | XLA, chunked | cuDNN          | XLA, chunked | splash       |

XLA's is `jax.nn.dot_product_attention` or equal to it, and holds [T, T] scores in float32 for
every head; of long rows it is given `CHUNK` queries at a time, recomputed in the backward pass.
cuDNN's needs a mask where rows are packed, [T, T] in 16 bit, the same for all heads.
The platform is that of the mesh the program is traced for, which need not be this machine's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from p3o_jax import sharding
from p3o_jax.models.splash import splash_attention

LONG = 1024
CHUNK = 512


def causal_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N H"]:
    """Every token attends to itself and to the tokens before it, of its own segment if those are given."""
    platform = sharding.platform()
    if query.shape[1] < LONG:
        return dense_attention(query, key, value, segment_ids)
    if platform == "tpu":
        segments = jnp.zeros_like(query[:, :, 0, 0], jnp.int32) if segment_ids is None else segment_ids
        return splash_attention(query, key, value, segments)
    if platform == "gpu" and query.dtype in (jnp.bfloat16, jnp.float16) and query.shape[-1] % 8 == 0:
        return cudnn_attention(query, key, value, segment_ids)
    return chunked_attention(query, key, value, segment_ids)


def _xla_attention(query: Array, key: Array, value: Array, mask: Bool[Array, "#B 1 T S"]) -> Array:
    """Attention where `mask`. JAX's in float32; in 16 bit its gradient has no lowering under strict promotion."""
    if query.dtype == jnp.float32:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="xla")
    batch, length, num_heads, width = query.shape
    grouped = query.reshape(batch, length, key.shape[2], -1, width)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key, preferred_element_type=jnp.float32) * width**-0.5
    scores = jnp.where(mask[:, :, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, value).reshape(batch, length, num_heads, width)


def _same_segment(rows: Int[Array, "B T"] | None, columns: Int[Array, "B S"] | None) -> Bool[Array, "B 1 T S"] | None:
    return None if rows is None else rows[:, None, :, None] == columns[:, None, None, :]


def dense_attention(query: Array, key: Array, value: Array, segment_ids: Array | None = None) -> Array:
    """`causal_attention` by XLA, with all scores at once."""
    at = jnp.arange(query.shape[1])
    mask = (at[None, :] <= at[:, None])[None, None]
    if segment_ids is not None:
        mask = mask & _same_segment(segment_ids, segment_ids)
    return _xla_attention(query, key, value, mask)


def chunked_attention(
    query: Array, key: Array, value: Array, segment_ids: Array | None = None, chunk: int = CHUNK
) -> Array:
    """`causal_attention` by XLA, with the scores of `chunk` queries at a time."""
    length = query.shape[1]
    positions = jnp.arange(length)
    padding = -length % chunk

    def split(array: Array) -> Array:
        """[B, T, ...] -> [T / chunk, B, chunk, ...]."""
        array = jnp.pad(array, ((0, 0), (0, padding)) + ((0, 0),) * (array.ndim - 2))
        return array.reshape(array.shape[0], -1, chunk, *array.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def attend(query: Array, at: Array, segments: Array | None) -> Array:
        mask = (positions <= at[0][:, None])[None, None]
        if segments is not None:
            mask = mask & _same_segment(segments, segment_ids)
        return _xla_attention(query, key, value, mask)

    parts = (split(query), split(positions[None]), None if segment_ids is None else split(segment_ids))
    out = jax.lax.map(lambda part: attend(*part), parts)
    return out.swapaxes(0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :length]


def cudnn_attention(query: Array, key: Array, value: Array, segment_ids: Array | None = None) -> Array:
    """`causal_attention` by cuDNN's fused kernel, for bfloat16 and float16; a GPU is needed to trace it."""
    odd = query.shape[1] % 2  # its gradient under a mask needs an even number of tokens

    def pad(array: Array, filler: int = 0) -> Array:
        return jnp.pad(array, ((0, 0), (0, odd)) + ((0, 0),) * (array.ndim - 2), constant_values=filler)

    query, key, value = pad(query), pad(key), pad(value)
    segment_ids = None if segment_ids is None else pad(segment_ids, -1)
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(
            query, key, value, mask=_same_segment(segment_ids, segment_ids), is_causal=True, implementation="cudnn"
        )
    return out[:, : out.shape[1] - odd]


def cached_attention(
    query: Float[Array, "B 1 N H"],
    keys: Float[Array, "B S K H"],
    values: Float[Array, "B S K H"],
    num_slots: Int[Array, " B"],
) -> Float[Array, "B 1 N H"]:
    """One token a row attends to the first `num_slots` slots of its cache."""
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(query, keys, values, key_value_seq_lengths=num_slots)
