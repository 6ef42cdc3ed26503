"""Writes a policy as `transformers` loads it: safetensors, configuration and tokenizer, adapters merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, arg

from p3o_jax.commands.arguments import ModelArguments
from p3o_jax.terminal import say


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelArguments):
    """What to write, and where to."""

    directory: Annotated[Positional[Path], arg(metavar="DIR")]
    """Where to; it must not exist."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the stored weights; float32 loses nothing."""


def run(arguments: Sequence[str]) -> None:
    """Loads the policy, and writes it."""
    from p3o_jax.devices import sharding
    from p3o_jax.models.stored.export import export_model
    from p3o_jax.tokenizers.hf import HfTokenizer

    asked = tyro.cli(Arguments, args=list(arguments), prog="p3o export", description=__doc__)
    if asked.directory.exists():
        raise FileExistsError(f"{asked.directory} exists: give another directory")
    policy = asked.open(sharding.make_mesh())
    export_model(asked.directory, policy.params, policy.model, policy.tokenizer, dtype=asked.dtype)
    at = f" at step {policy.step}" if policy.step else ""
    made = f"; {policy.tokenizer.prompt_format}" if isinstance(policy.tokenizer, HfTokenizer) else ""
    say(f"{policy.name}{at}: {asked.directory}{made}")
