"""The numeric formats in which the sampler works, apart from the learner's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Precision:
    """What the sampler computes in; a coarser one than the learner's emulates train/rollout mismatch."""

    weights: Format = "float32"
    """Format the weights are cast to when they are synchronised."""
    activations: Format = "float32"
    """Compute dtype of the forward pass; logits and log-probs are always float32."""
    kv_cache: Format = "float32"
    """Format of stored keys and values."""
