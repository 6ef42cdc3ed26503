"""Every row of a dataset is looked at before a run begins: whether its prompt can be encoded, and its answer judged.

A prompt that holds a control token, or an answer that a verifier cannot read, would otherwise end the run, or spoil it,
when its turn comes. What is found is kept in the user's cache directory (`row_cache`), so that it is paid for once.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool

from p3o_jax.devices.processes import of_process_0
from p3o_jax.experience import row_cache
from p3o_jax.rewards.base import Graded, Prompt, Reward, gold_fault
from p3o_jax.rewards.pool import TimedOut, VerifierPool, Verifiers
from p3o_jax.tasks import Dataset, Mixture
from p3o_jax.tasks.base import Split, Task
from p3o_jax.tasks.faults import Faults, UnusableRows
from p3o_jax.tasks.row_index import Rows, iterate
from p3o_jax.terminal import say
from p3o_jax.tokenizers.text import Tokenizer

_logger = logging.getLogger(__name__)

_AT_ONCE = 512
_SECONDS_BETWEEN_NOTES = 10.0
T = TypeVar("T")


class Fault(NamedTuple):
    """A row that cannot be used."""

    row: int
    reason: str


class Lengths(NamedTuple):
    """What encoding the rows of a split has shown."""

    faults: list[Fault]
    too_long: int
    """How many prompts are longer than the task allows."""


@dataclass(frozen=True)
class Checks:
    """How rows are looked at."""

    tokenizer: Tokenizer | None
    """What encodes prompts. None: they are not encoded."""
    verifiers: Verifiers | None
    """The processes that judge every answer against itself. None: answers are not judged."""
    splits: tuple[Split, ...] = ("train", "evaluation")
    demonstrated: bool = False
    """Whether answers of the training split are encoded too, to be learned from before RL."""
    unusable_rows: UnusableRows | None = None
    """What becomes of rows that cannot be used. None: as each dataset says."""


def usable(task: Task, checks: Checks) -> Task:
    """The same task without rows that cannot be used. Every process must call it.

    Rows for training that the tokenizer refuses are left out; the others as the dataset's `unusable_rows` says. All are
    counted, and the first of them named by file and line. Prompts that are drawn, not listed, are not looked at.

    Raises:
        ValueError: there are rows that are refused, or nothing is left.
    """
    if isinstance(task, Mixture):
        return replace(task, shares=tuple(replace(one, task=usable(one.task, checks)) for one in task.shares))
    return _usable(task, checks) if isinstance(task, Dataset) else task


def _usable(dataset: Dataset, checks: Checks) -> Dataset:
    if checks.unusable_rows is not None:
        dataset = replace(dataset, unusable_rows=checks.unusable_rows)
    index = dict(dataset.index)
    # What this model's tokenizer refuses is passed over in training as prompts are that are too long for it.
    refused, faults = Faults(dataset.name), Faults(dataset.name)
    for split in checks.splits:
        rows = index[split]
        if not len(rows.number):
            continue
        kept = np.ones(len(rows.number), bool)
        if checks.tokenizer is not None:
            lengths = encoding_faults(dataset, split, checks.tokenizer, demonstrated=checks.demonstrated)
            _leave_out(lengths.faults, kept, rows, refused if split == "train" else faults)
            if split == "train":
                _report_lengths(dataset, lengths.too_long, int(kept.sum()))
        if checks.verifiers is not None:
            _leave_out(gold_faults(dataset, split, checks.verifiers), kept, rows, faults)
        index[split] = rows.only(kept)
    if not refused.count and not faults.count:
        return dataset
    left = [len(index[split].number) for split in checks.splits if len(dataset.index[split].number)]
    num_left = sum(left) if all(left) else 0
    faults.settle(dataset.unusable_rows, num_left)
    refused.settle("leave_out", num_left)
    return dataset.with_rows(index)


def _leave_out(found: Sequence[Fault], kept: Bool[np.ndarray, " n"], rows: Rows, faults: Faults) -> None:
    for row, reason in sorted(found):
        if kept[row]:
            faults.add(rows.where(row), reason)
            kept[row] = False


def _report_lengths(dataset: Dataset, too_long: int, num_rows: int) -> None:
    if too_long and too_long == num_rows:
        raise ValueError(
            f"{dataset.name}: all {num_rows} prompts for training are longer than {dataset.prompt_tokens} tokens: "
            "raise prompt_tokens"
        )
    if too_long:
        _logger.warning(
            "%s: %d of %d prompts for training are longer than prompt_tokens=%d and will be passed over",
            dataset.name, too_long, num_rows, dataset.prompt_tokens,
        )  # fmt: skip


def encoding_faults(dataset: Dataset, split: Split, tokenizer: Tokenizer, *, demonstrated: bool = False) -> Lengths:
    """Which rows of a split the tokenizer refuses, and how many are too long. Every process must call it.

    Args:
        demonstrated: rows whose prompt or answer is too long for a demonstration cannot be used either.
    """
    demonstrated = demonstrated and split == "train"

    def look() -> list[Any]:
        faults: list[Fault] = []
        too_long = 0
        prompts = _prompts(dataset, split, (dataset.prompt, dataset.answer))
        for batch in _batches(_noted(prompts, dataset, split, "prompts"), _AT_ONCE):
            texts = [prompt.text for _, prompt in batch]
            for (row, prompt), length in zip(batch, _lengths(tokenizer, texts), strict=True):
                if isinstance(length, int) and demonstrated:
                    length = _demonstration(dataset, tokenizer, prompt, length)
                if isinstance(length, str):
                    faults.append(Fault(row, length))
                else:
                    too_long += length > dataset.prompt_tokens
        return [faults, too_long]

    settings = [dataset.prompt_tokens, [dataset.response_tokens] * demonstrated]
    key = row_cache.key("prompts", dataset, split, row_cache.of_tokenizer(tokenizer), settings)
    faults, too_long = of_process_0(lambda: row_cache.kept(key, look))
    return Lengths([Fault(*fault) for fault in faults], too_long)


def _lengths(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[int | str]:
    """The tokens of each text, or why it is refused."""
    batch = getattr(tokenizer, "encode_batch", None)  # of published ones, which encode several at once
    if batch is not None:
        try:
            yield from map(len, batch(texts))
            return
        except Exception:  # one of them is refused: which, is found out one by one
            pass
    for text in texts:
        try:
            yield len(tokenizer.encode(text))
        except Exception as error:  # whatever it is, this row cannot be used
            yield _reason(error)


def _demonstration(dataset: Dataset, tokenizer: Tokenizer, prompt: Prompt, length: int) -> int | str:
    """The prompt's length, or why the row cannot be demonstrated."""
    try:
        answer = len(tokenizer.encode(prompt.answer)) + 1  # the end of the sequence
    except Exception as error:
        return _reason(error)
    if length > dataset.prompt_tokens or answer > dataset.response_tokens:
        return (
            f"a demonstration of {length} + {answer} tokens, but prompt_tokens={dataset.prompt_tokens} and "
            f"response_tokens={dataset.response_tokens}"
        )
    return length


