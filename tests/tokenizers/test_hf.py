"""Published tokenizers and chat templates: one BOS, one template, every end of a sequence, text that streams."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from p3o_jax.tokenizers.chat_template import ChatTemplate
from p3o_jax.tokenizers.gguf import tokenizer_source
from p3o_jax.tokenizers.hf import HfTokenizer, tokenizer_files
from p3o_jax.tokenizers.source import TokenizerSource
from p3o_jax.tokenizers.text import CharTokenizer, TextStream
from tests.models.stored_models import DATA, TOKENIZER, copy_with_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'models'")
pytest.importorskip("jinja2", reason="needs the extra 'models'")

GOLDEN = json.loads((DATA / "templates.json").read_text(encoding="utf-8"))
CASES = [(name, chat) for name, of_template in GOLDEN["rendered"].items() for chat in of_template]


@pytest.mark.parametrize(("name", "chat"), CASES)
def test_templates_render_as_transformers_renders_them(name, chat):
    template = ChatTemplate((DATA / "templates" / f"{name}.jinja").read_text(), GOLDEN["special_tokens"])
    expected = GOLDEN["rendered"][name][chat]
    messages = GOLDEN["chats"][chat.removesuffix(", complete")]
    begun = not chat.endswith(", complete")
    if expected["text"] is None:
        with pytest.raises(ValueError, match=r"refuses the messages: .*(alternate|no system role)"):
            template.render(messages, expected["options"], add_generation_prompt=begun)
    else:
        assert template.render(messages, expected["options"], add_generation_prompt=begun) == expected["text"]


def test_templates_are_sandboxed_and_have_their_helpers():
    render = lambda source, **options: ChatTemplate(source, {}).render([{"role": "user", "content": "<é>"}], options)  # noqa: E731
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "<é>"}]'
    assert render("{% generation %}{{ x }}{% endgeneration %}", x=3) == "3"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    with pytest.raises(ValueError, match="refuses the messages"):
        render("{{ messages.append(1) }}")
    with pytest.raises(ValueError, match="refuses the messages"):
        render("{{ ''.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="is not jinja2: line 2"):
        render("\n{% if %}")


def source(*, adds_bos=True, template="{{ bos_token }}{{ messages[0].content }}", **config) -> TokenizerSource:
    """Characters, with <s> and </s>; its post-processor puts <s> first."""
    vocabulary = {
        "<s>": 0,
        "</s>": 1,
        **{c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz ", start=2)},
        "<end>": 29,
    }
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="</s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(["<s>", "</s>", "<end>"])
    if adds_bos:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    made.enable_padding(length=20)
    made.enable_truncation(3)
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template} | config
    return TokenizerSource(made.to_str(), config, {"eos_token_id": [29, 1]})


def test_there_is_at_most_one_bos_and_never_an_eos():
    tokenizer = HfTokenizer(source(), 30)
    assert tokenizer.bos_id == 0
    assert tokenizer.encode("abcd") == [0, 2, 3, 4, 5]  # nor padding, nor truncation, which its file asks for
    assert tokenizer.encode("<s>ab") == [0, 2, 3]
    assert tokenizer.encode("<s><s>ab") == [0, 2, 3]
    assert HfTokenizer(source(adds_bos=False), 30).encode("ab") == [2, 3]
    assert HfTokenizer(source(add_bos_token=False), 30).encode("ab") == [2, 3]
    assert HfTokenizer(source(adds_bos=False, add_bos_token=True), 30).encode("ab") == [0, 2, 3]
    for template in (
        "{{ bos_token }}{{ bos_token }}{{ messages[0].content }}",
        "{{ bos_token }}{{ messages[0].content }}",
    ):
        assert HfTokenizer(source(template=template), 30, chat=True).encode("ab") == [0, 2, 3]
    assert HfTokenizer(source(template="{{ messages[0].content }}"), 30, chat=True).encode("ab") == [2, 3]


def test_a_prompt_in_chat_format_is_not_formatted_again():
    template = "{{ bos_token }}<end>{{ messages[-1].content }}{% if messages[0].role == 'system' %}z{% endif %}"
    tokenizer = HfTokenizer(source(template=template), 30, chat=True, system_prompt="be nice")
    assert tokenizer.encode("ab") == [0, 29, 2, 3, 27]
    with pytest.raises(ValueError, match="contains '<end>', which the chat template adds itself"):
        tokenizer.encode("<end>ab")
    assert HfTokenizer(source(template=template), 30).encode("<end>ab") == [0, 29, 2, 3]


def test_every_end_of_a_sequence_counts_and_the_tokenizers_own_is_first():
    assert HfTokenizer(source(), 30).eos_ids == (1, 29)
    assert HfTokenizer(source(eos_token="<end>"), 30).eos_ids == (29, 1)
    assert HfTokenizer(source(pad_token="</s>"), 30).eos_ids == (1, 29)
    nothing = TokenizerSource(source().json, {}, {})
    with pytest.raises(ValueError, match="names an end of a sequence"):
        HfTokenizer(nothing, 30)


def test_special_tokens_that_are_tags_are_part_of_the_text():
    """Field report: a reward that waits for <think> was 0 for ever, since decoding dropped it."""
    made = tokenizers.Tokenizer.from_str(source().json)
    made.add_special_tokens(["<think>", "</think>", "<pad>"])
    tokenizer = HfTokenizer(TokenizerSource(made.to_str(), {"eos_token": "</s>", "pad_token": "<pad>"}, {}), 40)
    text = "<think>ab</think>cd"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([*tokenizer.encode(text), 1, *tokenizer.encode("<pad><pad>")]) == text


def test_ids_beyond_the_tokenizer_are_no_text_and_beyond_the_model_are_refused():
    tokenizer = HfTokenizer(source(), 40)
    assert tokenizer.vocab_size == 40
    assert tokenizer.decode([0, 2, 35, 3, 1]) == "ab"
    with pytest.raises(ValueError, match="token id 29 \\('<end>'\\) is outside the model's embedding of 28"):
        HfTokenizer(source(), 28).encode("<end>")


def test_without_a_template_there_is_no_chat():
    with pytest.raises(ValueError, match=r"no chat template: set pretrained.chat to False"):
        HfTokenizer(source(template=None), 30, chat=True)
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "y"}]
    assert HfTokenizer(source(template=named), 30).template.source == "y"


def test_files_make_the_same_tokenizer_again(tmp_path):
    from p3o_jax.models.stored.pretrained import Pretrained, open_model

    path = copy_with_tokenizer("qwen3", tmp_path)
    tokenizer = Pretrained(str(path)).tokenizer(open_model(str(path)))
    assert tokenizer.encode("12=") == TOKENIZER.encode("u12=a")
    assert tokenizer.eos_ids == (0, 5)
    for name, text in tokenizer_files(tokenizer).items():
        (path / name).write_text(text)
    again = Pretrained(str(path)).tokenizer(open_model(str(path)))
    assert again.encode("12=") == tokenizer.encode("12=")
    assert again.template.source == tokenizer.template.source


def byte_level() -> HfTokenizer:
    """A byte a token, as GGUF files have it, and an end."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    data = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*alphabet, "<|end|>"],
        "tokenizer.ggml.token_type": [1] * 256 + [3],
        "tokenizer.ggml.eos_token_id": 256,
    }
    return HfTokenizer(tokenizer_source(data, Path("here.gguf")), 257)


