"""JSON of others: of bounded size, in UTF-8, without two values for one name, refused in one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from p3o_jax.inputs.errors import one_line, shown

MAX_BYTES = 64 * 2**20
"""Of a file of settings or names: four times the index of a model of 200,000 tensors. Parsed, it may take 20 times as
much."""


def read_json(path: Path, missing: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A file's JSON object; `missing` if there is no such file, or else an error.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a JSON object, too large, or has a name twice with different values.
    """
    if not path.exists():
        if missing is None:
            raise FileNotFoundError(f"{path.parent} has no {path.name}")
        return dict(missing)
    text = read_text(path)
    try:
        values = parse_json(text, unique=True)
    except ValueError as error:
        raise ValueError(f"{path} is {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object")
    return values


def read_text(path: Path, at_most: int = MAX_BYTES) -> str:
    """A text file of bounded size.

    Raises:
        ValueError: it is larger, no file, or not UTF-8.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    size = path.stat().st_size
    if size > at_most:
        raise ValueError(f"{path} has {size} bytes, which is more than the {at_most} that are read")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}; fetch it again") from error


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """A JSON value.

    Args:
        text: what to parse.
        unique: refuse an object that has a name twice with different values, of which JSON takes the last.

    Raises:
        ValueError: it is "not valid JSON: ", and why; or nested too deep to be read.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError as error:
        raise ValueError("not valid JSON: it is nested too deep") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid JSON: no UTF-8, {error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise ValueError(f"not valid JSON: {one_line(error)}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        for name, value in pairs:
            if type(values[name]) is not type(value) or values[name] != value:
                raise ValueError(f"{shown(name)} is there twice, as {shown(value)} and as {shown(values[name])}")
    return values