def gold_faults(dataset: Dataset, split: Split, verifiers: Verifiers) -> list[Fault]:
    """Which rows of a split have an answer that the reward does not find equal to itself. Every process must call it.

    Verifiers that may hang run in processes that are killed. A row whose verifier was killed is tried again at the next
    start: the machine may have been busy.
    """
    reward = dataset.reward

    def look(rows: set[int] | None = None) -> list[Any]:
        faults: list[Fault] = []
        late: list[Fault] = []
        note = _noted(_prompts(dataset, split), dataset, split, "answers")
        wanted = ((row, prompt) for row, prompt in note if rows is None or row in rows)
        with nullcontext() if reward.quick else VerifierPool(_GoldCheck(reward), verifiers) as pool:
            for batch in _batches(wanted, _AT_ONCE):
                prompts = [prompt for _, prompt in batch]
                if pool is None:
                    said: list[Any] = [gold_fault(reward, prompt) for prompt in prompts]
                else:
                    said = [one.answer if isinstance(one, Graded) else one for one in pool([(p, "") for p in prompts])]
                for (row, _), reason in zip(batch, said, strict=True):
                    if isinstance(reason, TimedOut):
                        late.append(Fault(row, f"the verifier of its answer was {reason}"))
                    elif reason:  # a prompt's index says nothing here, its file and line do
                        reason = str(reason).replace(" of prompt 0", "", 1).replace("prompt 0 ", "the row ", 1)
                        faults.append(Fault(row, reason))
        return [faults, late]

    def find() -> list[Any]:
        looked: list[Any] = []

        def first() -> list[Any]:
            looked.append(look())
            return looked[0]

        faults, late = row_cache.kept(key, first)
        if late and not looked:
            more, late = look({row for row, _ in late})
            faults = [*faults, *more]
        return [*faults, *late]

    key = row_cache.key("answers", dataset, split, row_cache.of_reward(reward), [verifiers.timeout_seconds])
    return [Fault(*fault) for fault in of_process_0(find)]


@dataclass(frozen=True)
class _GoldCheck(Reward):
    """Judges a prompt's own answer; what is wrong with it is the `answer` of what is returned."""

    reward: Reward

    def warm_up(self) -> None:
        """The reward's."""
        self.reward.warm_up()

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """1 if nothing is wrong."""
        return self.grade(prompt, completion).reward

    def grade(self, prompt: Prompt, completion: str) -> Graded:
        """What is wrong, as the answer."""
        fault = gold_fault(self.reward, prompt)
        return Graded(float(fault is None), fault is None, fault or "")


def _prompts(dataset: Dataset, split: Split, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Prompt]]:
    """The rows of a split with their positions in it; their metadata have these columns at least, of None all."""
    for row, record, where in iterate(dataset.index[split], columns):
        yield row, dataset.as_prompt(record, where)


def _noted(
    prompts: Iterable[tuple[int, Prompt]], dataset: Dataset, split: Split, what: str
) -> Iterator[tuple[int, Prompt]]:
    """Says how far it is, where that takes long."""
    total, due = len(dataset.index[split].number), time.monotonic() + _SECONDS_BETWEEN_NOTES
    for done, prompt in enumerate(prompts):
        if time.monotonic() > due:
            due += _SECONDS_BETWEEN_NOTES
            say(f"{dataset.name}: looked at {done} of {total} {what} for {split}; what is found is kept", sys.stderr)
        yield prompt


def _batches(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while batch := list(islice(items, size)):
        yield batch


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
