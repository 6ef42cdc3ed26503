"""How the prompts of an exported model were made, written beside it so that whoever loads it makes them alike.

`p3o.json` holds {"prompts": {"chat": ..., "system_prompt": ..., "template_options": ...}}, with the fields of
`Pretrained`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from p3o_jax.inputs.json_files import read_json
from p3o_jax.inputs.kinds import Maybe, checked, flag, table, text

FILE = "p3o.json"


@dataclass(frozen=True)
class PromptFormat:
    """What becomes of a prompt's text."""

    chat: bool
    """It is what the user says, in the chat template; otherwise it is the model's input as it is."""
    system_prompt: str | None = None
    """What the system says first in a chat."""
    template_options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Other values for the template."""

    def __str__(self) -> str:
        """In words."""
        if not self.chat:
            return "prompts as they are, without a chat template"
        system = "no system prompt" if self.system_prompt is None else f"the system prompt {self.system_prompt[:60]!r}"
        options = f", {dict(self.template_options)}" if self.template_options else ""
        return f"prompts in its chat template, with {system}{options}"

    def file(self) -> str:
        """The contents of `p3o.json`."""
        return json.dumps({"prompts": asdict(self)}, indent=2, ensure_ascii=False) + "\n"

    def card(self) -> str:
        """The contents of `README.md`, for people."""
        how = f"It was used with {self} (`{FILE}`)."
        if not self.chat:
            how += (
                "\nIt has no default chat template for that reason. If the model it was trained from has one, "
                "`tokenizer_config.json`\nkeeps it under the name `pretrained`: this model was not trained with it."
            )
        return f"# Exported by p3o_jax\n\n{how}\n"


def read_prompt_format(path: Path) -> PromptFormat | None:
    """What the directory of a model says of its prompts; None: nothing.

    Raises:
        ValueError: a file that does not read.
    """
    file = path / FILE
    values = read_json(file, missing={}).get("prompts")
    if values is None:
        return None
    values = checked(values, table, file, "prompts")
    options = checked(values.get("template_options", {}), table, file, "prompts.template_options")
    for name, value in options.items():
        checked(value, _option, file, f"prompts.template_options.{name}")
    return PromptFormat(
        checked(values.get("chat"), flag, file, "prompts.chat"),
        checked(values.get("system_prompt"), Maybe(text), file, "prompts.system_prompt"),
        options,
    )


def _option(value: object) -> object:
    if not isinstance(value, bool | int | float | str):
        raise ValueError("true, false, a number or a text")
    return value
