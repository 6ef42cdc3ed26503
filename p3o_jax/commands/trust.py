"""Where the modules of `--trust MODULE` are found."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from p3o_jax.runs.directory import module_directory_of


def make_findable(trusted: Sequence[str], run_dir: Path | None = None) -> None:
    """Lets trusted modules be imported from the working directory, then from where a run found its own.

    Both come after everything else, and the second only if it is needed: a directory that somebody's file names gives
    no module that was not asked for.

    Raises:
        ValueError: one is no name of a module.
    """
    for module in trusted:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(f"--trust {module}: give the name of a module, such as experiments.quickstart")
    if trusted and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    missing = [module for module in trusted if find_spec(module.partition(".")[0]) is None]
    directory = module_directory_of(run_dir) if missing and run_dir is not None else None
    if directory is not None and directory not in sys.path:
        print(f"{', '.join(missing)}: looked for in {directory}, as the run did", file=sys.stderr)
        sys.path.append(directory)
