"""The tokenizers of models trained from scratch, as `transformers` loads them: one token a character, or a byte."""

from __future__ import annotations

import json
from typing import Any

from p3o_jax.tokenizers.text import ByteTokenizer, CharTokenizer

_END = "<|end|>"


def char_tokenizer_files(tokenizer: CharTokenizer | ByteTokenizer) -> dict[str, str]:
    """`tokenizer.json` and `tokenizer_config.json`, by name.

    Raises:
        ImportError: the `tokenizers` package is not installed.
    """
    try:
        from tokenizers import AddedToken
    except ImportError as error:
        raise ImportError(f"{error}: exporting a model needs: pip install 'p3o_jax[models]'") from error
    stored = _characters(tokenizer) if isinstance(tokenizer, CharTokenizer) else _bytes()
    stored.add_special_tokens([AddedToken(_END, special=True, normalized=False)])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": stored.to_str(), "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}


def _characters(tokenizer: CharTokenizer) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {_END: 0, **{character: i for i, character in enumerate(tokenizer.alphabet, start=1)}}
    stored = Tokenizer(models.WordLevel(vocabulary, unk_token=_END))
    stored.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    stored.decoder = decoders.Fuse()
    return stored


def _bytes() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # Byte-level tokenizers write a byte as a printable character: itself, or if it is none, the next one from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    written = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocabulary = {_END if byte == 255 else character: byte for byte, character in written.items()}
    stored = Tokenizer(models.BPE(vocabulary, []))
    stored.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    stored.decoder = decoders.ByteLevel()
    return stored
