"""Which modules a file may name: `--trust MODULE`, as often as there are any."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import tyro

Trust = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
"""The type of the flag."""


def trusting(modules: tuple[str, ...]) -> tuple[str, ...]:
    """The same modules, found in the working directory too, after everywhere else.

    Raises:
        ValueError: one is no name of a module.
    """
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(f"--trust {module}: give the name of a module, such as experiments.quickstart")
    if modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return modules
