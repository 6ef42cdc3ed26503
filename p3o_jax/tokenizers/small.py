"""The tokenizers of models trained from scratch, as JSON values in a run's directory: reading them runs nothing."""

from __future__ import annotations

from typing import Any

from p3o_jax.tokenizers.text import ByteTokenizer, CharTokenizer, Tokenizer

FILE = "tokenizer.json"
"""Its name in a run's directory."""


def tokenizer_to_json(tokenizer: Tokenizer) -> dict[str, str] | None:
    """A tokenizer as JSON values; None: it is of another kind."""
    if type(tokenizer) is CharTokenizer:
        return {"tokens": "characters", "alphabet": tokenizer.alphabet}
    return {"tokens": "bytes"} if type(tokenizer) is ByteTokenizer else None


def tokenizer_from_json(data: Any) -> CharTokenizer | ByteTokenizer:
    """The inverse of `tokenizer_to_json`.

    Raises:
        ValueError: it is none.
    """
    match data:
        case {"tokens": "bytes"}:
            return ByteTokenizer()
        case {"tokens": "characters", "alphabet": str(alphabet)}:
            return CharTokenizer(alphabet)
    raise ValueError("no tokenizer of characters or bytes")
