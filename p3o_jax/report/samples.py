"""Which rollouts go into the page, and in what form."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from p3o_jax.json_lines import read_json_lines
from p3o_jax.report.runs import Group

MOST_STEPS = 12
"""Of a run; evenly spaced, the first and the last among them."""


def rollouts(groups: Sequence[Group], most_tokens: int) -> list[dict[str, Any]]:
    """For the page's browser: runs, their steps, the steps' prompts and the completions to each.

    Args:
        most_tokens: of all runs together; prompts beyond a step's share are left out, but for one.

    Raises:
        ValueError: a damaged file, by name and line.
    """
    runs = [(group.label, run) for group in groups for run in group.runs if run.rollout_files]
    found = []
    for label, run in runs:
        steps = list(run.rollout_files)
        chosen = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, MOST_STEPS).round().astype(int))]
        share = most_tokens // (len(runs) * len(chosen))
        of_steps = [{"step": step} | _of_step(run.rollout_files[step], share) for step in chosen]
        found.append({"label": f"{label}, seed {run.seed}", "path": str(run.path), "steps": of_steps})
    return found


def _of_step(path: Path, share: int) -> dict[str, Any]:
    rows = read_json_lines(path)
    prompts: list[dict[str, Any]] = []
    tokens = total = 0
    for _, of_prompt in groupby(rows, key=lambda row: row["prompt_index"]):
        group = list(of_prompt)
        total += 1
        tokens += sum(len(row["tokens"]) for row in group)
        if tokens <= share or not prompts:
            prompts.append(
                {"index": group[0]["prompt_index"], "prompt": group[0]["prompt"], "rows": [_compact(r) for r in group]}
            )
    return {"prompts": prompts, "total": total}


def _compact(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "reward": row["reward"],
        "advantage": row["advantage"],
        "ended": row["finish_reason"],
        "version": row["policy_version"],
        "tokens": row["tokens"],
        "mu": [_rounded(value) for value in row["behaviour_log_probs"]],
        "ratio": [_rounded(value) for value in row["log_ratios"]] if "log_ratios" in row else None,
    }


def _rounded(value: float | str) -> float | str:
    return value if isinstance(value, str) else round(value, 3)  # "nan" and "inf" are strings
