from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from p3o_jax.report.runs import Group, Run
from p3o_jax.report.statistics import MOST_POINTS, curve, estimate, final, in_bins


def run_of(values: dict[int, float], tag: str = "reward/mean") -> Run:
    return Run(Path("run"), {}, {}, [{"step": step, tag: value} for step, value in values.items()], {})


def test_a_mean_over_seeds_by_hand():
    # 1, 2, 6: mean 3, variance (4 + 1 + 9) / 2 = 7; t of 2 degrees of freedom at 97.5 % is 4.30265.
    found = estimate([1.0, 2.0, 6.0])
    assert (found.mean, found.error) == (3, pytest.approx(math.sqrt(7 / 3)))
    assert found.interval == pytest.approx((3 - 4.30265 * found.error, 3 + 4.30265 * found.error), rel=1e-5)
    assert math.isnan(estimate([1.0]).error)


def test_a_curve_is_over_the_steps_that_every_seed_has_made():
    found = curve(Group("x", [run_of({1: 1, 2: 2, 3: 3}), run_of({1: 3, 2: 6})]), "reward/mean")
    assert found.steps.tolist() == [1, 2]
    assert found.mean.tolist() == [2, 4]
    assert found.error.tolist() == pytest.approx([1, 2])
    assert found.seeds[0][0].tolist() == [1, 2, 3]
    assert curve(Group("x", [run_of({1: 1})]), "policy/ess") is None


def test_the_final_value_is_of_the_last_tenth():
    assert final(run_of({step: float(step) for step in range(1, 41)}), "reward/mean") == (37 + 38 + 39 + 40) / 4
    assert final(run_of({1: 5.0, 2: 7.0}), "reward/mean") == 7
    assert final(run_of({0: 0.1, 20: 0.5}, "eval/x/pass@1"), "eval/x/pass@1") == 0.5
    assert final(run_of({1: 1.0}), "policy/ess") is None


def test_long_curves_are_averaged_in_bins():
    steps = np.arange(1, 1002)
    x, y = in_bins(steps, steps.astype(float))
    assert len(x) <= MOST_POINTS
    np.testing.assert_allclose(x, y)
    assert (x[0], x[-1]) == (3.5, 999.5 if 1001 % 6 == 0 else np.arange(1, 1002)[-(1001 % 6) :].mean())
