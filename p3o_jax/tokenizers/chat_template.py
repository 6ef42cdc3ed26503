"""Chat templates, as published with models and rendered as transformers renders them: jinja2, in a sandbox.

A template is rendered in a process of its own, within limits of memory, computing time and text (`template_worker`):
one that takes more is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from p3o_jax.tokenizers import template_process

Message = Mapping[str, str]
_OURS = ("messages", "tools", "documents", "add_generation_prompt")
MAX_CHARACTERS = 2**20
"""Of a template. The longest published ones have 30,000."""


class ChatTemplate:
    """A template of a chat's text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        """
        Args:
            source: jinja2.
            special_tokens: texts by their names in templates, such as bos_token.

        Raises:
            ValueError: it is longer than any template.
        """
        if len(source) > MAX_CHARACTERS:
            raise ValueError(f"the chat template has {len(source)} characters, more than the {MAX_CHARACTERS} of any")
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        options: Mapping[str, bool | int | float | str] = MappingProxyType({}),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a chat.

        Args:
            messages: each with its role (system, user, assistant) and content.
            options: what else the template asks for, such as Qwen3's enable_thinking.
            add_generation_prompt: end with what an answer begins after.

        Raises:
            ImportError: jinja2 is not installed.
            ValueError: the template refuses these messages, does not compile, or takes too much.
        """
        reserved = [name for name in options if name in _OURS]
        if reserved:
            raise ValueError(f"the template option {reserved[0]} is not free: every template is given it already")
        try:
            return template_process.render(
                self.source,
                {
                    **self._special_tokens,
                    **options,
                    "messages": [dict(message) for message in messages],
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                },
            )
        except template_process.TemplateError as error:
            raise ValueError(f"the chat template {error}") from error
