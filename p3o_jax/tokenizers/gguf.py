"""A GGUF file's tokenizer as a `tokenizer.json`: byte-level BPE, or sentencepiece's with scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from p3o_jax.inputs.errors import refused, shown
from p3o_jax.inputs.kinds import Kind, ListOf, Maybe, Real, Whole, checked, flag, text
from p3o_jax.tokenizers.source import TokenizerSource

# What text is split by before byte-level BPE, by the file's tokenizer.ggml.pre (llama.cpp, llama-vocab.cpp).
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"\p{N}" + _REST
_PRE = ("llama-bpe", "llama3", "qwen2", "smollm", "gpt-2")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
_TEXTS, _NUMBERS = ListOf(text, "texts"), ListOf(Whole(-(2**31), 2**31 - 1), "numbers")
_SCORES = ListOf(Real(-1e30, 1e30), "scores")
_MAX_TOKEN = 2048
"""Characters; the halves of a token of sentencepiece's take their square."""


def tokenizer_source(data: Mapping[str, Any], path: Path) -> TokenizerSource:
    """What the file's metadata says of its tokenizer.

    Raises:
        ValueError: the file has none, one of a kind that is not read, or a damaged one.
    """

    def get(name: str, kind: Kind, default: Any = None) -> Any:
        name = f"tokenizer.ggml.{name}"
        return checked(data[name], kind, f"{path}: metadata", name) if data.get(name) is not None else default

    kind, tokens = get("model", text), get("tokens", _TEXTS)
    if kind is None or not tokens:
        raise ValueError(f"{path} has no tokenizer in its metadata")
    types = get("token_type", _NUMBERS, [_NORMAL] * len(tokens))
    scores = get("scores", _SCORES)
    for name, values in (("token_type", types), ("scores", scores)):
        if values is not None and len(values) != len(tokens):
            raise ValueError(
                f"{path}: metadata tokenizer.ggml.{name} has {len(values)} entries for {len(tokens)} tokens"
            )
    if max(map(len, tokens)) > _MAX_TOKEN:
        raise ValueError(f"{path}: metadata tokenizer.ggml.tokens has one of more than {_MAX_TOKEN} characters")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"{path}: tokenizer {shown(kind)} is not one that is read: gpt2, llama")
    pre = get("pre", text, "")
    if kind == "gpt2" and pre not in _PRE:
        raise ValueError(
            f"{path}: tokenizer.ggml.pre={shown(pre)} is not one that is read: {', '.join(_PRE)}; a directory "
            "with the model's tokenizer.json is"
        )
    if kind == "llama" and scores is None:
        raise ValueError(f"{path}: tokenizer.ggml.scores is missing")
    token_id = Whole(0, len(tokens) - 1)
    begin, end = get("bos_token_id", token_id), get("eos_token_id", token_id)
    config = {
        "bos_token": None if begin is None else tokens[begin],
        "eos_token": None if end is None else tokens[end],
        "add_bos_token": get("add_bos_token", flag, kind == "llama"),
        "chat_template": checked(data.get("tokenizer.chat_template"), Maybe(text), path, "tokenizer.chat_template"),
    }
    merges, space_prefix = get("merges", _TEXTS, ()), get("add_space_prefix", flag, True)
    with refused(f"{path}: the tokenizer in its metadata does not read", ImportError):
        tokenizer = _byte_level(tokens, merges, pre) if kind == "gpt2" else _sentencepiece(tokens, scores, space_prefix)
        _add_tokens(tokenizer, tokens, types)
        if config["add_bos_token"] and begin is not None:
            from tokenizers import processors

            pair = (tokens[begin], begin)
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[pair[0], "$A"], pair=[pair[0], "$A", "$B:1"], special_tokens=[pair]
            )
    ends = [end, get("eot_token_id", token_id), get("eom_token_id", token_id)]
    generation = {"eos_token_id": [token for token in ends if token is not None]}
    return TokenizerSource(tokenizer.to_str(), config, generation, path=path)


def _byte_level(tokens: Sequence[str], merges: Sequence[str], pre: str) -> Any:
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
    else:
        split = [gpt2]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: Sequence[str], scores: Sequence[float], space_prefix: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

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
