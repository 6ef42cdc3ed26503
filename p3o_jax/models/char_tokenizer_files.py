"""The tokenizer of a model trained from scratch, as `transformers` loads it: one token a character."""

from __future__ import annotations

import json

from p3o_jax.models.tokenizer import CharTokenizer

_END = "<|end|>"


def char_tokenizer_files(tokenizer: CharTokenizer) -> dict[str, str]:
    """`tokenizer.json` and `tokenizer_config.json`, by name.

    Raises:
        ImportError: the `tokenizers` package is not installed.
    """
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise ImportError(f"{error}: exporting a model needs: pip install 'p3o_jax[models]'") from error
    vocabulary = {_END: 0, **{character: i for i, character in enumerate(tokenizer.alphabet, start=1)}}
    stored = Tokenizer(models.WordLevel(vocabulary, unk_token=_END))
    stored.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    stored.decoder = decoders.Fuse()
    stored.add_special_tokens([AddedToken(_END, special=True, normalized=False)])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": stored.to_str(), "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
