"""A published dataset to one file of JSON lines: prompt and answer, every prompt once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from p3o_jax.commands.arguments import RowArguments
from p3o_jax.terminal import say


@dataclass(frozen=True, kw_only=True)
class Arguments(RowArguments):
    """What to convert, and where to."""

    layout: Annotated[Positional[str], arg(metavar="LAYOUT")]
    """What is published there: aime, amc, dapo_math, deepscaler, gsm8k, math or math500 (docs/tasks.md)."""
    path: Annotated[Positional[str], arg(metavar="PATH")]
    """File, pattern of files, or directory of JSON files."""
    out: Annotated[Positional[Path], arg(metavar="OUT.jsonl")]
    """File to write; `Dataset(path=...)` reads it."""


def run(arguments: Sequence[str]) -> None:
    """Writes the rows of a dataset, in order, as `{"prompt": ..., "answer": ...}`; says how many.

    Every answer is judged against itself by the layout's reward.

    Raises:
        ValueError: an unknown layout, or rows that cannot be used, with file and line.
        FileExistsError: the output is there already.
    """
    asked = tyro.cli(Arguments, args=list(arguments), prog="p3o convert", description=__doc__)

    from p3o_jax.experience.row_checks import Checks, usable
    from p3o_jax.rewards.pool import Verifiers
    from p3o_jax.runs.directory import write_atomically
    from p3o_jax.tasks import Dataset
    from p3o_jax.tasks.specification import LAYOUTS, task_of

    if asked.layout not in LAYOUTS:
        raise ValueError(f"convert: unknown layout {asked.layout!r}; choose from {', '.join(LAYOUTS)}")
    if asked.out.exists():
        raise FileExistsError(f"{asked.out} exists")
    dataset = task_of(f"{asked.layout}:{asked.path}")
    verifiers = Verifiers(timeout_seconds=asked.verifier_timeout_seconds)
    dataset = usable(dataset, Checks(None, verifiers, unusable_rows=asked.unusable_rows))
    assert isinstance(dataset, Dataset)
    rows = list(dataset.rows())
    lines = (json.dumps({"prompt": row.text, "answer": row.answer}, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(asked.out, "".join(lines))
    say(f"{asked.out}: {len(rows)} rows")