def test_text_streams_as_valid_utf_8_and_whole():
    tokenizer = byte_level()
    text = "naïve 日本語 🙂!"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    stream = TextStream(tokenizer)
    pieces = [stream.push(i) for i in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.finish() == text
    assert max(map(len, pieces)) == 1  # a character comes as soon as its last byte is there


def test_whatever_is_sampled_streams_to_what_it_decodes_to():
    tokenizer, rng = byte_level(), random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(257) for _ in range(40)]
        stream = TextStream(tokenizer)
        pieces = [stream.push(i) for i in ids]
        for piece in pieces:
            piece.encode()
        assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)
    stream = TextStream(CharTokenizer("ab"))
    assert [stream.push(1), stream.push(2), stream.push(0), stream.finish()] == ["a", "b", "", ""]


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes():
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "ab", "▁ab", "ba", "▁a"]
    scores = [0.0] * 259 + [-10.0, -10.0, -10.0, -1.0, -2.0, -0.5, -3.0]
    data = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 7,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer = HfTokenizer(tokenizer_source(data, Path("here.gguf")), len(pieces))
    ids = {piece: i for i, piece in enumerate(pieces)}
    assert tokenizer.encode("ab") == [1, ids["▁ab"]]
    assert tokenizer.encode("aba") == [1, ids["▁a"], ids["ba"]]  # ba before ab: the better score first
    assert tokenizer.encode("é") == [1, ids["▁"], *(3 + b for b in "é".encode())]
    assert tokenizer.decode(tokenizer.encode("ab é")) == "ab é"


def test_a_gguf_tokenizer_of_another_kind_is_named():
    with pytest.raises(ValueError, match=r"here.gguf: tokenizer 'rwkv' is not one that is read"):
        tokenizer_source({"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]}, Path("here.gguf"))
    data = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": "deepseek-v3"}
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre='deepseek-v3' is not one that is read"):
        tokenizer_source(data, Path("here.gguf"))
