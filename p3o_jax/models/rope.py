"""Rotary position embeddings, and how families stretch them to longer contexts.

A pair of entries i of a head is rotated by position x frequency_i, frequency_i = theta ** (-2 i / H). A scaling
changes the frequencies and may multiply the rotated vectors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class RopeScaling(ABC):
    """A change of the frequencies. Implementations are frozen dataclasses."""

    @abstractmethod
    def scaled(self, frequencies: Float[Array, " half"], theta: float) -> Float[Array, " half"]:
        """The frequencies to rotate by, in radians a token."""

    @property
    def amplitude(self) -> float:
        """What rotated queries and keys are multiplied by."""
        return 1.0


@dataclass(frozen=True)
class LinearRope(RopeScaling):
    """All frequencies divided by a factor (position interpolation, arXiv:2306.15595): Gemma 3."""

    factor: float

    def scaled(self, frequencies: Array, theta: float) -> Array:
        """frequency / factor."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Rope(RopeScaling):
    """Wavelengths beyond the original context divided by a factor, short ones kept, a ramp between: Llama 3.1 on."""

    factor: float
    low_frequency_factor: float
    """Wavelengths above original context / this are divided."""
    high_frequency_factor: float
    """Wavelengths below original context / this are kept."""
    original_context_tokens: int

    def scaled(self, frequencies: Array, theta: float) -> Array:
        """Between frequency / factor and frequency, by how often a wavelength fits into the original context."""
        rotations = self.original_context_tokens * frequencies / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = jnp.clip((rotations - low) / (high - low), 0.0, 1.0)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


@dataclass(frozen=True)
class YarnRope(RopeScaling):
    """A ramp over entries between kept and divided frequencies, and longer vectors (arXiv:2309.00071): Qwen."""

    factor: float
    original_context_tokens: int
    beta_fast: float = 32.0
    """Entries that rotate more often than this in the original context are kept."""
    beta_slow: float = 1.0
    """Entries that rotate less often than this are divided."""
    attention_factor: float | None = None
    """The amplitude; None: 0.1 ln(factor) + 1."""

    @property
    def amplitude(self) -> float:
        """Makes attention as sharp over the longer context as it was."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def scaled(self, frequencies: Array, theta: float) -> Array:
        """Between frequency and frequency / factor, linearly in the entry's number."""
        half = len(frequencies)

        def entry_of(rotations: float) -> float:
            """The entry that rotates so often in the original context."""
            return half * math.log(self.original_context_tokens / (rotations * 2 * math.pi)) / math.log(theta)

        low = max(math.floor(entry_of(self.beta_fast)), 0)
        high = min(math.ceil(entry_of(self.beta_slow)), 2 * half - 1)
        divided = jnp.clip((jnp.arange(half, dtype=jnp.float32) - low) / max(high - low, 0.001), 0.0, 1.0)
        return (1 - divided) * frequencies + divided * frequencies / self.factor


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Float[Array, " half"]:
    """Radians a token for each pair of entries, float32."""
    half = head_dim // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return frequencies if scaling is None else scaling.scaled(frequencies, theta)


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    frequencies: Float[Array, " half"],
    amplitude: float = 1.0,
) -> Float[Array, "B T N H"]:
    """Rotary position embedding on half-split pairs, as in the Hugging Face checkpoints (arXiv:2104.09864)."""
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    if amplitude != 1.0:
        sin, cos = sin * amplitude, cos * amplitude
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
