"""Tasks side by side whose splits do not meet: no question that one evaluates on is trained on by another.

Which question it is decides, not the instructions around it: the same file may be there twice with two instructions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int, UInt64

from p3o_jax.rewards.base import Prompt
from p3o_jax.tasks.base import EVALUATION_SEED, DrawnPrompts, PromptSource, Split, Task
from p3o_jax.tasks.dataset import Dataset
from p3o_jax.tasks.questions import Questions, digest_numbers

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Elsewhere:
    """What a task of several must not have in its splits."""

    evaluated: Questions
    """What others that list their prompts, rather than draw them, evaluate on: not to be trained on."""
    trained: Questions
    """What others that list them train on: not to be drawn for evaluation."""


def elsewhere(tasks: Sequence[Task]) -> list[Elsewhere]:
    """Reads what the others of each of some tasks list, and says how many prompts are left out of whose training."""
    evaluated = [_listed(task, "evaluation") for task in tasks]
    trained = []
    for i, task in enumerate(tasks):
        digests = _listed(task, "train")
        left_out = _others(evaluated, i).hold(digests)
        if left_out.any():
            _logger.warning(
                "%s: %d of %d prompts are not trained on: another task of the mixture is evaluated on their questions",
                task.name, left_out.sum(), len(digests),
            )  # fmt: skip
        trained.append(digests[~left_out])
    return [Elsewhere(_others(evaluated, i), _others(trained, i)) for i in range(len(tasks))]


def separated(task: Task, split: Split, seed: int, others: Elsewhere) -> PromptSource:
    """The prompts of a task without what others have in their other split.

    Raises:
        ValueError: none is left for training.
    """
    source = task.prompts(split, seed)
    if isinstance(source, DrawnPrompts):
        excluded = others.evaluated if split == "train" else others.trained
        return replace(source, excluded=source.excluded | excluded) if len(excluded) else source
    if split == "evaluation" or not len(others.evaluated):
        return source
    kept = np.flatnonzero(~others.evaluated.hold(_digests(task, source, split)))
    if not len(kept):
        raise ValueError(f"{task.name}: another task of the mixture is evaluated on all its prompts for training")
    return source if len(kept) == len(source) else _Some(source, kept)


def _others(digests: Sequence[UInt64[np.ndarray, " _"]], i: int) -> Questions:
    return Questions(np.concatenate([np.zeros(0, np.uint64), *digests[:i], *digests[i + 1 :]]))


@dataclass(frozen=True)
class _Some:
    """Prompts at some positions of a source."""

    source: PromptSource
    positions: Int[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> Prompt:
        return self.source[int(self.positions[index])]._replace(index=index)


def _listed(task: Task, split: Split) -> UInt64[np.ndarray, " n"]:
    """The questions of a split, none of a task that draws its prompts or has none there."""
    if isinstance(task, Dataset):
        return task.index[split].question
    try:
        source = task.prompts(split, EVALUATION_SEED)
    except ValueError:  # it has none; whoever needs some says so
        return np.zeros(0, np.uint64)
    return np.zeros(0, np.uint64) if isinstance(source, DrawnPrompts) else _digests(task, source, split)


def _digests(task: Task, source: PromptSource, split: Split) -> UInt64[np.ndarray, " n"]:
    if isinstance(task, Dataset):
        return task.index[split].question
    return digest_numbers(task.question(source[i]) for i in range(len(source)))
