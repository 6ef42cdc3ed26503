"""The program that runs: its name as a module, where its modules are found, and the command that started it."""

from __future__ import annotations

import sys
from pathlib import Path


def module_name() -> str | None:
    """Names the main module as an import would: of `python -m a.b` a.b, of `python exp.py` exp.

    None: it is no module's file, as in an interactive session or an installed command.
    """
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name
    path = Path(getattr(main, "__file__", None) or "")
    return path.stem if path.suffix == ".py" and path.stem.isidentifier() else None


def module_directory() -> Path | None:
    """Finds the directory that has to be on `sys.path` for `module_name` to be imported."""
    name, file = module_name(), getattr(sys.modules.get("__main__"), "__file__", None)
    return None if name is None or file is None else Path(file).absolute().parents[name.count(".")]


def command() -> list[str]:
    """Repeats the command line as it was typed, `python -m` included."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None:
        return [sys.executable, *sys.argv]
    return [sys.executable, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
