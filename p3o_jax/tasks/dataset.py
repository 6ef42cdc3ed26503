"""A task from data files: prompts and answers in named columns."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from p3o_jax.rewards.base import Prompt, Reward
from p3o_jax.rewards.matching import NumericMatch
from p3o_jax.tasks.base import PromptSource, Split, Task, digest_of, split_of
from p3o_jax.tasks.records import Records, column, open_records, text_of

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dataset(Task):
    """Prompts and answers out of .jsonl, .json or .parquet files.

    Without a file for evaluation, a tenth of the rows is held out, by a hash of their prompts. With one, rows for
    training whose prompt is in it are left out. Of rows with the same prompt, but for case and spacing, the first
    stays. What is left out is counted and reported when the files are opened, which reads every row once.

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

    def __post_init__(self) -> None:
        if not self.path and not self.evaluation_path:
            raise ValueError("a dataset needs a path, for training or for evaluation")
        for name in ("prompt_tokens", "response_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

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
            ValueError: there are none.
        """
        rows = self._rows[split]
        if not len(rows):
            what = f"{self.path} has no rows for it" if self.path else "no path is given"
            raise ValueError(f"{self.name}: no prompts for {split}: {what}")
        return _Rows(self, rows)

    def rows(self) -> Iterator[Prompt]:
        """Every row that stays, of both splits, those for evaluation last."""
        splits: tuple[Split, ...] = ("train", "evaluation")
        for split in splits:
            for file, number in self._rows[split]:
                yield self.as_prompt(file[number], file.where(number))

    @cached_property
    def _rows(self) -> dict[Split, list[tuple[Records, int]]]:
        """Which rows each split has; found out once."""
        rows: dict[Split, list[tuple[Records, int]]] = {"train": [], "evaluation": []}
        answers: dict[bytes, str] = {}  # by prompt: of all rows that stay
        evaluated: set[bytes] = set()
        repeated = contradicted = leaked = 0
        for path, file in self._files():
            for number, record in enumerate(file.scan((self.prompt, self.answer))):
                prompt = self.as_prompt(record, file.where(number))
                digest = digest_of(prompt.text)
                if digest in answers:
                    repeated += 1
                    contradicted += answers[digest] != prompt.answer
                    leaked += path == self.path and digest in evaluated
                    continue
                answers[digest] = prompt.answer
                if self.evaluation_path:
                    rows["train" if path == self.path else "evaluation"].append((file, number))
                    if path == self.evaluation_path:
                        evaluated.add(digest)
                else:
                    rows[split_of(prompt.text)].append((file, number))
        if repeated:
            _logger.warning(
                "%s: %d rows repeat an earlier prompt and are left out (%d of them with another answer, %d of them for "
                "training although they are in the evaluation file); %d rows stay",
                self.name, repeated, contradicted, leaked, len(answers),
            )  # fmt: skip
        return rows

    def _files(self) -> list[tuple[str, Records]]:
        """For evaluation first: what is in it is not trained on."""
        paths = [path for path in (self.evaluation_path, self.path) if path]
        return [(path, file) for path in paths for file in open_records(path)]

    def as_prompt(self, record: dict[str, Any], where: str) -> Prompt:
        """A row as a prompt, its index still 0.

        Raises:
            ValueError: a column is missing or holds no text.
        """
        text = text_of(column(record, self.prompt, where), self.prompt, where)
        answer = text_of(column(record, self.answer, where), self.answer, where)
        return Prompt(0, f"{self.before}{text}{self.after}", answer, record)

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: a verifier needs no file."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True)
class _Rows:
    """Rows as prompts."""

    dataset: Dataset
    rows: list[tuple[Records, int]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt:
        file, number = self.rows[index]
        return self.dataset.as_prompt(file[number], file.where(number))._replace(index=index)
