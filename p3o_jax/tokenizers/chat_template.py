"""Chat templates, as published with models and rendered as transformers renders them: jinja2, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

Message = Mapping[str, str]


class ChatTemplate:
    """A template of a chat's text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        """
        Args:
            source: jinja2.
            special_tokens: texts by their names in templates, such as bos_token.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)

    @cached_property
    def _compiled(self) -> Any:
        try:
            from jinja2 import TemplateError, TemplateSyntaxError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise ImportError(f"{error}: chat templates need: pip install 'p3o_jax[models]'") from error

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:  # jinja2's own escapes HTML
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            return environment.from_string(self.source)
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not jinja2: line {error.lineno}: {error.message}") from error

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
            ValueError: the template refuses these messages.
        """
        compiled = self._compiled
        from jinja2 import TemplateError

        try:
            return compiled.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **options,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error


def _generation_tag() -> type:
    """`{% generation %}`, with which templates mark what the assistant said: its contents."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    return Generation
