"""The ESS of parts of a batch."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from p3o_jax.batch import metrics
from p3o_jax.batch.breakdowns import POSITIONS, EssByGroup, ess_breakdowns, logged
from p3o_jax.batch.metrics import Histogram
from p3o_jax.batch.stats import LOG_RATIO_EDGES, RatioMoments
from p3o_jax.batch.types import Batch


def ess(ratios) -> float:
    ratios = np.asarray(ratios, np.float64)
    return float(ratios.mean() ** 2 / (ratios**2).mean())


def make_batch(mask, staleness, source) -> Batch:
    padding = jnp.where(mask, 0.0, jnp.nan)
    return Batch(mask, -1.0 + padding, padding, staleness=jnp.asarray(staleness), source=jnp.asarray(source))


RATIOS = np.array([[1.0, 2.0, 3.0, 4.0, 5.0, np.nan], [6.0, 7.0, np.nan, np.nan, np.nan, np.nan]])
MASK = jnp.asarray(np.isfinite(RATIOS))
STALENESS = np.array([[2] * 6, [0] * 6])
SOURCE = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])


def test_by_hand():
    batch = make_batch(MASK, STALENESS, SOURCE)
    log_probs = jnp.asarray(np.log(RATIOS) - 1.0, jnp.float32)
    found = ess_breakdowns(log_probs, batch, max_staleness=3, num_tasks=1, num_sources=2)
    values = logged(metrics.values(found))
    assert values == {
        "policy/ess/staleness=0": pytest.approx(ess([6, 7])),
        "policy/ess/staleness=2": pytest.approx(ess([1, 2, 3, 4, 5])),
        "policy/ess/source=0": pytest.approx(ess([1, 2])),
        "policy/ess/source=1": pytest.approx(ess([3, 4, 5, 6, 7])),
        "policy/ess/position=1-3": pytest.approx(ess([1, 2, 3, 6, 7])),
        "policy/ess/position=4-15": pytest.approx(ess([4, 5])),
    }
    none = batch._replace(staleness=None, source=None)
    assert ess_breakdowns(log_probs, none, max_staleness=0, num_tasks=1).keys() == {"policy/ess/position"}


def test_positions_are_buckets_of_four_times_the_length():
    mask = jnp.ones((1, 20000), bool)
    zeros = np.zeros(mask.shape, np.int32)
    batch = make_batch(mask, zeros, zeros)
    found = ess_breakdowns(jnp.full(mask.shape, -1.0), batch, max_staleness=0, num_tasks=1)
    counts = found["policy/ess/position"].count.tolist()
    assert counts == [3, 12, 48, 192, 768, 3072, 12288, 20000 - 16383]
    assert len(counts) == len(POSITIONS)


def test_no_staleness_is_in_no_bucket():
    """Buckets twice as long each from 4 on; what is older than was expected counts as the oldest that was."""
    ages = [0, 1, 3, 4, 7, 8, 255, 256, 10**6]
    mask = jnp.ones((1, len(ages)), bool)
    batch = make_batch(mask, np.asarray([ages]), np.zeros(mask.shape, np.int32))
    log_probs = jnp.full(mask.shape, -1.0)
    found = logged(metrics.values(ess_breakdowns(log_probs, batch, max_staleness=10**6, num_tasks=1)))
    names = [tag.rpartition("=")[2] for tag in found if "staleness" in tag]
    assert names == ["0", "1", "3", "4-7", "8-15", "128-255", "256-"]
    few = ess_breakdowns(log_probs, batch, max_staleness=4, num_tasks=1)["policy/ess/staleness"]
    assert few.count.tolist() == [1, 1, 0, 1, 6]


def test_tasks_and_sources_are_told_apart():
    task = jnp.asarray(1 - SOURCE)
    batch = make_batch(MASK, STALENESS, SOURCE)._replace(task=task)
    log_probs = jnp.asarray(np.log(RATIOS) - 1.0, jnp.float32)
    found = logged(metrics.values(ess_breakdowns(log_probs, batch, max_staleness=2, num_tasks=2, num_sources=2)))
    assert found["policy/ess/task=1"] == pytest.approx(found["policy/ess/source=0"]) == pytest.approx(ess([1, 2]))


def of_groups(ratios, groups) -> EssByGroup:
    log_ratio = jnp.asarray(np.log(np.asarray(ratios, np.float32)))
    return EssByGroup(*RatioMoments.of(log_ratio, jnp.ones(len(ratios), bool), jnp.asarray(groups), 3))


def test_of_several_batches_the_mean_is_over_those_that_had_the_group():
    one = of_groups([1, 3, 2], [0, 0, 1]).of_this_batch()
    two = of_groups([5, 5], [0, 0]).of_this_batch()
    values = logged(metrics.values({"policy/ess/source": metrics.combine(one, two)}))
    assert values == {
        "policy/ess/source=0": pytest.approx((ess([1, 3]) + 1) / 2),
        "policy/ess/source=1": pytest.approx(1),
    }


def test_a_group_with_a_ratio_that_is_not_finite_is_not_trusted():
    values = logged(metrics.values({"policy/ess/source": of_groups([1, 3, np.inf], [0, 0, 1])}))
    assert values["policy/ess/source=0"] == pytest.approx(ess([1, 3]))
    assert np.isnan(values["policy/ess/source=1"])
    of_batch = logged(metrics.values({"policy/ess/source": of_groups([1, np.inf], [0, 1]).of_this_batch()}))
    assert np.isnan(of_batch["policy/ess/source=1"]) and of_batch["policy/ess/source=0"] == 1


def test_counts_of_log_ratios_are_counts_of_ratios_too():
    counts = np.arange(1.0, len(LOG_RATIO_EDGES) + 2)
    values = logged({"policy/log_ratio_histogram": counts, "reward/mean": 0.5})
    assert values["reward/mean"] == 0.5
    assert isinstance(values["policy/log_ratio_histogram"], Histogram)
    edges, ratios = values["policy/ratio_histogram"]
    np.testing.assert_allclose(edges[[0, -1]], [np.exp(-1), np.e], rtol=1e-6)
    assert len(ratios) == len(edges) + 1 and ratios.sum() == counts.sum()
    assert ratios[0] == 1 + 2 + 3 + 4  # below -10, -5, -2 and -1
    assert ratios[1:-1].tolist() == counts[4:-4].tolist()
