"""What becomes of groups whose rewards are all the same, and so have no advantage to learn from (DAPO's dynamic
sampling, arXiv:2503.14476, Sec. 3.2).

They are kept, or masked out of every sum and denominator, or replaced: further prompts are sampled, a batch at a time,
until there are enough groups that have variance. Every process takes batches until all have enough, so that all take as
many; which of them a process keeps is its own affair. The batches are taken in the order of the stream, so the position
after them is all that a resumed run needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool

from p3o_jax.batch.types import Rollout
from p3o_jax.devices import sharding
from p3o_jax.devices.processes import row_share
from p3o_jax.experience.scoring import Scores, without_variance
from p3o_jax.tasks.base import Prompt

ZeroVariance = Literal["keep", "drop", "resample"]


class Gathered(NamedTuple):
    """The rows of a step on this process."""

    prompts: list[Prompt]  # all that were asked, of all processes
    rollout: Rollout
    scores: Scores
    kept: Bool[np.ndarray, " B"]  # rows that count in the loss
    sampled: Rollout  # all that were sampled, those replaced included
    sampled_scores: Scores
    metrics: dict[str, float]  # what was dropped, over all processes

    @property
    def position(self) -> int:
        """The position in the stream of prompts after these."""
        return self.prompts[-1].index + 1


class Gathering:
    """Collects the rows of one step, batch after batch, until `is_full`."""

    def __init__(self, zero_variance: ZeroVariance, max_batches: int, mesh: Mesh):
        self._zero_variance, self._mesh = zero_variance, mesh
        self._max_batches = max_batches if zero_variance == "resample" else 1
        self._prompts: list[Prompt] = []
        self._rollouts: list[Rollout] = []
        self._scores: list[Scores] = []
        self._found = 0  # groups with variance, on this process

    def add(self, prompts: Sequence[Prompt], rollout: Rollout, scores: Scores) -> None:
        """A batch of prompts of all processes, and this process's rows of it."""
        self._prompts += prompts
        self._rollouts.append(rollout)
        self._scores.append(scores)
        group = np.asarray(rollout.group)
        flat, _ = without_variance(scores, group)
        self._found += len(np.unique(group[~flat]))

    @property
    def is_full(self) -> bool:
        """Whether all processes have enough; every process must ask."""
        if not self._rollouts or len(self._rollouts) >= self._max_batches:
            return bool(self._rollouts)
        wanted = len(np.unique(self._rollouts[0].group))
        return bool((sharding.gather_over_processes(np.asarray(self._found - wanted)) >= 0).all())

    def gathered(self) -> Gathered:
        """As many rows as one batch has: groups with variance first come, and others only where those are too few."""
        sampled = jax.tree.map(lambda *parts: np.concatenate(parts), *self._rollouts)
        scores = _concatenated(self._scores)
        flat, _ = without_variance(scores, sampled.group)
        groups, first = np.unique(sampled.group, return_index=True)
        order = np.argsort(np.where(flat[first], len(flat), 0) + first)  # of groups: with variance, then as they came
        chosen = np.isin(sampled.group, groups[order[: len(np.unique(self._rollouts[0].group))]])
        dropped = flat if self._zero_variance != "keep" else np.zeros_like(flat)
        lengths = sampled.response_length
        counts = [
            (dropped & scores.known).sum(),
            (~chosen & ~dropped).sum(),
            (~scores.known).sum(),
            (dropped | ~chosen).sum(),
            lengths[dropped | ~chosen].sum(),
        ]
        totals = sharding.sum_over_processes(np.asarray(counts, np.float64)) * row_share(self._mesh)
        zero_variance, surplus, failed, rows, tokens = totals.tolist()
        metrics = {
            "rollout/dropped/zero_variance": zero_variance,
            "rollout/dropped/surplus": surplus,
            "rollout/dropped/verifier_failed": failed,
            "rollout/sampled_batches": len(self._rollouts),
        }
        if self._zero_variance != "keep":  # against the mean of all: what dropping them does to lengths
            metrics["rollout/dropped_response_tokens_mean"] = tokens / rows if rows else float("nan")
        rows_of = np.flatnonzero(chosen)
        return Gathered(
            prompts=self._prompts,
            rollout=jax.tree.map(lambda leaf: leaf[rows_of], sampled),
            scores=_rows(scores, rows_of),
            kept=(scores.known & ~dropped)[rows_of],
            sampled=sampled,
            sampled_scores=scores,
            metrics=metrics,
        )


def _concatenated(parts: Sequence[Scores]) -> Scores:
    return Scores(*(_joined([getattr(part, name) for part in parts]) for name in Scores._fields))


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: np.concatenate([value[name] for value in values]) for name in values[0]}
    return list(chain.from_iterable(values)) if isinstance(values[0], list) else np.concatenate(values)


def _rows(scores: Scores, rows: np.ndarray) -> Scores:
    def pick(values: Any) -> Any:
        if isinstance(values, dict):
            return {name: value[rows] for name, value in values.items()}
        return [values[row] for row in rows] if isinstance(values, list) else values[rows]

    return Scores(*map(pick, scores))
