"""Keys and values of past tokens, in the format they are stored in.

A head's tokens lie side by side, which is how attention reads them. Below bfloat16 each token's key and value of each
head has its own scale, so that a token's entry never changes when others join the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from p3o_jax.devices.precision import DTYPES, has_scales
from p3o_jax.models.quantised import quantise


class KVCache(NamedTuple):
    """Keys and values of all layers; slot s of a row holds its token at position s."""

    keys: Num[Array, "L B K S H"]  # integers in a format of integers, whose scales are beside them
    values: Num[Array, "L B K S H"]
    key_scales: Float[Array, "L B K S"] | None = None  # float32; None: keys and values are plain numbers
    value_scales: Float[Array, "L B K S"] | None = None

    @classmethod
    def of(cls, key: Float[Array, "B S K H"], value: Float[Array, "B S K H"]) -> KVCache:
        """A layer's keys and values of whole sequences, as attention makes them."""
        return cls(key.swapaxes(1, 2), value.swapaxes(1, 2))

    @property
    def num_slots(self) -> int:
        """Tokens there is room for."""
        return self.keys.shape[-2]

    def with_room(self, tokens: int) -> KVCache:
        """The cache with so many more slots."""

        def pad(array: Num[Array, "L B K S ..."]) -> Num[Array, "L B K T ..."]:
            return jnp.pad(array, [(0, 0)] * 3 + [(0, tokens)] + [(0, 0)] * (array.ndim - 4))

        return jax.tree.map(pad, self)

    def stored_as(self, format: str) -> KVCache:
        """Plain keys and values in another format."""
        dtype = DTYPES[format]
        if not has_scales(format):
            return KVCache(self.keys.astype(dtype), self.values.astype(dtype))
        (keys, key_scales), (values, value_scales) = (quantise(part, dtype) for part in (self.keys, self.values))
        return KVCache(keys, values, key_scales[..., 0], value_scales[..., 0])

    def unstacked(self) -> list[KVCache]:
        """The layers in caches of their own, of one layer each."""
        return [jax.tree.map(lambda array, i=i: array[i : i + 1], self) for i in range(len(self.keys))]

    def write(
        self,
        layer: Int[Array, ""],
        rows: Int[Array, " B"],
        positions: Int[Array, " B"],
        key: Float[Array, "B K H"],
        value: Float[Array, "B K H"],
    ) -> KVCache:
        """The cache with one more token of each row; updated in place under `jit`."""
        # Of every head by itself: XLA for TPU would lay out a cache that is written all heads at once otherwise than it
        # is read, and copy all of it at every token.
        at = layer, rows[:, None], jnp.arange(self.keys.shape[2]), positions[:, None]

        def put(parts: Array, scales: Array | None, new: Array) -> tuple[Array, Array | None]:
            if scales is None:
                return parts.at[at].set(new.astype(parts.dtype)), None
            new, new_scales = quantise(new, parts.dtype)
            return parts.at[at].set(new), scales.at[at].set(new_scales[..., 0])

        keys, key_scales = put(self.keys, self.key_scales, key)
        values, value_scales = put(self.values, self.value_scales, value)
        return KVCache(keys, values, key_scales, value_scales)

    def read(
        self, layer: Int[Array, ""], dtype: DTypeLike, num_slots: int
    ) -> tuple[Float[Array, "B K {num_slots} H"], Float[Array, "B K {num_slots} H"]]:
        """A layer's first `num_slots` keys and values as numbers."""

        def of_layer(array: Num[Array, "L B K S ..."]) -> Num[Array, "B K N ..."]:
            size = (1, *array.shape[1:3], num_slots, *array.shape[4:])
            return jax.lax.dynamic_slice(array, (layer, *(0,) * (array.ndim - 1)), size)[0]

        def plain(parts: Array, scales: Array | None) -> Array:
            if scales is None:
                return of_layer(parts).astype(dtype)
            return (of_layer(parts).astype(scales.dtype) * of_layer(scales)[..., None]).astype(dtype)

        return plain(self.keys, self.key_scales), plain(self.values, self.value_scales)


def slot_buckets(num_slots: int) -> list[int]:
    """How many slots attention may read: all, and the powers of 2 from 256 below."""
    return [*(SHORTEST << i for i in range(num_slots.bit_length()) if SHORTEST << i < num_slots), num_slots]


SHORTEST = 256


def num_bytes(cache: KVCache | list[KVCache]) -> int:
    """What a cache, or its layers', or the shapes of either, takes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
