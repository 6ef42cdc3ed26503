"""Writes a policy as `transformers` loads it: safetensors, configuration and tokenizer, adapters merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from p3o_jax.commands.trust import Trust, trusting
from p3o_jax.terminal import say


@dataclass(frozen=True)
class Export:
    """Writes a policy to a directory that `transformers` and what loads its models can read."""

    policy: tyro.conf.Positional[str]
    """A run's directory (with @STEP for a certain checkpoint), a model's, a .gguf file, or smollm2-135m."""
    directory: tyro.conf.Positional[Path]
    """Where to; it must not exist."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the stored weights; float32 loses nothing."""
    trust: Trust = ()
    """A module that a run's config.json may name, besides p3o_jax's own: it is imported, and so run. Repeatable."""


def run(arguments: Sequence[str]) -> None:
    """Loads the policy, and writes it."""
    from p3o_jax.devices import sharding
    from p3o_jax.models.stored.export import export_model
    from p3o_jax.policies import load_policy
    from p3o_jax.tokenizers.hf import HfTokenizer

    options = tyro.cli(Export, prog="p3o export", description=__doc__, args=arguments)
    if options.directory.exists():
        raise FileExistsError(f"{options.directory} exists: give another directory")
    policy = load_policy(options.policy, sharding.make_mesh(), trusted=trusting(options.trust))
    export_model(options.directory, policy.params, policy.model, policy.tokenizer, dtype=options.dtype)
    at = f" at step {policy.step}" if policy.step else ""
    made = f"; {policy.tokenizer.prompt_format}" if isinstance(policy.tokenizer, HfTokenizer) else ""
    say(f"{policy.name}{at}: {options.directory}{made}")
