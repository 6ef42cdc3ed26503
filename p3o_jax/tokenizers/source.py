"""The files that a published tokenizer is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p3o_jax.tokenizers.prompt_format import PromptFormat


@dataclass(frozen=True)
class TokenizerSource:
    """What a tokenizer is made from."""

    json: str
    """A `tokenizer.json`."""
    config: Mapping[str, Any]
    """A `tokenizer_config.json`: the special tokens' texts, add_bos_token, chat_template."""
    generation: Mapping[str, Any]
    """A `generation_config.json`: the ids that end a response."""
    prompt_format: PromptFormat | None = None
    """How its prompts were made, where an export says so."""
    path: Path | None = None
    """The directory or file that it was read from, for errors."""
