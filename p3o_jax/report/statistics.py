"""Means over seeds, and how well they are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from p3o_jax.report.runs import Group, Run

LAST_PART = 0.1
"""Of a metric that is logged every step, the final value is the mean over this last part of the run."""
MOST_POINTS = 200
"""Curves with more points are averaged in bins."""


class Curve(NamedTuple):
    """A metric of a group over steps."""

    steps: np.ndarray
    mean: np.ndarray  # over seeds
    error: np.ndarray  # its standard error; NaN with one seed
    seeds: Sequence[tuple[np.ndarray, np.ndarray]]  # each seed's own steps and values


def curve(group: Group, tag: str) -> Curve | None:
    """The mean of a metric at the steps that every seed has logged; None if no seed has any."""
    seeds = [series for series in (run.series(tag) for run in group.runs) if len(series[0])]
    if not seeds:
        return None
    common = seeds[0][0]
    for steps, _ in seeds[1:]:
        common = np.intersect1d(common, steps)
    stacked = np.stack([values[np.isin(steps, common)] for steps, values in seeds])
    error = np.full(len(common), np.nan)
    if len(seeds) > 1:
        error = stacked.std(axis=0, ddof=1) / math.sqrt(len(seeds))
    mean = stacked.mean(axis=0)
    steps, mean = in_bins(common, mean)
    return Curve(steps, mean, in_bins(common, error)[1], [in_bins(*series) for series in seeds])


def in_bins(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most MOST_POINTS points, each the mean of as many neighbours."""
    size = -(-len(steps) // MOST_POINTS)
    if size <= 1:
        return steps, values
    starts = np.arange(0, len(steps), size)
    counts = np.diff([*starts, len(steps)])
    return np.add.reduceat(steps, starts) / counts, np.add.reduceat(values, starts) / counts


class Estimate(NamedTuple):
    """A value over seeds."""

    mean: float
    error: float  # standard error; NaN with one seed
    interval: tuple[float, float]  # 95 %, Student's t
    values: Sequence[float]


def estimate(values: Sequence[float]) -> Estimate:
    """Mean, standard error and interval of one value a seed."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, math.nan, (math.nan, math.nan), values)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return Estimate(mean, error, (mean - half, mean + half), values)


def final(run: Run, tag: str) -> float | None:
    """The last value of an evaluation; the mean over the last part of anything else."""
    steps, values = run.series(tag)
    if not len(steps):
        return None
    if tag.startswith("eval/"):
        return float(values[-1])
    return float(values[steps > steps[-1] - max(LAST_PART * run.last_step, 1)].mean())


def final_of_group(group: Group, tag: str) -> Estimate | None:
    """The final value over the seeds that have one."""
    values = [value for value in (final(run, tag) for run in group.runs) if value is not None]
    return estimate(values) if values else None
