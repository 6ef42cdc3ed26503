"""Experiments and tasks by the names that a command line gives them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from p3o_jax.config import Config
from p3o_jax.tasks import Task
from p3o_jax.tasks.specification import LAYOUTS, task_of


class Experiment(NamedTuple):
    """A file of variants."""

    description: str
    variants: Mapping[str, Config]


def find_experiment(name: str) -> Experiment:
    """Imports an experiment: NAME.py in the working directory, a path that ends in .py, or a name in `experiments`.

    It is imported as `python exp.py` and `python -m experiments.NAME` find it; so it runs, and what it imports.

    Raises:
        ValueError: there is none, with what was looked for; or it cannot be imported, or has no variants.
    """
    module = _module(name)
    if module is None:
        looked = [str(path) for path, _, _ in _places(name)]
        if not looked:
            raise ValueError(f"no experiment {name!r}: give the path of a file that ends in .py, or a module's name")
        if not name.endswith(".py"):
            looked.append(f"an installed experiments.{name}")
        raise ValueError(f"no experiment {name!r}: looked for {', '.join(looked)}")
    variants = getattr(module, "VARIANTS", None)
    if not isinstance(variants, Mapping) or not variants:
        raise ValueError(f"experiment {name}: {module.__file__} has no VARIANTS, its configurations by name")
    return Experiment((module.__doc__ or name).splitlines()[0], variants)


def configuration(name: str) -> Config:
    """Finds the configuration of EXPERIMENT[:VARIANT]; without a variant, the first.

    Raises:
        ValueError: there is no such experiment or variant.
    """
    experiment, _, variant = name.partition(":")
    variants = find_experiment(experiment).variants
    if variant and variant not in variants:
        raise ValueError(f"unknown variant {variant!r} of {experiment}; choose from {', '.join(variants)}")
    return variants[variant or next(iter(variants))]


def task_named(specification: str) -> Task:
    """Finds the task that LAYOUT:FILE, reasoning_gym:DATASET, EXPERIMENT[:VARIANT] or module:function names.

    Raises:
        ValueError: none of them.
    """
    head, _, rest = specification.partition(":")
    if head not in (*LAYOUTS, "reasoning_gym"):
        variants = getattr(_module(head), "VARIANTS", {})
        if variants and (not rest or rest in variants):
            return variants[rest or next(iter(variants))].task
        if rest and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
    return task_of(specification)


def _places(name: str) -> list[tuple[Path, Path, str]]:
    """Lists the files that an experiment can be, each with where it is imported from and under which name."""
    here = Path.cwd()
    if name.endswith(".py"):
        path = here / name
        return [(path, path.parent, path.stem)]
    if not all(part.isidentifier() for part in name.split(".")):
        return []
    relative = Path(*name.split(".")).with_suffix(".py")
    return [(here / relative, here, name), (here / "experiments" / relative, here, f"experiments.{name}")]


def _module(name: str) -> ModuleType | None:
    """Imports the module of an experiment; None: there is none of this name."""
    for path, directory, module in _places(name):
        if path.is_file():
            if str(directory) not in sys.path:
                sys.path.insert(0, str(directory))
            found = _imported(module)
            if found.__file__ is None or not path.samefile(found.__file__):
                raise ValueError(f"experiment {name}: another module is called {module}, too: rename {path}")
            return found
    return _imported(f"experiments.{name}") if _is_installed(name) else None


def _is_installed(name: str) -> bool:
    if not name or name.endswith(".py"):
        return False
    try:
        return find_spec(f"experiments.{name}") is not None
    except ModuleNotFoundError:  # what is before the last dot
        return False


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, SyntaxError, ValueError, TypeError) as error:
        raise ValueError(f"{name} cannot be imported: {error}") from error
