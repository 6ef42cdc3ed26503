"""Keys and values of past tokens, in the format they are stored in.

Below bfloat16 each token's key and value of each head has its own scale, so that a token's entry never changes when
others join the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from p3o_jax.models.quantised import quantise
from p3o_jax.precision import DTYPES, has_scales


class KVCache(NamedTuple):
    """Keys and values of all layers; slot s of a row holds its token at position s."""

    keys: Float[Array, "L B S K H"]
    values: Float[Array, "L B S K H"]
    key_scales: Float[Array, "L B S K"] | None = None  # float32; None: keys and values are plain numbers
    value_scales: Float[Array, "L B S K"] | None = None

    def stored_as(self, format: str) -> KVCache:
        """Plain keys and values in another format."""
        dtype = DTYPES[format]
        if not has_scales(format):
            return KVCache(self.keys.astype(dtype), self.values.astype(dtype))
        (keys, key_scales), (values, value_scales) = (quantise(part, dtype) for part in (self.keys, self.values))
        return KVCache(keys, values, key_scales[..., 0], value_scales[..., 0])

    def write(
        self,
        layer: Int[Array, ""],
        rows: Int[Array, " B"],
        positions: Int[Array, " B"],
        key: Float[Array, "B K H"],
        value: Float[Array, "B K H"],
    ) -> KVCache:
        """The cache with one more token of each row; updated in place under `jit`."""
        at = layer, rows, positions

        def put(parts: Array, scales: Array | None, new: Array) -> tuple[Array, Array | None]:
            if scales is None:
                return parts.at[at].set(new.astype(parts.dtype)), None
            new, new_scales = quantise(new, parts.dtype)
            return parts.at[at].set(new), scales.at[at].set(new_scales[..., 0])

        keys, key_scales = put(self.keys, self.key_scales, key)
        values, value_scales = put(self.values, self.value_scales, value)
        return KVCache(keys, values, key_scales, value_scales)

    def read(self, layer: Int[Array, ""], dtype: DTypeLike) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """A layer's keys and values as numbers."""

        def plain(parts: Array, scales: Array | None) -> Array:
            if scales is None:
                return parts[layer].astype(dtype)
            return (parts[layer].astype(scales.dtype) * scales[layer][..., None]).astype(dtype)

        return plain(self.keys, self.key_scales), plain(self.values, self.value_scales)


def num_bytes(cache: KVCache) -> int:
    """What a cache, or its shapes, takes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
