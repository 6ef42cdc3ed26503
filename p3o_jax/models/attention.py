"""Attention, in the one place where an implementation is chosen.

| rows            | CPU          | GPU, 16 bit    | GPU, 32 bit  | TPU          |
|-----------------|--------------|----------------|--------------|--------------|
| short           | XLA          | XLA            | XLA          | XLA          |
| `LONG` and more | XLA, chunked | cuDNN          | XLA, chunked | splash       |

XLA's is `jax.nn.dot_product_attention` or equal to it, and holds [T, T] scores in float32 for
every head; of long rows it is given `CHUNK` queries at a time, recomputed in the backward pass.
cuDNN's needs a mask where rows are packed, [T, T] in 16 bit, the same for all heads; it has no soft-cap, so that with
one XLA's, chunked, is taken. Where layers differ in their window both forms of a kernel are compiled.
The platform is that of the mesh the program is traced for, which need not be this machine's.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from p3o_jax.devices import sharding
from p3o_jax.models.splash import splash_attention

LONG = 1024
CHUNK = 512


class AttentionForm(NamedTuple):
    """What families differ in, the same for all layers of a model."""

    scale: float | None = None  # of the scores; None: H ** -0.5
    softcap: float | None = None  # scores are softcap * tanh(scores / softcap)
    window: int | None = None  # tokens, itself included, that a token sees in a sliding layer


PLAIN = AttentionForm()


def causal_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None = None,
    form: AttentionForm = PLAIN,
    sliding: Bool[Array, ""] | None = None,
) -> Float[Array, "B T N H"]:
    """Every token attends to itself and to the tokens before it, of its own segment if those are given.

    Args:
        sliding: whether to no more of them than the window; None: no.
    """
    platform = sharding.platform()
    arguments = (query, key, value, segment_ids, form, sliding)
    if query.shape[1] < LONG:
        return dense_attention(*arguments)
    if platform == "tpu":
        segments = jnp.zeros_like(query[:, :, 0, 0], jnp.int32) if segment_ids is None else segment_ids
        return splash_attention(query, key, value, segments, *form, sliding)
    fits_cudnn = query.dtype in (jnp.bfloat16, jnp.float16) and query.shape[-1] % 8 == 0 and form.softcap is None
    if platform == "gpu" and fits_cudnn:
        return cudnn_attention(*arguments)
    return chunked_attention(*arguments)


def _xla_attention(query: Array, key: Array, value: Array, mask: Bool[Array, "#B 1 T S"], form: AttentionForm) -> Array:
    """Attention where `mask`. JAX's in float32; in 16 bit its gradient has no lowering under strict promotion."""
    if query.dtype == jnp.float32 and form.softcap is None:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=form.scale, implementation="xla")
    batch, length, num_heads, width = query.shape
    grouped = query.reshape(batch, length, key.shape[2], -1, width)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key, preferred_element_type=jnp.float32)
    weights = _attention_weights(scores, mask[:, :, None], width, form).astype(value.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, value).reshape(batch, length, num_heads, width)


def _attention_weights(scores: Array, mask: Bool[Array, "..."], width: int, form: AttentionForm) -> Array:
    """softmax over the last axis of what is scored, float32."""
    scores = scores * (width**-0.5 if form.scale is None else form.scale)
    if form.softcap is not None:
        scores = form.softcap * jnp.tanh(scores / form.softcap)
    return jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), axis=-1)


def _same_segment(rows: Int[Array, "B T"], columns: Int[Array, "B S"]) -> Bool[Array, "B 1 T S"]:
    return rows[:, None, :, None] == columns[:, None, None, :]


def _seen(distance: Int[Array, "..."], form: AttentionForm, sliding: Bool[Array, ""] | None) -> Bool[Array, "..."]:
    """Which keys a query sees, by how many tokens they are before it."""
    seen = distance >= 0
    if sliding is None or form.window is None:
        return seen
    return seen & (~sliding | (distance < form.window))


def dense_attention(
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array | None = None,
    form: AttentionForm = PLAIN,
    sliding: Array | None = None,
) -> Array:
    """`causal_attention` by XLA, with all scores at once."""
    at = jnp.arange(query.shape[1])
    mask = _seen(at[:, None] - at[None, :], form, sliding)[None, None]
    if segment_ids is not None:
        mask = mask & _same_segment(segment_ids, segment_ids)
    return _xla_attention(query, key, value, mask, form)


def chunked_attention(
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array | None = None,
    form: AttentionForm = PLAIN,
    sliding: Array | None = None,
    chunk: int = CHUNK,
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
        mask = _seen(at[0][:, None] - positions, form, sliding)[None, None]
        if segments is not None and segment_ids is not None:
            mask = mask & _same_segment(segments, segment_ids)
        return _xla_attention(query, key, value, mask, form)

    parts = (split(query), split(positions[None]), None if segment_ids is None else split(segment_ids))
    out = jax.lax.map(lambda part: attend(*part), parts)
    return out.swapaxes(0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :length]


def cudnn_attention(
    query: Array,
    key: Array,
    value: Array,
    segment_ids: Array | None = None,
    form: AttentionForm = PLAIN,
    sliding: Array | None = None,
) -> Array:
    """`causal_attention` by cuDNN's fused kernel, for bfloat16 and float16; a GPU is needed to trace it.

    Raises:
        ValueError: a soft-cap, which it does not have.
    """
    if form.softcap is not None:
        raise ValueError("attention: cuDNN's has no soft-cap")
    odd = query.shape[1] % 2  # its gradient under a mask needs an even number of tokens

    def pad(array: Array, filler: int = 0) -> Array:
        return jnp.pad(array, ((0, 0), (0, odd)) + ((0, 0),) * (array.ndim - 2), constant_values=filler)

    query, key, value = pad(query), pad(key), pad(value)
    mask = None
    if segment_ids is not None:
        padded = pad(segment_ids, -1)
        mask = _same_segment(padded, padded)

    def attend(query: Array, key: Array, value: Array, window: tuple[int, int] | None = None) -> Array:
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(
                query,
                key,
                value,
                mask=mask,
                scale=form.scale,
                is_causal=True,
                local_window_size=window,
                implementation="cudnn",
            )

    if sliding is None or form.window is None:
        out = attend(query, key, value)
    else:
        windowed = partial(attend, window=(form.window - 1, 0))
        out = jax.lax.cond(sliding, windowed, attend, query, key, value)
    return out[:, : out.shape[1] - odd]


def cached_attention(
    query: Float[Array, "B 1 N H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    num_slots: Int[Array, " B"],
    form: AttentionForm = PLAIN,
    sliding: Bool[Array, ""] | None = None,
) -> Float[Array, "B 1 N H"]:
    """One token a row attends to the first `num_slots` slots of its cache, the last of which is its own; in a sliding
    layer to no more of them than the window."""
    batch, _, _, width = query.shape
    grouped = query.reshape(batch, keys.shape[1], -1, width)
    scores = jnp.einsum("BKGH,BKSH->BKGS", grouped, keys, preferred_element_type=jnp.float32)
    seen = _seen(num_slots[:, None] - 1 - jnp.arange(keys.shape[2]), form, sliding)
    weights = _attention_weights(scores, seen[:, None, None], width, form).astype(values.dtype)
    return jnp.einsum("BKGS,BKSH->BKGH", weights, values).reshape(query.shape)
