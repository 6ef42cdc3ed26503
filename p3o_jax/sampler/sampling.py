"""Sampling settings, the distributions they define, and drawing from them.

The distribution of a row, in this order, which is that of Hugging Face transformers
(vLLM applies min-p before top-k and top-p):

1. temperature: softmax(logits / T)
2. top-k: only the k most likely tokens
3. top-p: of those, renormalised, only the smallest set of most likely tokens whose mass
   reaches p (arXiv:1904.09751)
4. min-p: of those, only tokens at least m times as likely as the most likely one (arXiv:2407.01082)

and renormalised. Each step is a lower bound on the logit, so tokens that are equally
likely are kept or cut together: where the k-th and the (k+1)-th tie, more than k are kept,
and nothing depends on the order of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from p3o_jax.batch.types import AnyArray


def is_number(value: Any) -> bool:
    """Whether it is a number; True and False are none, whatever Python counts them as."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def is_count(value: Any, least: int = 1) -> bool:
    """Whether it is a whole number, at least `least`."""
    return is_number(value) and isinstance(value, int | np.integer) and bool(value >= least)


def is_temperature(value: float) -> bool:
    """Whether logits can be divided by it: positive and finite, as a float32 too."""
    if not is_number(value):
        return False
    return math.isfinite(value) and float(np.finfo(np.float32).tiny) <= value <= float(np.finfo(np.float32).max)


