"""The files of an evaluation: NAME.json, its results with how they were sampled; NAME.jsonl, every completion; NAME.md,
a table of some for reading."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from p3o_jax.evaluation.evaluate import STANDARD_ERROR
from p3o_jax.runs.directory import write_atomically

_TABLE_PROMPTS = 20
_CELL_CHARACTERS = 400


def write_evaluation(
    directory: Path,
    name: str,
    metrics: Mapping[str, float],
    completions: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> None:
    """Writes the three files of one task.

    Args:
        directory: where; made if it is not there.
        name: of the task.
        metrics: what was found.
        completions: rows as `evaluate` returns them.
        settings: how they were sampled.

    Raises:
        OSError: the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        results = {"task": name, "results": dict(metrics), "settings": dict(settings)}
        write_atomically(directory / f"{name}.json", json.dumps(results, indent=2, allow_nan=False) + "\n")
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in completions)
        write_atomically(directory / f"{name}.jsonl", "".join(lines))
        write_atomically(directory / f"{name}.md", table(name, metrics, completions))
    except OSError as error:
        raise type(error)(error.errno, f"cannot write {directory}: {error.strerror or error}") from error


def table(name: str, metrics: Mapping[str, float], completions: Sequence[Mapping[str, Any]]) -> str:
    """Results and the completions of the first prompts, in Markdown."""
    first = list(dict.fromkeys(row["prompt_index"] for row in completions))[:_TABLE_PROMPTS]
    lines = [f"# {name}", "", *(f"- {tag}: {value}" for tag, value in readable(metrics)), ""]
    lines += ["| | prompt | completion | answer | expected | reward |", "|---|---|---|---|---|---|"]
    for row in completions:
        if row["prompt_index"] in first:
            mark = "failed" if row["verifier_failure"] else "right" if row["correct"] else "wrong"
            reward = row["verifier_failure"] or f"{row['reward']:g}"
            texts = [_cell(row[column]) for column in ("prompt", "completion", "answer", "expected")]
            lines.append("| " + " | ".join([mark, *texts, reward]) + " |")
    return "\n".join(lines) + "\n"


def readable(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Each metric as text, with its standard error if it has one: `0.430 ± 0.031`."""
    for tag, value in metrics.items():
        error = metrics.get(tag + STANDARD_ERROR)
        if tag.endswith(STANDARD_ERROR) and tag.removesuffix(STANDARD_ERROR) in metrics:
            continue
        if error:
            decimals = max(0, 1 - math.floor(math.log10(error)))  # two digits of the error
            yield tag, f"{value:.{decimals}f} ± {error:.{decimals}f}"
        else:
            yield tag, f"{value:.4g}" if error is None else f"{value:.4g} ± 0"


def _cell(text: str) -> str:
    """Text in one cell of a table, its middle left out if it is long."""
    if len(text) > _CELL_CHARACTERS:
        half = _CELL_CHARACTERS // 2
        text = f"{text[:half]} [...] {text[-half:]}"
    escaped = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return escaped.replace("\n", "<br>")
