"""A GGUF file's tokenizer as a `tokenizer.json`: byte-level BPE, or sentencepiece's with scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from p3o_jax.tokenizers.source import TokenizerSource

# What text is split by before byte-level BPE, by the file's tokenizer.ggml.pre (llama.cpp, llama-vocab.cpp).
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"\p{N}" + _REST
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type


def tokenizer_source(data: Mapping[str, Any], path: Path) -> TokenizerSource:
    """What the file's metadata says of its tokenizer.

    Raises:
        ValueError: the file has none, or one of a kind that is not read.
    """

    def get(name: str, default: Any = None) -> Any:
        return data.get(f"tokenizer.ggml.{name}", default)

    kind, tokens = get("model"), get("tokens")
    if kind is None or tokens is None:
        raise ValueError(f"{path} has no tokenizer in its metadata")
    types = get("token_type", [_NORMAL] * len(tokens))
    if kind == "gpt2":
        tokenizer = _byte_level(tokens, get("merges", ()), get("pre", ""), path)
    elif kind == "llama":
        tokenizer = _sentencepiece(tokens, get("scores"), get("add_space_prefix", True), path)
    else:
        raise ValueError(f"{path}: tokenizer {kind!r} is not one that is read: gpt2, llama")
    _add_tokens(tokenizer, tokens, types)

    def text_of(name: str) -> str | None:
        token = get(name)
        return None if token is None else tokens[token]

    config = {
        "bos_token": text_of("bos_token_id"),
        "eos_token": text_of("eos_token_id"),
        "add_bos_token": bool(get("add_bos_token", kind == "llama")),
        "chat_template": data.get("tokenizer.chat_template"),
    }
    if config["add_bos_token"] and config["bos_token"] is not None:
        from tokenizers import processors

        pair = (config["bos_token"], get("bos_token_id"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[pair[0], "$A"], pair=[pair[0], "$A", "$B:1"], special_tokens=[pair]
        )
    ends = [get(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    return TokenizerSource(tokenizer.to_str(), config, {"eos_token_id": [token for token in ends if token is not None]})


def _byte_level(tokens: Sequence[str], merges: Sequence[str], pre: str, path: Path) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre in ("llama-bpe", "llama3")))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("llama-bpe", "llama3"):
        split = [pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), bytes_only]
    elif pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        split = [pre_tokenizers.Split(Regex(_QWEN2), "isolated"), bytes_only]
    elif pre == "smollm":
        split = [pre_tokenizers.Digits(individual_digits=True), gpt2]
    elif pre == "gpt-2":
        split = [gpt2]
    else:
        raise ValueError(
            f"{path}: tokenizer.ggml.pre={pre!r} is not one that is read: llama-bpe, qwen2, smollm, gpt-2; a directory "
            "with the model's tokenizer.json is"
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: Sequence[str], scores: Sequence[float] | None, space_prefix: bool, path: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    if scores is None:
        raise ValueError(f"{path}: tokenizer.ggml.scores is missing")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = []
    for token in tokens:
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs += [(vocabulary[token], *pair) for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
    pairs.sort(key=lambda pair: (-scores[pair[0]], pair[0]))  # the best score merges first
    model = models.BPE(vocabulary, [(l, r) for _, l, r in pairs], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    prefixed = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    tokenizer.normalizer = prefixed if space_prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)
    return tokenizer


def _add_tokens(tokenizer: Any, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens that text is cut at before anything else; those that control the model are not shown."""
    from tokenizers import AddedToken

    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