def check_seed(seed: int) -> None:
    """Refuses what a key cannot be made of without meaning another seed's.

    Raises:
        ValueError: it is not between 0 and 2**32 - 1.
    """
    if not (is_count(seed, 0) and seed < 2**32):
        raise ValueError(f"seed must be at least 0 and below 2**32, a whole number, got {seed!r}")


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from the logits."""

    temperature: float = 1.0
    """Logits are divided by it."""
    top_k: int | None = None
    """Only the so many most likely tokens; None: all."""
    top_p: float = 1.0
    """Only the smallest set of most likely tokens that has this mass; 1: all."""
    min_p: float = 0.0
    """Only tokens at least so many times as likely as the most likely one; 0: all."""

    def __post_init__(self) -> None:
        if not is_temperature(self.temperature):
            raise ValueError(
                f"sampling: temperature must be positive and finite, got {self.temperature} (for the mode use greedy)"
            )
        if self.top_k is not None and not (is_count(self.top_k) and self.top_k < 2**31):
            raise ValueError(
                f"sampling: top_k must be a whole number, at least 1 and below 2**31, got {self.top_k} (all: None)"
            )
        if not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"sampling: top_p must be above 0 and at most 1, got {self.top_p} (all tokens: 1)")
        if not (is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise ValueError(f"sampling: min_p must be between 0 and 1, got {self.min_p} (all tokens: 0)")

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return Truncation.of([self]) != Truncation()


class Truncation(NamedTuple):
    """What may cut the support in any of the rows. Static: what is not asked for costs nothing."""

    top_k: int | None = None  # none of the rows keeps more, but those that keep all; a power of 2
    top_p: bool = False
    min_p: bool = False

    @classmethod
    def of(cls, rows: Iterable[Sampling]) -> Truncation:
        rows = list(rows)
        top_k = max((row.top_k for row in rows if row.top_k is not None), default=None)
        return cls(
            None if top_k is None else 2 ** math.ceil(math.log2(top_k)),
            any(row.top_p < 1 for row in rows),
            any(row.min_p > 0 for row in rows),
        )


AS_THEY_ARE = Sampling()
"""Temperature 1, every token."""


class RowSampling(NamedTuple):
    """`Sampling` of every row; values are data, so that changing them compiles nothing."""

    temperature: Float[AnyArray, " B"]
    top_k: Int[AnyArray, " B"]
    top_p: Float[AnyArray, " B"]
    min_p: Float[AnyArray, " B"]

    @classmethod
    def of(cls, rows: Sequence[Sampling]) -> RowSampling:
        """On the host."""
        top_k = [np.iinfo(np.int32).max if row.top_k is None else row.top_k for row in rows]
        return cls(
            np.asarray([row.temperature for row in rows], np.float32),
            np.asarray(top_k, np.int32),
            np.asarray([row.top_p for row in rows], np.float32),
            np.asarray([row.min_p for row in rows], np.float32),
        )


NOTHING_CUT = Truncation()


def sampled_log_probs(
    logits: Float[AnyArray, "B V"], rows: RowSampling, truncation: Truncation = NOTHING_CUT
) -> Float[Array, "B V"]:
    """The log-probabilities that are drawn from, float32, -inf at tokens that are cut.

    Args:
        logits: float32.
        rows: settings.
        truncation: which of them are looked at, besides the temperature.
    """
    # From the largest logit, which becomes exactly 0: no temperature makes that infinite, and no log-prob is above 0.
    logits = jnp.asarray(logits)
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / rows.temperature[:, None]
    if truncation.top_k is not None:
        largest, _ = jax.lax.top_k(scaled, min(truncation.top_k, logits.shape[-1]))
        last = jnp.minimum(rows.top_k, largest.shape[-1]) - 1
        bound = jnp.take_along_axis(largest, last[:, None], axis=-1)[:, 0]
        scaled = _cut(scaled, jnp.where(rows.top_k > largest.shape[-1], -jnp.inf, bound))
    if truncation.top_p:
        scaled = _cut(scaled, jnp.where(rows.top_p < 1, _top_p_bound(scaled, rows.top_p), -jnp.inf))
    if truncation.min_p:
        scaled = _cut(scaled, jnp.log(rows.min_p))
    # Compilers may compute a value twice, each time rounded differently, so that even these numbers can be above 0.
    return jnp.minimum(scaled - jnp.log(jnp.exp(scaled).sum(axis=-1, keepdims=True)), 0.0)


def _cut(scaled: Float[Array, "B V"], bound: Float[Array, " B"]) -> Float[Array, "B V"]:
    return jnp.where(scaled >= bound[:, None], scaled, -jnp.inf)


def _top_p_bound(scaled: Float[Array, "B V"], top_p: Float[AnyArray, " B"]) -> Float[Array, " B"]:
    """The largest t of each row for which the tokens of at least t have the mass; the largest of a row is 0.

    By bisection over the float32 numbers, which 31 passes make exact: at a large vocabulary a tenth of the time of a
    sort, and less memory. The sums are float32's.
    """
    weights = jnp.exp(scaled)
    wanted = top_p * weights.sum(axis=-1)

    def below_0(steps: Int[Array, " B"]) -> Float[Array, " B"]:
        """The float32 number that is so many of them below 0."""
        return -jax.lax.bitcast_convert_type(steps, jnp.float32)

    def halve(_: Int[Array, ""], bounds: tuple[Int[Array, " B"], Int[Array, " B"]]) -> tuple[Array, Array]:
        less, enough = bounds  # steps below 0: those down to `enough` have the mass, those down to `less` have not
        middle = less + (enough - less) // 2
        has_mass = jnp.where(scaled >= below_0(middle)[:, None], weights, 0.0).sum(axis=-1) >= wanted
        return jnp.where(has_mass, less, middle), jnp.where(has_mass, middle, enough)

    whole = jnp.full_like(scaled[:, 0], np.float32(np.inf).view(np.int32), jnp.int32)
    _, enough = jax.lax.fori_loop(0, 31, halve, (jnp.full_like(whole, -1), whole))
    return below_0(enough)


def draw(log_probs: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
    """A token a row by inversion of its cumulative distribution: first a block of tokens, then one of the block.

    Two random numbers a row rather than one a token. They have 23 bits and the sums are float32's, so a block's
    probability, and a token's within its block, are met to some 2^-22; a token of probability 0 is never drawn.
    """
    batch, vocabulary = log_probs.shape
    width = 2 ** math.ceil(math.log2(vocabulary) / 2)
    probs = jnp.pad(jnp.exp(log_probs), ((0, 0), (0, -vocabulary % width)))
    blocks = probs.reshape(batch, -1, width)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    block = _invert(blocks.sum(axis=-1), uniform[:, 0])
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * width + _invert(within, uniform[:, 1])


def _invert(weights: Float[AnyArray, "B N"], uniform: Float[AnyArray, " B"]) -> Int[Array, " B"]:
    """The first index where the cumulative weight exceeds `uniform` times the total, of those with a weight."""
    cumulative = jnp.cumsum(weights, axis=-1)
    has_weight = weights > 0
    beyond = has_weight & (cumulative > (uniform * cumulative[:, -1])[:, None])
    index = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    last = jnp.where(has_weight, index, 0).max(axis=-1)  # where rounding leaves none beyond
    return jnp.where(beyond, index, last[:, None]).min(axis=-1)
