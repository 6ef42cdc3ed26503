"""A model as it is stored: its configuration as Hugging Face writes it, and named tensors that are read when asked for.

What reads a format gives this; what knows an architecture takes it. A GGUF file is given the names, layouts and
configuration that the same model has as a directory of safetensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from p3o_jax.tokenizers.source import TokenizerSource


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    file: Path
    """Where it is."""
    shape: tuple[int, ...]
    """As the family's Hugging Face implementation has it."""
    dtype: str
    """As the file calls it, such as BF16 or Q4_1."""
    read: Callable[[], np.ndarray]
    """Its values: a view of the file where the format allows it, so that slices read only what they need."""


@dataclass(frozen=True)
class StoredModel:
    """A model in a directory or a file."""

    path: Path
    """The directory or the file."""
    config: Mapping[str, Any]
    """Its `config.json`."""
    tensors: Mapping[str, StoredTensor]
    """By name, such as model.embed_tokens.weight."""
    tokenizer: Callable[[], TokenizerSource] = field(repr=False)
    """Reads what the tokenizer is made from."""
