"""Tokenizers as published with models: `tokenizer.json`, and the chat template that belongs to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from p3o_jax.inputs.errors import refused, shown
from p3o_jax.inputs.kinds import Maybe, Whole, checked, flag, table, text
from p3o_jax.tokenizers.chat_template import ChatTemplate, Message
from p3o_jax.tokenizers.prompt_format import FILE, PromptFormat
from p3o_jax.tokenizers.source import TokenizerSource

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_CONFIG, _ID = "tokenizer_config.json", Whole(0, 2**31 - 1)
UNUSED = "pretrained"
"""What an export calls the chat template of a model that was trained without it."""


class HfTokenizer:
    """A published tokenizer. For a chat model a prompt's text is what the user says.

    Nothing is assumed of padding: a token that a model pads with may well be its end of sequence.
    """

    def __init__(
        self,
        source: TokenizerSource,
        vocab_size: int,
        *,
        chat: bool = False,
        system_prompt: str | None = None,
        template_options: Mapping[str, bool | int | float | str] | None = None,
    ):
        """
        Args:
            source: what it is made from.
            vocab_size: entries of the model's embedding; ids beyond the tokenizer's own stand for no text.
            chat: whether `encode` puts the text into the chat template, as what the user says.
            system_prompt: what the system says before; None: nothing, or what the template says itself.
            template_options: other values for the template, such as Qwen3's enable_thinking.

        Raises:
            ImportError: the `tokenizers` package is not installed.
            ValueError: `chat` without a template, no end of a sequence, or a tokenizer that does not parse.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError(f"{error}: published tokenizers need: pip install 'p3o_jax[models]'") from error
        with refused("tokenizer.json does not read"):
            self._tokenizer = Tokenizer.from_str(source.json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.source, self._vocab_size = source, vocab_size
        self._at = "" if source.path is None else f"{source.path}: "
        named = {name: _text(source.config, name) for name in _SPECIAL}
        tokens = {name: text for name, text in named.items() if text is not None}
        self._bos_id = self._bos(tokens.get("bos_token"))
        self._eos_ids = self._ends(tokens.get("eos_token"))
        roles = {self._tokenizer.token_to_id(text) for text in tokens.values()}
        self._unwritten = frozenset({*self._eos_ids, *(i for i in roles if i is not None)})
        template = default_template(source.config)
        self.template = None if template is None else ChatTemplate(template, tokens)
        """The chat template; None: it has none."""
        if chat and self.template is None:
            trained = source.prompt_format is not None and not source.prompt_format.chat
            why = f"the model was trained without one ({FILE})" if trained else "the tokenizer has no chat template"
            raise ValueError(f"{why}: set pretrained.chat to False")
        self.chat, self._system_prompt, self._options = chat, system_prompt, dict(template_options or {})
        self._controls = () if self.template is None or not chat else self._control_tokens(self.template)

    @property
    def vocab_size(self) -> int:
        """Entries of the model's embedding."""
        return self._vocab_size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end of a sequence, then the others that the model may end with."""
        return self._eos_ids

    @property
    def bos_id(self) -> int | None:
        """What `encode` puts first where the text does not begin with it; None: nothing."""
        return self._bos_id

    @property
    def prompt_format(self) -> PromptFormat:
        """What `encode` makes of a text, as it is written beside an exported model."""
        return PromptFormat(True, self._system_prompt, self._options) if self.chat else PromptFormat(False)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt: of a chat in which the user says the text, or of the text itself.

        Raises:
            ValueError: a chat's text that is already in a chat format, or an id that the model does not have.
        """
        rendered = self._rendered(text)
        return self._encode(rendered, bos=not self.chat)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """What `encode` gives for each of some texts, all encoded at once.

        Raises:
            ValueError: as `encode`, if any of them is refused.
        """
        rendered = [self._rendered(text) for text in texts]
        encoded = self._tokenizer.encode_batch(rendered, add_special_tokens=False)
        return [self._checked(one.ids, bos=not self.chat) for one in encoded]

    @property
    def identity(self) -> str:
        """A digest of all that ids depend on."""
        source = self.source
        made_of = [source.json, dict(source.config), dict(source.generation), self._vocab_size]
        made_of += [self.chat, self._system_prompt, self._options]
        return hashlib.blake2b(json.dumps(made_of, sort_keys=True).encode(), digest_size=16).hexdigest()

    def _rendered(self, text: str) -> str:
        """What is encoded of a prompt."""
        if self.template is None or not self.chat:
            return text
        for control in self._controls:
            if control in text:
                raise ValueError(
                    f"a prompt contains {control!r}, which the chat template adds itself: give what the user says, or "
                    f"set pretrained.chat to False for prompts that are in the format already; {text[:80]!r}"
                )
        system = [] if self._system_prompt is None else [{"role": "system", "content": self._system_prompt}]
        return self.template.render([*system, {"role": "user", "content": text}], self._options)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat up to where the assistant is to answer."""
        if self.template is None:
            raise ValueError("the tokenizer has no chat template")
        try:
            rendered = self.template.render(messages, self._options)
        except ValueError as error:
            raise ValueError(f"{self._at}{error}") from error
        return self._encode(rendered, bos=False)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids, without those that begin, end or pad a sequence.

        Other special tokens are there: the tags of a reasoning block are special tokens of many models.
        """
        return self._tokenizer.decode([i for i in ids if i not in self._unwritten], skip_special_tokens=False)

    def _encode(self, text: str, *, bos: bool) -> list[int]:
        with refused(f"{self._at}tokenizer.json does not encode a text"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._checked(ids, bos=bos)

    def _checked(self, ids: list[int], *, bos: bool) -> list[int]:
        begin = self._tokenizer.token_to_id(_text(self.source.config, "bos_token") or "")
        if begin is not None and begin in ids[:1]:  # one is enough, whoever put it there
            while ids[1:2] == [begin]:
                del ids[1]
        elif bos and self._bos_id is not None:
            ids = [self._bos_id, *ids]
        outside = [i for i in ids if i >= self._vocab_size]
        if outside:
            name = shown(self._tokenizer.id_to_token(outside[0]))
            raise ValueError(
                f"{self._at}token id {outside[0]} ({name}) is outside the model's embedding of {self._vocab_size}"
            )
        return ids

    def _bos(self, text: str | None) -> int | None:
        """What a text begins with: as tokenizer_config.json says, or else as the tokenizer itself does."""
        token = None if text is None else self._tokenizer.token_to_id(text)
        adds = checked(self.source.config.get("add_bos_token"), Maybe(flag), _CONFIG, "add_bos_token")
        if adds is None:
            with refused(f"{self._at}tokenizer.json does not encode a text"):
                adds = token is not None and self._tokenizer.encode("").ids[:1] == [token]
        return token if adds else None

    def _ends(self, text: str | None) -> tuple[int, ...]:
        """Every token that the tokenizer's and the generation's configuration call an end, each once."""
        stored = self.source.generation.get("eos_token_id")
        stored = stored if isinstance(stored, list) else [stored]
        of_generation = [checked(i, Maybe(_ID), "generation_config.json", "eos_token_id") for i in stored]
        own = None if text is None else self._tokenizer.token_to_id(text)
        ends = tuple(dict.fromkeys(i for i in (own, *of_generation) if i is not None))
        if not ends:
            raise ValueError("neither the tokenizer's nor the generation's configuration names an end of a sequence")
        return ends

    def _control_tokens(self, template: ChatTemplate) -> tuple[str, ...]:
        """The texts of special tokens that a template writes."""
        special = (token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special)
        written = template.render([{"role": "user", "content": "x"}], self._options)
        return tuple(text for text in special if text in written)


def _text(config: Mapping[str, Any], name: str) -> str | None:
    """Of a special token, which is stored as its text or as an object with it."""
    token = config.get(name)
    if isinstance(token, dict):
        return checked(token.get("content"), text, _CONFIG, f"{name}.content")
    return checked(token, Maybe(text), _CONFIG, name)


def default_template(config: Mapping[str, Any]) -> str | None:
    """The chat template of a `tokenizer_config.json`; of several, the one named default.

    Raises:
        ValueError: it is neither a text nor a list of named ones.
    """
    stored = config.get("chat_template")
    if not isinstance(stored, list):
        return checked(stored, Maybe(text), _CONFIG, "chat_template")
    named = {}
    for entry in stored:
        entry = checked(entry, table, _CONFIG, "an entry of chat_template")
        parts = [checked(entry.get(part), text, _CONFIG, f"chat_template.{part}") for part in ("name", "template")]
        named[parts[0]] = parts[1]
    return named.get("default")


def tokenizer_files(tokenizer: HfTokenizer) -> dict[str, str]:
    """The files that `transformers` loads such a tokenizer from, by name.

    Of one that is used without its chat template, that template has a name: `transformers` takes it when it is asked
    for by name, and says that there is no default when it is not.
    """
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.source.config}
    files = {"tokenizer.json": tokenizer.source.json}
    if tokenizer.template is not None and tokenizer.chat:
        files["chat_template.jinja"] = tokenizer.template.source
        config.pop("chat_template", None)
    elif tokenizer.template is not None:
        stored = config.get("chat_template")
        others = [entry for entry in stored if entry["name"] != "default"] if isinstance(stored, list) else []
        config["chat_template"] = [*others, {"name": UNUSED, "template": tokenizer.template.source}]
    files["tokenizer_config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return files
