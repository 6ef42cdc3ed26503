"""A task from data files: prompts and answers in named columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from p3o_jax.rewards.base import Prompt, Reward
from p3o_jax.rewards.matching import NumericMatch
from p3o_jax.tasks.base import PromptSource, Split, Task, split_of
from p3o_jax.tasks.faults import UnusableRows
from p3o_jax.tasks.records import Records, column, open_records, text_of
from p3o_jax.tasks.row_index import Row, Rows, index_of


@dataclass(frozen=True)
class Dataset(Task):
    """Prompts and answers out of .jsonl, .json or .parquet files.

    Without a file for evaluation, a tenth of the rows is held out, by a hash of their prompts. With one, rows for
    training whose prompt is in it are left out. Of rows that ask the same, but for case and spacing, the first stays.
    What is left out is counted and reported when the files are opened, which reads every row once.

    Raises:
        FileNotFoundError, ValueError: when the files are opened, in one line with the file and line.
    """

    path: str = ""
    """File for training: or a pattern of several (data/train-*.parquet), or a directory of JSON files, one a row."""
    evaluation_path: str = ""
    """File for evaluation, likewise. Empty: a tenth of the other's rows."""
    prompt: str = "prompt"
    """Column of the prompt; `prompt.0.content` is what is within it."""
    answer: str = "answer"
    """Column of the answer that completions are judged by."""
    before: str = ""
    """Text before every prompt."""
    after: str = ""
    """Text after every prompt."""
    reward: Reward = NumericMatch()
    """What a completion is worth; its `prompt.metadata` is the whole row."""
    prompt_tokens: int = 1024
    """Longest prompt, by the tokenizer of the model that is trained."""
    response_tokens: int = 1024
    """Longest response, its end included."""
    label: str = ""
    """Its name in tags and paths. Empty: the file's."""
    unusable_rows: UnusableRows = "refuse"
    """What becomes of rows without text or answer, or with an answer that the reward does not find equal to itself, and
    of those for evaluation whose text the tokenizer refuses: refuse the run before its first step, or leave_out such
    rows, and count them. Rows for training that the tokenizer refuses are left out and counted either way."""

    def __post_init__(self) -> None:
        if not self.path and not self.evaluation_path:
            raise ValueError("a dataset needs a path, for training or for evaluation")
        for name in ("prompt_tokens", "response_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.unusable_rows not in get_args(UnusableRows):
            raise ValueError(
                f"unusable_rows must be one of {', '.join(get_args(UnusableRows))}, got {self.unusable_rows!r}"
            )

    @property
    def name(self) -> str:
        """`label`, or the file's name."""
        return self.label or Path(self.path or self.evaluation_path).stem

    @property
    def max_prompt_tokens(self) -> int:
        """`prompt_tokens`."""
        return self.prompt_tokens

    @property
    def max_response_tokens(self) -> int:
        """`response_tokens`."""
        return self.response_tokens

    def prompts(self, split: Split, seed: int) -> PromptSource:
        """The rows of a split, in the order of the file whatever the seed.

        Raises:
            ValueError: there are none, or rows that cannot be used and are refused.
        """
        rows = self.index[split]
        if not len(rows.number):
            what = f"{self.path} has no rows for it" if self.path else "no path is given"
            raise ValueError(f"{self.name}: no prompts for {split}: {what}")
        return _Prompts(self, rows)

    def rows(self) -> Iterator[Prompt]:
        """Every row that stays, of both splits, those for evaluation last."""
        for rows in self.index.values():
            for row in range(len(rows.number)):
                yield self.as_prompt(*rows.record(row))

    @cached_property
    def index(self) -> dict[Split, Rows]:
        """Which rows each split has; found out once."""

        def read(record: dict[str, Any], where: str) -> Row:
            question, answer = self._texts(record, where)
            # By the whole prompt, so that what was held out stays held out.
            return Row(question, answer, split_of(f"{self.before}{question}{self.after}"))

        index, faults = index_of(self.name, self._files(), (self.prompt, self.answer), read)
        faults.settle(self.unusable_rows, sum(len(rows.number) for rows in index.values()))
        return {"train": index["train"], "evaluation": index["evaluation"]}

    def with_rows(self, index: dict[Split, Rows]) -> Dataset:
        """The same dataset of which only these rows are used."""
        dataset = replace(self)
        dataset.__dict__["index"] = index  # what the property would find out
        return dataset

    def _files(self) -> list[tuple[Records, Split | None]]:
        """For evaluation first: what is in it is not trained on."""
        parts: list[tuple[str, Split | None]] = [(self.evaluation_path, "evaluation")] if self.evaluation_path else []
        if self.path:
            parts.append((self.path, "train" if self.evaluation_path else None))
        return [(file, split) for path, split in parts for file in open_records(path)]

    def question(self, prompt: Prompt) -> str:
        """What is in the column, without the texts before and after it."""
        return prompt.text.removeprefix(self.before).removesuffix(self.after)

    def as_prompt(self, record: dict[str, Any], where: str) -> Prompt:
        """A row as a prompt, its index still 0.

        Raises:
            ValueError: a column is missing or holds no text.
        """
        question, answer = self._texts(record, where)
        return Prompt(0, f"{self.before}{question}{self.after}", answer, record)

    def _texts(self, record: dict[str, Any], where: str) -> tuple[str, str]:
        question = text_of(column(record, self.prompt, where), self.prompt, where)
        return question, text_of(column(record, self.answer, where), self.answer, where)

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: a verifier needs no file."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True)
class _Prompts:
    """Rows as prompts."""

    dataset: Dataset
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows.number)

    def __getitem__(self, index: int) -> Prompt:
        return self.dataset.as_prompt(*self.rows.record(index))._replace(index=index)
