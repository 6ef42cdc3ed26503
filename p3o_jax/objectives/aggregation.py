"""How token losses become one number:  L = sum_t weight_t loss_t / sum count.

The denominator is summed over all micro-batches and devices before it divides, so a
loss does not depend on how its batch is split. Weights and counts depend on masks
only; an empty sequence or a fully masked row counts for nothing. Both are in the dtype
of the losses that they are given with: 1 / length in float32 is not that of float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from p3o_jax.batch import stats
from p3o_jax.batch.types import Batch


@dataclass(frozen=True)
class TokenMean:
    """The mean over all tokens of the batch: every token weighs the same (DAPO, P3O)."""

    def weights(self, batch: Batch, dtype: DTypeLike = jnp.float32) -> Float[Array, "B T"]:
        return jnp.asarray(batch.mask, dtype)

    def count(self, batch: Batch, dtype: DTypeLike = jnp.float32) -> Float[Array, ""]:
        return jnp.sum(batch.mask, dtype=dtype)


@dataclass(frozen=True)
class SequenceMean:
    """The mean over sequences of their token means: every sequence weighs the same (GRPO, GSPO)."""

    def weights(self, batch: Batch, dtype: DTypeLike = jnp.float32) -> Float[Array, "B T"]:
        lengths = stats.sequence_lengths(batch.mask, batch.segment_ids, dtype)
        return jnp.where(batch.mask, 1.0 / jnp.maximum(lengths, 1.0), 0.0)

    def count(self, batch: Batch, dtype: DTypeLike = jnp.float32) -> Float[Array, ""]:
        return stats.num_sequences(batch.mask, batch.segment_ids, dtype)


@dataclass(frozen=True, kw_only=True)
class ConstantNormaliser:
    """The mean over sequences of their token sums over a constant (Dr.GRPO, arXiv:2503.20783)."""

    tokens: int
    """What a sequence's sum is divided by: the longest response there can be. 1: sums are not divided."""

    def __post_init__(self):
        if self.tokens < 1:
            raise ValueError(f"ConstantNormaliser.tokens={self.tokens}: give a number of tokens of at least 1")

    def weights(self, batch: Batch, dtype: DTypeLike = jnp.float32) -> Float[Array, "B T"]:
        return jnp.asarray(batch.mask, dtype)

    def count(self, batch: Batch, dtype: DTypeLike = jnp.float32) -> Float[Array, ""]:
        return self.tokens * stats.num_sequences(batch.mask, batch.segment_ids, dtype)


Aggregation = TokenMean | SequenceMean | ConstantNormaliser
