"""The ESS of parts of a batch: by staleness, by source, by task, by position in the response.

Parts are groups of one `RatioMoments`, so that they are merged and reduced with every other metric: neither a further
pass nor a further collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from p3o_jax.batch import stats
from p3o_jax.batch.metrics import Histogram, Mean
from p3o_jax.batch.types import AnyArray, Batch

POSITIONS = ("1-3", "4-15", "16-63", "64-255", "256-1023", "1024-4095", "4096-16383", "16384-")
"""Buckets of the position of a token in its response, from 1: each four times as long as the one before."""

STALENESS = ("0", "1", "2", "3", "4-7", "8-15", "16-31", "32-63", "64-127", "128-255", "256-")
"""Buckets of the staleness of a token, in rollout steps: each from 4 on twice as long as the one before, the last open,
so that no token is in none."""

_POSITION, _STALENESS = "policy/ess/position", "policy/ess/staleness"
_NAMES = {_POSITION: POSITIONS, _STALENESS: STALENESS}


_STARTS = (0, 1, 2, 3, *(4 << i for i in range(len(STALENESS) - 4)))


def staleness_bucket(staleness: Int[AnyArray, "B T"]) -> Int[Array, "B T"]:
    """Finds the place of each staleness in `STALENESS`."""
    staleness = jnp.asarray(staleness)
    return (staleness[..., None] >= jnp.asarray(_STARTS, staleness.dtype)).sum(axis=-1, dtype=staleness.dtype) - 1


class OfGroups(NamedTuple):
    """What is logged of a metric by group: a value for each group that was there."""

    values: Float[Array, " G"]
    present: Bool[Array, " G"]


class EssByGroup(stats.RatioMoments):
    """The moments of each group, logged as its ESS."""

    def value(self):
        return OfGroups(self.ess(), self.count + self.nonfinite > 0)

    def of_this_batch(self) -> MeanByGroup:
        """The ESS of one optimizer batch, for the mean over several: an ESS belongs to one batch."""
        ess, present = self.value()
        return MeanByGroup(jnp.where(present, ess, 0.0), present.astype(ess.dtype))


class MeanByGroup(Mean):
    """A mean for each group, over what had the group."""

    def value(self):
        return OfGroups(self.total / jnp.maximum(self.count, 1.0), self.count > 0)


def ess_breakdowns(
    log_probs: Float[AnyArray, "B T"], batch: Batch, *, max_staleness: int, num_tasks: int, num_sources: int = 1
) -> dict[str, EssByGroup]:
    """The ESS of these tokens by what the batch says of them.

    Args:
        log_probs: the policy's.
        batch: with `staleness`, `source` and `task`, or without, for no such breakdown.
        max_staleness: the largest that is expected; what is older counts in its bucket.
        num_tasks: tokens of tasks 0 to one less are told apart; of one alone nothing is said.
        num_sources: tokens of sources 0 to one less are told apart; later ones count as the last.
    """
    log_ratio = stats.log_ratio(log_probs, batch.behaviour_log_probs, batch.mask)
    position = jnp.minimum(stats.position_bucket(batch.mask, batch.segment_ids) // 2, len(POSITIONS) - 1)
    num_ages = sum(max_staleness >= start for start in _STARTS)
    groups = {
        _STALENESS: (None if batch.staleness is None else staleness_bucket(batch.staleness), num_ages),
        "policy/ess/source": (batch.source, num_sources),
        "policy/ess/task": (None if num_tasks == 1 else batch.task, num_tasks),
        _POSITION: (position, len(POSITIONS)),
    }
    return {
        tag: EssByGroup(*stats.RatioMoments.of(log_ratio, batch.mask, jnp.minimum(group, count - 1), count))
        for tag, (group, count) in groups.items()
        if group is not None
    }


def logged(values: Mapping[str, Any]) -> dict[str, Any]:
    """An update's values, on the host, as a run logs them: an entry for each group that was there, such as
    `policy/ess/staleness=1`, and counts as histograms, of log_ratio and of the ratio."""
    found: dict[str, Any] = {}
    for tag, value in values.items():
        if isinstance(value, OfGroups):
            names = _NAMES.get(tag, range(len(value.values)))
            groups = zip(names, value.values, value.present, strict=False)
            found |= {f"{tag}={name}": ess for name, ess, present in groups if present}
        elif tag == "policy/log_ratio_histogram":
            found[tag] = Histogram(stats.LOG_RATIO_EDGES, value)
            found["policy/ratio_histogram"] = _of_ratios(value)
        else:
            found[tag] = value
    return found


def _of_ratios(counts: Float[np.ndarray, " N"]) -> Histogram:
    """The same counts by ratio; those above e and below 1 / e in one bin each, which would flatten all others."""
    near = np.flatnonzero(np.abs(stats.LOG_RATIO_EDGES) <= 1)
    first, last = near[0], near[-1]
    inner = counts[first + 1 : last + 1]
    outer = counts[: first + 1].sum(), counts[last + 1 :].sum()
    return Histogram(np.exp(stats.LOG_RATIO_EDGES[near]), np.concatenate([outer[:1], inner, outer[1:]]))
