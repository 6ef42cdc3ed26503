"""Splash attention, JAX's flash attention kernel for TPU, inside a `shard_map` that checks what varies.

The learner relies on `check_vma=True`: it is what makes its gradients right. The kernel's
Pallas calls do not say over which mesh axes their outputs vary, so they cannot be traced
there. They run in a nested `shard_map`, over no further axes, that does not check; its
results are marked as varying again. A gradient through the nested `shard_map` would compare
types that the two sides see differently, so that forward and backward are nested apiece
and joined by a `custom_vjp`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from p3o_jax.devices import sharding

LANES = 128  # of a TPU's vector unit: what the kernel's head size must be a multiple of


def splash_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"],
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sliding: Bool[Array, ""] | None = None,
    *,
    block: int = 512,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Causal attention within segments; neither [T, T] scores nor weights are ever held.

    Args:
        scale: of the scores; None: H ** -0.5.
        softcap: scores are softcap * tanh(scores / softcap).
        window: tokens, itself included, that a token sees where `sliding`.
        sliding: whether this layer has that window; None: it has not. Both kernels are compiled, one is run.
        block: tokens in a tile, a multiple of 128; rows are padded to a multiple of it.
        interpret: emulate the kernel, on any platform (for tests).
    """
    length, width = query.shape[1], query.shape[3]
    rows, lanes = (0, -length % block), (0, -width % LANES)

    # Padding comes last, where causal attention does not look, and in a segment of its own.
    segments = jnp.pad(segment_ids, ((0, 0), rows), constant_values=-1)
    query = query * (width**-0.5 if scale is None else scale)
    arrays = tuple(jnp.pad(array, ((0, 0), rows, (0, 0), lanes)) for array in (query, key, value))
    everything = partial(_attend, _Kernel(softcap, None, block, interpret))
    if sliding is None:
        out = everything(*arrays, segments)
    else:
        windowed = partial(_attend, _Kernel(softcap, window, block, interpret))
        out = jax.lax.cond(sliding, windowed, everything, *arrays, segments)
    return out[:, :length, :, :width]


class _Kernel(NamedTuple):
    """What a kernel is made for."""

    softcap: float | None
    window: int | None
    block: int
    interpret: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form: _Kernel, query: Array, key: Array, value: Array, segments: Array) -> Array:
    return _attend_forward(form, query, key, value, segments)[0]


def _attend_forward(form: _Kernel, query: Array, key: Array, value: Array, segments: Array):
    def run(query: Array, key: Array, value: Array, segments: Array):
        attend = partial(_kernel(query.shape, form), segments)
        out, backward = jax.vjp(attend, *map(_heads_first, (query, key, value)))
        return _heads_first(out), backward

    out, backward = _unchecked(run)(query, key, value, segments)
    return sharding.match_variance(out, query), (backward, query, key, value)


def _attend_backward(form: _Kernel, residuals: Any, gradient: Array):
    def run(backward: Callable, gradient: Array):
        return tuple(map(_heads_first, backward(_heads_first(gradient))))

    backward, *primals = residuals
    gradients = _unchecked(run)(backward, gradient)
    return *(sharding.match_variance(g, primal) for g, primal in zip(gradients, primals, strict=True)), None


_attend.defvjp(_attend_forward, _attend_backward)


def _kernel(shape: tuple[int, ...], form: _Kernel) -> Callable[..., Array]:
    """The kernel over rows: (segments, query, key, value) -> attention."""
    _, length, num_heads, _ = shape
    sizes = kernel.BlockSizes(
        block_q=form.block,
        block_kv=form.block,
        block_q_dkv=form.block,
        block_kv_dkv=form.block,
        block_q_dq=form.block,
        block_kv_dq=form.block,
    )
    seen: masks.Mask = masks.CausalMask((length, length))
    if form.window is not None:
        seen = masks.LocalMask((length, length), (form.window - 1, 0), offset=0)
    one_row = kernel.make_splash_mha(
        masks.MultiHeadMask([seen] * num_heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=sizes,
        attn_logits_soft_cap=form.softcap,
        interpret=form.interpret,
    )
    return jax.vmap(lambda segments, q, k, v: one_row(q, k, v, segment_ids=kernel.SegmentIds(segments, segments)))


def _unchecked(function: Callable) -> Callable:
    """The function without the check of what varies, on what this device already has."""
    if jax.sharding.get_abstract_mesh().empty:
        return function
    here = PartitionSpec()
    return lambda *arguments: jax.shard_map(
        function, in_specs=(here,) * len(arguments), out_specs=here, check_vma=False
    )(*arguments)


def _heads_first(array: Array) -> Array:
    """[B, T, N, H] -> [B, N, T, H] and back. In an unchecked region the result is not marked as varying."""
    return array.swapaxes(1, 2)
