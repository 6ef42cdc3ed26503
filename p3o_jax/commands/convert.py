"""A published dataset to one file of JSON lines: prompt and answer, every prompt once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from p3o_jax.tasks.faults import UnusableRows
from p3o_jax.terminal import say

USAGE = "p3o convert LAYOUT PATH OUTPUT.jsonl [--unusable-rows leave_out] [--verifier-timeout-seconds 5]"


def run(arguments: Sequence[str]) -> None:
    """Writes the rows of a dataset, in order, as `{"prompt": ..., "answer": ...}`; says how many.

    Every answer is judged against itself by the layout's reward.

    Raises:
        ValueError: an unknown layout, or rows that cannot be used, with file and line.
        FileExistsError: the output is there already.
    """
    from p3o_jax.experience.row_checks import Checks, usable
    from p3o_jax.rewards.pool import Verifiers
    from p3o_jax.runs.directory import write_atomically
    from p3o_jax.tasks import Dataset
    from p3o_jax.tasks.specification import LAYOUTS, task_of

    options = argparse.ArgumentParser(prog="p3o convert", usage=USAGE)
    options.add_argument("layout", choices=LAYOUTS, help="what is published there")
    options.add_argument("path", help="file, pattern of files, or directory of JSON files")
    options.add_argument("output", type=Path, help="file to write; `Dataset(path=...)` reads it")
    options.add_argument(
        "--unusable-rows", choices=get_args(UnusableRows), default="refuse",
        help="what becomes of rows without text or answer, or whose answer the reward cannot read",
    )  # fmt: skip
    options.add_argument(
        "--verifier-timeout-seconds", type=float, default=5.0, help="a verifier that takes longer is killed"
    )
    chosen = options.parse_args(arguments)
    if chosen.output.exists():
        raise FileExistsError(f"{chosen.output} exists")
    dataset = task_of(f"{chosen.layout}:{chosen.path}")
    verifiers = Verifiers(timeout_seconds=chosen.verifier_timeout_seconds)
    dataset = usable(dataset, Checks(None, verifiers, unusable_rows=chosen.unusable_rows))
    assert isinstance(dataset, Dataset)
    rows = list(dataset.rows())
    lines = (json.dumps({"prompt": row.text, "answer": row.answer}, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(chosen.output, "".join(lines))
    say(f"{chosen.output}: {len(rows)} rows")
