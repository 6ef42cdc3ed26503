"""Rows of published data files, by position: JSON lines, JSON and Parquet.

JSON lines are memory-mapped and parsed where they are used, so that a file may be larger than memory. Parquet is held
as Arrow columns, which are about as large as its texts; of a file too large for that, `p3o convert` makes JSON lines.
"""

from __future__ import annotations

import glob
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from p3o_jax.inputs.errors import refused, shown, some
from p3o_jax.inputs.json_files import parse_json

_SCAN_BYTES = 2**24
_SCAN_ROWS = 2**14
_MAX_ROWS_PER_BYTE = 8
"""Of a Parquet file: one of a few bytes can say a value a billion times."""


@runtime_checkable
class Records(Protocol):
    """Rows by position; safe to call from several threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, Any]: ...

    def where(self, row: int) -> str:
        """The file and line of a row, for messages."""

    def scan(self, paths: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """All rows in order, with at least the columns of these paths that there are. None: with all columns."""

    @property
    def paths(self) -> Sequence[Path]:
        """Its files."""


def open_records(path: str) -> list[Records]:
    """The files of a path: one file, a pattern (`data/train-*.parquet`), or a directory of JSON files, one a row.

    Raises:
        FileNotFoundError: there are none.
        ValueError: a file of another kind, a damaged one, or one without rows.
    """
    if Path(path).is_dir():
        return [_JsonFiles(Path(path))]
    names = sorted(glob.glob(path))
    if not names:
        raise FileNotFoundError(f"{path}: no such file")
    return [_open(Path(name)) for name in names]


def _open(path: Path) -> Records:
    kinds: dict[str, Callable[[Path], Records]] = {".jsonl": _JsonLines, ".json": _JsonArray, ".parquet": _Parquet}
    if path.suffix not in kinds:
        raise ValueError(f"{path}: not one of {', '.join(kinds)}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    records = kinds[path.suffix](path)
    if not len(records):
        raise ValueError(f"{path} has no rows")
    return records


def column(record: dict[str, Any], path: str, where: str) -> Any:
    """A value by the path to it: `answer`, or within a column `reward_model.ground_truth`, `prompt.0.content`.

    Raises:
        ValueError: there is none, with what there is.
    """
    value: Any = record
    for depth, key in enumerate(path.split(".")):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            within = ".".join(path.split(".")[:depth])
            there = some(list(value), 12) if isinstance(value, dict) else f"a {type(value).__name__}"
            raise ValueError(f"{where}: no column {path!r}; {f'{within} has' if within else 'there are'} {there}")
    return value


def text_of(value: Any, path: str, where: str) -> str:
    """A value as text: a number as it is written, 142.0 as 142.

    Raises:
        ValueError: it is neither text nor a number, or empty.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: column {path!r} holds {value}: leave out rows without a value")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        kind = "nothing" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"{where}: column {path!r} holds {kind}, not text or a number: choose another column")
    try:
        text = str(value)
    except ValueError as error:  # more digits than Python writes
        raise ValueError(f"{where}: column {path!r} holds {shown(value)} of too many digits") from error
    if not text.strip():
        raise ValueError(f"{where}: column {path!r} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: column {path!r} is no valid Unicode: {error.reason}") from error
    return text


class _ReadByRow(ABC):
    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> dict[str, Any]: ...

    def scan(self, paths: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))


class _JsonLines(_ReadByRow):
    def __init__(self, path: Path):
        self._path = path
        with open(path, "rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        ends = [*self._line_ends(), len(self._data)]
        starts = [0, *(end + 1 for end in ends[:-1])]
        lines = np.asarray([starts, ends], np.int64).T
        filled = [i for i, (start, end) in enumerate(lines) if self._data[start:end].strip()]
        self._lines, self._numbers = lines[filled], np.asarray(filled, np.int64) + 1

    def _line_ends(self) -> Iterator[int]:
        for start in range(0, len(self._data), _SCAN_BYTES):
            chunk = np.frombuffer(self._data[start : start + _SCAN_BYTES], np.uint8)
            yield from (np.flatnonzero(chunk == ord("\n")) + start).tolist()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, row: int) -> dict[str, Any]:
        start, end = self._lines[row]
        return _object(self._data[start:end], self.where(row))

    def where(self, row: int) -> str:
        return f"{self._path}:{self._numbers[row]}"

    @property
    def paths(self) -> Sequence[Path]:
        return [self._path]


class _JsonArray(_ReadByRow):
    def __init__(self, path: Path):
        self._path = path
        try:
            self._rows = parse_json(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is {error} (one object a line is .jsonl)") from error
        if not isinstance(self._rows, list):
            raise ValueError(f"{path} is not an array of rows")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not isinstance(self._rows[row], dict):
            raise ValueError(f"{self.where(row)}: not an object")
        return self._rows[row]

    def where(self, row: int) -> str:
        return f"{self._path}, entry {row + 1}"

    @property
    def paths(self) -> Sequence[Path]:
        return [self._path]


class _JsonFiles(_ReadByRow):
    def __init__(self, path: Path):
        self._paths = sorted(path.rglob("*.json"))
        if not self._paths:
            raise FileNotFoundError(f"{path}: no .json files in it")

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return _object(self._paths[row].read_bytes(), self.where(row))

    def where(self, row: int) -> str:
        return str(self._paths[row])

    @property
    def paths(self) -> Sequence[Path]:
        return self._paths


class _Parquet:
    def __init__(self, path: Path):
        self._path = path
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ImportError(f"{path}: Parquet files need: pip install 'p3o_jax[tasks]'") from error
        with refused(f"{path} is not a readable Parquet file"):
            rows, size = pyarrow.parquet.read_metadata(path, memory_map=True).num_rows, path.stat().st_size
            if rows > _MAX_ROWS_PER_BYTE * size:
                raise ValueError(f"{rows} rows in {size} bytes, which would not fit into memory")
            self._table = pyarrow.parquet.read_table(path, memory_map=True).combine_chunks()
            self._table.validate(full=True)  # texts that are not UTF-8, places beyond the end

    def __len__(self) -> int:
        return self._table.num_rows

    @cached_property
    def _columns(self) -> dict[str, Any]:
        return dict(zip(self._table.column_names, self._table.columns, strict=True))

    def __getitem__(self, row: int) -> dict[str, Any]:
        with refused(self.where(row)):  # values that Python has not, such as a day of the year 100,000
            return {name: values[row].as_py() for name, values in self._columns.items()}

    def where(self, row: int) -> str:
        return f"{self._path}, row {row + 1}"

    @property
    def paths(self) -> Sequence[Path]:
        return [self._path]

    def scan(self, paths: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        wanted = {path.partition(".")[0] for path in paths or self._columns}
        # Where one is missing all are given: whoever reads a row then says what there is.
        table = self._table.select(sorted(wanted)) if wanted <= self._columns.keys() else self._table
        for batch in table.to_batches(max_chunksize=_SCAN_ROWS):
            with refused(f"{self._path} has a value that does not read"):
                rows = batch.to_pylist()
            yield from rows


def _object(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: not a JSON object")
    return value
