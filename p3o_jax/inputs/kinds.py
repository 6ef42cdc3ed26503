"""Kinds of values, each with its range: what a field of a stored configuration may hold.

A kind returns the value as Python has it, or raises a ValueError that says what is wanted; `checked` adds the file and
the field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from p3o_jax.inputs.errors import shown

Kind = Callable[[Any], Any]


def checked(value: Any, kind: Kind, file: object, field: str) -> Any:
    """A value of a kind.

    Args:
        value: as it was read.
        kind: what it must be.
        file: where it was read.
        field: what it is called there.

    Raises:
        ValueError: it is something else, in one line with what is wanted.
    """
    try:
        return kind(value)
    except ValueError as error:
        if value is None:
            raise ValueError(f"{file} has no {field}: it is null, not {error}") from None
        raise ValueError(f"{file}: {field} is {shown(value)}, not {error}") from None


@dataclass(frozen=True)
class Whole:
    """A whole number, neither a flag nor 2.0."""

    low: int
    high: int

    def __call__(self, value: Any) -> int:
        """The number."""
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            raise ValueError(f"a whole number from {self.low} to {self.high}")
        return value


@dataclass(frozen=True)
class Real:
    """A finite number, whole or not."""

    low: float
    high: float

    def __call__(self, value: Any) -> float:
        """The number, as a float."""
        number = not isinstance(value, bool) and isinstance(value, int | float)
        if not number or not self.low <= value <= self.high or not math.isfinite(value):
            raise ValueError(f"a number from {self.low:g} to {self.high:g}")
        return float(value)


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def table(value: Any) -> dict[str, Any]:
    """An object of names and values."""
    if not isinstance(value, Mapping):
        raise ValueError("an object")
    return dict(value)


@dataclass(frozen=True)
class ListOf:
    """A list whose entries are of one kind."""

    kind: Kind
    of: str
    """What they are, in the plural."""

    def __call__(self, value: Any) -> tuple[Any, ...]:
        """The entries."""
        if not isinstance(value, list | tuple):
            raise ValueError(f"a list of {self.of}")
        try:
            return tuple(self.kind(entry) for entry in value)
        except ValueError as error:
            raise ValueError(f"a list of {self.of}, each {error}") from None


@dataclass(frozen=True)
class OneOf:
    """One of some texts."""

    choices: tuple[str, ...]

    def __call__(self, value: Any) -> str:
        """The text."""
        if not isinstance(value, str) or value not in self.choices:
            raise ValueError(f"one of {', '.join(self.choices)}")
        return value


@dataclass(frozen=True)
class Maybe:
    """Of a kind, or null."""

    kind: Kind

    def __call__(self, value: Any) -> Any:
        """The value, or None."""
        try:
            return None if value is None else self.kind(value)
        except ValueError as error:
            raise ValueError(f"{error}, or null") from None
