"""The ESS of parts of a batch: by staleness, by source, by position in the response.

Parts are groups of one `RatioMoments`, so that they are merged and reduced with every other metric: neither a further
pass nor a further collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from p3o_jax.batch import stats
from p3o_jax.batch.metrics import Histogram, Mean
from p3o_jax.batch.types import Batch

POSITIONS = ("1-3", "4-15", "16-63", "64-255", "256-1023", "1024-4095", "4096-16383", "16384-")
"""Buckets of the position of a token in its response, from 1: each four times as long as the one before."""

_POSITION = "policy/ess/position"


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
    log_probs: Float[Array, "B T"], batch: Batch, *, num_staleness: int, num_sources: int
) -> dict[str, EssByGroup]:
    """The ESS of these tokens by what the batch says of them.

    Args:
        log_probs: the policy's.
        batch: with `staleness` and `source`, or without, for no such breakdown.
        num_staleness: tokens of staleness 0 to one less are told apart.
        num_sources: the same of sources.
    """
    log_ratio = stats.log_ratio(log_probs, batch.behaviour_log_probs, batch.mask)
    position = jnp.minimum(stats.position_bucket(batch.mask, batch.segment_ids) // 2, len(POSITIONS) - 1)
    groups = {
        "policy/ess/staleness": (batch.staleness, num_staleness),
        "policy/ess/source": (batch.source, num_sources),
        _POSITION: (position, len(POSITIONS)),
    }
    return {
        tag: EssByGroup(*stats.RatioMoments.of(log_ratio, batch.mask, group, count))
        for tag, (group, count) in groups.items()
        if group is not None
    }


def logged(values: Mapping[str, Any]) -> dict[str, Any]:
    """An update's values, on the host, as a run logs them: an entry for each group that was there, such as
    `policy/ess/staleness=1`, and counts as histograms, of log_ratio and of the ratio."""
    found: dict[str, Any] = {}
    for tag, value in values.items():
        if isinstance(value, OfGroups):
            names = POSITIONS if tag == _POSITION else range(len(value.values))
            groups = zip(names, value.values, value.present, strict=True)
            found |= {f"{tag}={name}": ess for name, ess, present in groups if present}
        elif tag == "policy/log_ratio_histogram":
            found[tag] = Histogram(stats.LOG_RATIO_EDGES, value)
            found["policy/ratio_histogram"] = _of_ratios(value)
        else:
            found[tag] = value
    return found


def _of_ratios(counts: np.ndarray) -> Histogram:
    """The same counts by ratio; those above e and below 1 / e in one bin each, which would flatten all others."""
    near = np.flatnonzero(np.abs(stats.LOG_RATIO_EDGES) <= 1)
    first, last = near[0], near[-1]
    inner = counts[first + 1 : last + 1]
    outer = counts[: first + 1].sum(), counts[last + 1 :].sum()
    return Histogram(np.exp(stats.LOG_RATIO_EDGES[near]), np.concatenate([outer[:1], inner, outer[1:]]))
