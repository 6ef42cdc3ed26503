"""Errors about what others wrote: one line each, however long, damaged or hostile the thing they quote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def shown(value: Any, characters: int = 60) -> str:
    """A value as it can be quoted in a message: its repr, cut."""
    if isinstance(value, str):
        value = value[: characters + 1]  # a repr of a gigabyte would be another one
    elif isinstance(value, list | dict) and len(value) > 20:
        return f"a {type(value).__name__} of {len(value)} entries"
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deep; an integer of more digits than Python writes
        text = f"a {type(value).__name__}"
    return one_line(text, characters)


def one_line(text: Any, characters: int = 200) -> str:
    """A text without line breaks and control characters, cut."""
    text = str(text)[: 4 * characters]
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= characters else text[: characters - 3] + "..."


def some(names: Sequence[str], at_most: int = 3) -> str:
    """The first few of many names, and how many more there are."""
    first = ", ".join(one_line(name, 80) for name in names[:at_most])
    return first if len(names) <= at_most else f"{first} and {len(names) - at_most} more"


@contextmanager
def refused(what: str, *also: type[BaseException]) -> Iterator[None]:
    """A block in which another package parses: whatever it raises becomes a ValueError, `what: the reason`.

    Args:
        what: the file, and what is the matter with it.
        also: exceptions to pass on as they are.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of a package written in Rust is no Exception
        if isinstance(error, also):
            raise
        kind = type(error).__name__
        said = one_line(error)
        raise ValueError(f"{what}: {said if isinstance(error, ValueError) and said else f'{kind}: {said}'}") from error
