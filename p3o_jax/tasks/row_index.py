"""Which rows of a dataset's files each split has: found by one pass over them, kept in 20 bytes a row."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt64

from p3o_jax.tasks.faults import Faults
from p3o_jax.tasks.questions import digest_of
from p3o_jax.tasks.records import Records

_logger = logging.getLogger(__name__)


class Rows(NamedTuple):
    """Rows of some files."""

    files: Sequence[Records]
    file: Int[np.ndarray, " n"]
    """Which of the files."""
    number: Int[np.ndarray, " n"]
    """Which of its rows."""
    question: UInt64[np.ndarray, " n"]
    """The digest of what is asked."""

    def record(self, row: int) -> tuple[dict[str, Any], str]:
        """A row, and its file and line."""
        file, number = self.files[self.file[row]], int(self.number[row])
        return file[number], file.where(number)

    def where(self, row: int) -> str:
        """The file and line of a row."""
        return self.files[self.file[row]].where(int(self.number[row]))

    def only(self, kept: Bool[np.ndarray, " n"]) -> Rows:
        """Some of them."""
        return Rows(self.files, self.file[kept], self.number[kept], self.question[kept])


class Row(NamedTuple):
    """What the index looks at."""

    question: str
    answer: str
    split: str
    """`train` or `evaluation`, where one file has both."""


class _Found:
    """Rows as they are found."""

    def __init__(self) -> None:
        self.file, self.number, self.question = array("i"), array("q"), array("Q")

    def add(self, file: int, number: int, question: int) -> None:
        self.file.append(file)
        self.number.append(number)
        self.question.append(question)

    def rows(self, files: Sequence[Records]) -> Rows:
        return Rows(files, np.array(self.file), np.array(self.number), np.array(self.question, np.uint64))


def index_of(
    name: str,
    files: Sequence[tuple[Records, str | None]],
    columns: Sequence[str],
    read: Callable[[dict[str, Any], str], Row],
) -> tuple[dict[str, Rows], Faults]:
    """Goes through all files once.

    Of rows that ask the same, the first stays; what is repeated is counted and reported.

    Args:
        name: of the dataset.
        files: each with the split that its rows are in; None: as each row says. What is in earlier ones stays.
        columns: what is read of a row.
        read: a row, by its record and its file and line; a ValueError says why it cannot be used.

    Returns:
        The rows of each split, and those that cannot be used.
    """
    found = {"train": _Found(), "evaluation": _Found()}
    faults = Faults(name)
    answers: dict[int, int] = {}  # by question: of all rows that stay
    evaluated: set[int] = set()
    repeated = contradicted = leaked = 0
    for i, (file, split) in enumerate(files):
        for number, record in enumerate(file.scan(columns)):
            try:
                row = read(record, file.where(number))
            except ValueError as error:
                where = file.where(number)
                faults.add(where, str(error).removeprefix(f"{where}: "))
                continue
            question = int.from_bytes(digest_of(row.question), "big")
            answer = hash(row.answer)
            if question in answers:
                repeated += 1
                contradicted += answers[question] != answer
                leaked += split == "train" and question in evaluated
                continue
            answers[question] = answer
            if split == "evaluation":
                evaluated.add(question)
            found[split or row.split].add(i, number, question)
    if repeated:
        _logger.warning(
            "%s: %d rows repeat an earlier prompt and are left out (%d of them with another answer, %d of them for "
            "training although they are in the evaluation file); %d rows stay",
            name, repeated, contradicted, leaked, len(answers),
        )  # fmt: skip
    opened = [file for file, _ in files]
    return {split: of.rows(opened) for split, of in found.items()}, faults


def iterate(rows: Rows, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any], str]]:
    """Yields rows in order, each with its position and its file and line.

    Args:
        columns: those that are needed. None: all.

    In one pass over the files, which for Parquet is much quicker than row by row.
    """
    position = 0
    for i, file in enumerate(rows.files):
        wanted = rows.number[rows.file == i]
        if not len(wanted):
            continue
        at = 0
        for number, record in enumerate(file.scan(columns)):
            if number == wanted[at]:
                yield position, record, file.where(number)
                position, at = position + 1, at + 1
                if at == len(wanted):
                    break
