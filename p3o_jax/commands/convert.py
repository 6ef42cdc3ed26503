"""A published dataset to one file of JSON lines: prompt and answer, every prompt once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

USAGE = "p3o convert LAYOUT PATH OUTPUT.jsonl"


def run(arguments: Sequence[str]) -> None:
    """Writes the rows of a dataset, in order, as `{"prompt": ..., "answer": ...}`; says how many.

    Raises:
        ValueError: an unknown layout, or a row that cannot be read, with its file and line.
        FileExistsError: the output is there already.
    """
    from p3o_jax.runs.directory import write_atomically
    from p3o_jax.tasks import Dataset
    from p3o_jax.tasks.specification import LAYOUTS, task_of

    options = argparse.ArgumentParser(prog="p3o convert", usage=USAGE)
    options.add_argument("layout", choices=LAYOUTS, help="what is published there")
    options.add_argument("path", help="file, pattern of files, or directory of JSON files")
    options.add_argument("output", type=Path, help="file to write; `Dataset(path=...)` reads it")
    chosen = options.parse_args(arguments)
    if chosen.output.exists():
        raise FileExistsError(f"{chosen.output} exists")
    dataset = task_of(f"{chosen.layout}:{chosen.path}")
    assert isinstance(dataset, Dataset)
    rows = list(dataset.rows())
    lines = (json.dumps({"prompt": row.text, "answer": row.answer}, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(chosen.output, "".join(lines))
    print(f"{chosen.output}: {len(rows)} rows")
