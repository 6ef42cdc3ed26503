"""Lists the runs under a directory: step, reward, ESS, whether they run, have finished, stopped or failed, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from p3o_jax.terminal import say


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Lists the runs under a directory."""

    directory: Annotated[Positional[Path], arg(metavar="[DIR]")] = Path("runs")
    """Where to look, at any depth."""


def run(arguments: Sequence[str]) -> None:
    """Prints a line a run, oldest first.

    Raises:
        ValueError: there are none.
    """
    asked = tyro.cli(Arguments, args=list(arguments), prog="p3o runs", description=__doc__)
    found = sorted(asked.directory.glob("**/config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(f"no runs in {asked.directory}")
    for line in table([path.parent for path in found], asked.directory):
        say(line.replace("\n", " "))


def table(run_dirs: Sequence[Path], base: Path) -> list[str]:
    """The lines: a header, then one a run."""
    from p3o_jax.runs import status as run_status  # not at once: they bring JAX, which takes seconds
    from p3o_jax.writers import read_metrics

    rows = [("run", "step", "reward", "ESS", "state")]
    for run_dir in run_dirs:
        status = run_status.read(run_dir)
        try:
            last = {tag: value for line in read_metrics(run_dir) for tag, value in line.items()}
        except (OSError, ValueError):
            last = {}
        of = f"/{status['num_steps']}" if status["num_steps"] else ""
        state = status["state"] + (f": {status['reason']}" if status["reason"] else "")
        name = "." if run_dir == base else str(run_dir.relative_to(base))
        rows.append(
            (name, f"{last.get('step', 0)}{of}", _number(last, "reward/mean"), _number(last, "policy/ess"), state)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return ["  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3)), row[4]]) for row in rows]


def _number(last: dict[str, float], tag: str) -> str:
    return f"{last[tag]:.3f}" if tag in last else "-"
