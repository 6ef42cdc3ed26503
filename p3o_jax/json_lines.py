r"""Lines of files, and JSON lines: a line ends at \n and nowhere else.

Texts hold characters that `str.splitlines` takes for ends of lines too (U+0085, U+2028, U+2029, form feeds), and JSON
need not escape them.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one a line; an unfinished last line, of a process that still writes or that ended
    while it wrote, is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: any other line that is not a JSON object, by file and line.
    """
    lines = Path(path).read_bytes().split(b"\n")
    unfinished = lines.pop()  # empty where the file ends as it should
    records = []
    for number, line in enumerate(lines, start=1):
        records.append(_object(line, f"{path}, line {number}"))
    if unfinished.strip():
        with suppress(ValueError):
            records.append(_object(unfinished, ""))
    return records


def read_text_lines(path: Path) -> list[str]:
    r"""The lines of a UTF-8 file, without their ends: \n, or \r\n as Windows writes it.

    Raises:
        ValueError: it is not UTF-8.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    return [line.removesuffix("\r") for line in text.split("\n")]


def first_line(error: BaseException) -> str:
    """The first line of what an error says; of one that says nothing, its name."""
    return str(error).split("\n")[0] or type(error).__name__


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # JSON's, Unicode's, and of what is nested too deep
        raise ValueError(f"{where} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} is damaged: it is no JSON object")
    return value
