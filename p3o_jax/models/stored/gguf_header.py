"""Whether the header of a GGUF file is one, checked before the `gguf` package reads it (docs/gguf.md of ggml).

The package believes what a header says of itself: a count of 2 ** 60 keeps it busy for years. Here every length is
compared with what is left of the file, and what the package makes an object of is counted.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

from p3o_jax.inputs.errors import one_line

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by the type of a value
_STRING, _ARRAY = 8, 9
_MAX_ENTRIES = 2**22
"""Of all arrays together, of each of which the package makes a numpy array; vocabularies have a million."""
_MAX_FIELDS, _MAX_TENSORS, _MAX_NAME, _MAX_AXES = 2**16, 2**18, 2**16, 4


def check_header(path: Path) -> None:
    """Walks the header.

    Raises:
        ValueError: what is wrong with it, without the file's name.
    """
    with open(path, "rb") as stream:
        if path.stat().st_size < 24:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(data).header()


class _Walk:
    """A place in a file that goes on as values are read."""

    def __init__(self, data: Any):
        self._data, self._at, self._entries = data, 0, 0

    def header(self) -> None:
        """Everything before the values of the tensors."""
        magic, version, num_tensors, num_fields = self._number("<IIQQ", 24)
        if magic != 0x46554747:
            raise ValueError("it does not begin with GGUF")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not one that is read: 2 and 3, of little-endian machines")
        if num_tensors > _MAX_TENSORS or num_fields > _MAX_FIELDS:
            raise ValueError(f"it says that it has {num_tensors} tensors and {num_fields} fields")
        for _ in range(num_fields):
            name = self._text(_MAX_NAME)
            self._value(self._number("<I", 4)[0], name)
        for _ in range(num_tensors):
            self._tensor()

    def _number(self, form: str, size: int) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(size))

    def _take(self, size: int) -> bytes:
        start = self._at
        self._skip(size)
        return self._data[start : start + size]

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self._at:
            raise ValueError(f"it ends within its header, which needs {size} bytes at {self._at}")
        self._at += size

    def _text(self, at_most: int) -> str:
        size = self._number("<Q", 8)[0]
        if size > at_most:
            raise ValueError(f"a name of {size} bytes at {self._at}")
        return one_line(self._take(size).decode("utf-8", "replace"), 80)

    def _value(self, kind: int, name: str) -> None:
        if kind in _SCALARS:
            self._skip(_SCALARS[kind])
        elif kind == _STRING:
            self._skip(self._number("<Q", 8)[0])
        elif kind == _ARRAY:
            self._array(name)
        else:
            raise ValueError(f"field {name} is of the unknown type {kind}")

    def _array(self, name: str) -> None:
        kind, count = self._number("<IQ", 12)
        self._entries += count
        if self._entries > _MAX_ENTRIES:
            raise ValueError(f"field {name} has {count} entries, more than the {_MAX_ENTRIES} of all that are read")
        if kind in _SCALARS:
            self._skip(count * _SCALARS[kind])
        elif kind == _STRING:
            for _ in range(count):
                self._skip(self._number("<Q", 8)[0])
        else:
            raise ValueError(f"field {name} is an array of type {kind}, which is not read")

    def _tensor(self) -> None:
        name = self._text(_MAX_NAME)
        num_axes = self._number("<I", 4)[0]
        if num_axes > _MAX_AXES:
            raise ValueError(f"tensor {name} has {num_axes} axes")
        sizes = self._number(f"<{num_axes}Q", 8 * num_axes)
        if math.prod(sizes) > 16 * len(self._data):  # of two bits and less there is no type
            raise ValueError(f"tensor {name} has {math.prod(sizes)} values, more than the file can hold")
        self._number("<IQ", 12)
