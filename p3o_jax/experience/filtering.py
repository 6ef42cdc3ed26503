"""What becomes of groups whose rewards are all the same, and so have no advantage to learn from (DAPO's dynamic
sampling, arXiv:2503.14476, Sec. 3.2).

They are kept, or masked out of every sum and denominator, or replaced: further prompts are sampled, a batch at a time,
until there are enough groups that have variance. Every process takes batches until all have enough, so that all take as
many; which of them a process keeps is its own affair. The batches are taken in the order of the stream, so the position
after them is all that a resumed run needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from p3o_jax.devices import sharding
from p3o_jax.devices.processes import row_share
from p3o_jax.experience.scoring import without_variance
from p3o_jax.experience.source import Clock, Experience, ExperienceSource, joined

ZeroVariance = Literal["keep", "drop", "resample"]


class FilteredGroups:
    """A source whose steps have groups with variance first, and others only where those are too few."""

    def __init__(self, source: ExperienceSource, zero_variance: ZeroVariance, max_batches: int, mesh: Mesh):
        """
        Args:
            source: where the rows come from, a batch at a time.
            zero_variance: what becomes of groups without variance.
            max_batches: with "resample", the most batches that are taken for a step.
            mesh: of the learner; decides which processes count the same rows.
        """
        self._source, self._zero_variance, self._mesh = source, zero_variance, mesh
        self._max_batches = max_batches if zero_variance == "resample" else 1

    def next(self, step: int, weights: Any, clock: Clock, pause: Callable[[], None]) -> Experience:
        """Takes batches until all processes have enough, and chooses as many rows as one batch has."""
        taken: list[Experience] = []
        while not self._is_full(taken):
            taken.append(self._source.next(step, weights, clock, pause))
        return self._chosen(taken)

    def _is_full(self, taken: list[Experience]) -> bool:
        """Whether all processes have enough; every process must ask."""
        if not taken or len(taken) >= self._max_batches:
            return bool(taken)
        with_variance = 0
        for one in taken:
            flat, _ = without_variance(one.scores, one.rollout.group)
            with_variance += len(np.unique(one.rollout.group[~flat]))
        wanted = len(np.unique(taken[0].rollout.group))
        return bool((sharding.gather_over_processes(np.asarray(with_variance - wanted)) >= 0).all())

    def _chosen(self, taken: list[Experience]) -> Experience:
        sampled = joined([one.sampled for one in taken])
        rollout, scores = sampled
        flat, _ = without_variance(scores, rollout.group)
        groups, first = np.unique(rollout.group, return_index=True)
        order = np.argsort(np.where(flat[first], len(flat), 0) + first)  # of groups: with variance, then as they came
        chosen = np.isin(rollout.group, groups[order[: len(np.unique(taken[0].rollout.group))]])
        dropped = flat if self._zero_variance != "keep" else np.zeros_like(flat)
        lengths = rollout.response_length
        # Each row that is left out is counted once, by the first of these reasons that it has.
        counts = [
            (dropped & scores.known).sum(),
            (~chosen & ~dropped & scores.known).sum(),
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
            "rollout/sampled_batches": len(taken),
        }
        if self._zero_variance != "keep":  # against the mean of all: what dropping them does to lengths
            metrics["rollout/dropped_response_tokens_mean"] = tokens / rows if rows else float("nan")
        rows_of = np.flatnonzero(chosen)
        return Experience(
            prompts=[prompt for one in taken for prompt in one.prompts],
            rollout=jax.tree.map(lambda leaf: leaf[rows_of], rollout),
            scores=scores.rows(rows_of),
            kept=(scores.known & ~dropped)[rows_of],
            cursor=taken[-1].cursor,
            sampled=sampled,
            metrics=metrics,
        )
