"""Shows runs in one HTML file: curves over seeds, final values with errors, configurations, rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from p3o_jax.commands.arguments import Directory
from p3o_jax.terminal import say


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Runs, finished or not, in one HTML file that needs no other."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN...")]
    """Run directories, or directories that hold some."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("report.html")
    """The file."""
    figures: Directory = None
    """A directory for every figure as SVG and PNG."""
    title: Annotated[str, arg(metavar="TEXT")] = "P3O runs"
    """Title of the page."""
    most_tokens: int = 200_000
    """Tokens of rollouts that go into the page; each takes about 25 bytes."""


def run(arguments: Sequence[str]) -> None:
    """Writes the report."""
    asked = tyro.cli(Arguments, args=list(arguments), prog="p3o report", description=__doc__)
    if not asked.runs:
        raise ValueError("p3o report: name at least one run directory, such as runs/quickstart")

    from p3o_jax.report.page import write
    from p3o_jax.report.runs import find, group, load

    groups = group([load(path) for path in find(asked.runs)])
    count = write(groups, asked.out, title=asked.title, most_tokens=asked.most_tokens, figures_dir=asked.figures)
    num_runs = sum(len(group.runs) for group in groups)
    say(f"{asked.out}: {num_runs} runs in {len(groups)} variants, {count} figures")
    if asked.figures:
        say(f"{asked.figures}: the figures as SVG and PNG")
