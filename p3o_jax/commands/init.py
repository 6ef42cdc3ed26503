"""Begins a project of one's own: an experiment, a task, an objective, their test."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from p3o_jax.terminal import say

NEXT = """cd {directory}
pytest                         # what the project computes, against numbers worked out by hand
python experiment.py mine      # trains, in seconds on a CPU
p3o runs                       # which runs there are
README.md has the rest."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Where the project is to be."""

    directory: Annotated[Positional[Path], arg(metavar="DIR")]
    """A directory that is empty, or not there yet."""


def run(arguments: Sequence[str]) -> None:
    """Writes the files of a project, and says what to do next.

    Raises:
        FileExistsError: there is something in the directory.
    """
    directory = tyro.cli(Arguments, args=list(arguments), prog="p3o init", description=__doc__).directory
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise FileExistsError(f"{directory} is not an empty directory: give another")
    with as_file(files("p3o_jax") / "project_template") as template:
        shutil.copytree(template, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    say(NEXT.format(directory=directory))
