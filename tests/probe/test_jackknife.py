"""The ESS of a probe and its error, against decimals of fifty digits from which one prompt is left out at a time."""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
import pytest
from scipy.stats import t as student

from p3o_jax.probe.jackknife import ess_of_prompts


def in_decimals(prompts):
    """ESS, error and largest share of lists of log-ratios, as the equations say."""
    with localcontext(prec=50):
        ratios = [[Decimal(float(value)).exp() for value in values] for values in prompts if len(values)]
        parts = [(sum(r), sum(x * x for x in r), Decimal(len(r))) for r in ratios]

        def ess(parts):
            first, second, count = (sum(part) for part in zip(*parts, strict=True))
            return first * first / second / count

        left_out = [ess(parts[:g] + parts[g + 1 :]) for g in range(len(parts))] if len(parts) > 1 else []
        mean = sum(left_out) / max(len(left_out), 1)
        variance = sum((value - mean) ** 2 for value in left_out) * (len(parts) - 1) / len(parts)
        share = max(part[1] for part in parts) / sum(part[1] for part in parts)
        return 1 - ess(parts), variance.sqrt(), share


def as_rows(prompts):
    """A row each, padded with NaN and infinities."""
    width = max(map(len, prompts)) + 2
    log_ratio = np.full((len(prompts), width), np.nan, np.float32)
    log_ratio[:, -1] = np.inf
    mask = np.zeros(log_ratio.shape, bool)
    for row, values in enumerate(prompts):
        log_ratio[row, : len(values)], mask[row, : len(values)] = values, True
    return log_ratio, mask, np.arange(len(prompts)) * 7 % 1009


def check(prompts):
    found = ess_of_prompts(*as_rows(prompts))
    lost, error, share = map(float, in_decimals(prompts))
    assert 1 - found.ess == pytest.approx(lost, rel=1e-9, abs=1e-15)  # of 1 - ESS, the rounding of the ESS is left
    assert found.error == pytest.approx(error, rel=1e-6)
    assert found.largest_share == pytest.approx(share, rel=1e-9)
    return found


@pytest.mark.parametrize("top", [8, 10, 11, 12, 15, 50, 700, -700])
def test_a_token_that_outweighs_all_others(top):
    """In float32, as the total less each part, its error was 1.7, 2.3 and NaN at 10, 11 and 12; it is .97."""
    log_ratio = (np.random.default_rng(0).standard_normal((64, 16)) * 0.1).astype(np.float32)
    log_ratio[5, 3] = top
    found = check([*log_ratio])
    if top >= 10:
        assert found.error == pytest.approx(0.97, abs=0.01)
        assert found.largest_share > 0.99


@pytest.mark.parametrize("deviation", [1e-1, 1e-2, 7e-3, 1e-3, 1e-4, 1e-5])
def test_an_ess_near_one(deviation):
    """The error keeps its digits where 1 - ESS, about deviation^2, is nothing beside the rounding of an ESS."""
    log_ratio = np.random.default_rng(1).standard_normal((128, 44)) * deviation
    found = check([*log_ratio.astype(np.float32)])
    assert found.error == pytest.approx(np.sqrt(2 / 128 / 44) * deviation**2, rel=0.3)  # of a variance of normals


@pytest.mark.parametrize("shift", [-3.0, 200.0])
def test_prompts_of_very_different_lengths_and_one_without_tokens(shift):
    rng = np.random.default_rng(2)
    lengths = (1, 0, 2, 3000, 5, 0, 40, 1)
    check([(rng.standard_normal(n) * 0.5 + shift).astype(np.float32) for n in lengths])


def test_equal_ratios_leave_nothing():
    log_ratio = np.full((6, 5), 0.3, np.float32)
    found = ess_of_prompts(log_ratio, np.ones((6, 5), bool), np.array([0, 0, 1, 1, 2, 2]))
    assert (found.ess, found.error) == (1.0, 0.0)
    assert found.largest_share == pytest.approx(1 / 3)


def test_rows_of_a_prompt_count_together_whatever_their_order():
    log_ratio = np.random.default_rng(3).standard_normal((6, 5)).astype(np.float32)
    together = ess_of_prompts(log_ratio, np.ones((6, 5), bool), np.array([7, 3, 7, 5, 3, 7]))
    prompts = [log_ratio[[0, 2, 5]].ravel(), log_ratio[[1, 4]].ravel(), log_ratio[3]]
    assert together == pytest.approx(check(prompts), rel=1e-12)


def test_what_there_is_no_error_of():
    one = ess_of_prompts(*as_rows([np.array([0.0, 1.0])]))
    assert one.ess == pytest.approx((1 + np.e) ** 2 / 2 / (1 + np.e**2))
    assert np.isnan(one.error) and one.largest_share == 1
    nothing = ess_of_prompts(np.full((2, 3), np.nan), np.zeros((2, 3), bool), np.arange(2))
    assert nothing.ess == 1 and np.isnan(nothing[1:]).all()
    for value in (np.nan, np.inf, -np.inf):
        assert np.isnan(ess_of_prompts(np.array([[0.0], [value]]), np.ones((2, 1), bool), np.arange(2))).all()


def of_the_law(degrees, scale, limit):
    """The ESS of scale times Student's t, cut at +-limit."""
    size = np.linspace(-limit, limit, 1_000_001)
    mass = student.pdf(size / scale, degrees) / scale * (size[1] - size[0])
    mass[[0, -1]] += student.sf(limit / scale, degrees)
    return (mass * np.exp(size)).sum() ** 2 / (mass * np.exp(2 * size)).sum()


def students(rng, degrees, shape):
    return np.clip(0.3 * rng.standard_t(degrees, size=shape), -6, 6)


SHAPE = (512, 44)
LAWS = {  # how it is drawn, its ESS, and in which range its share of intervals that cover is
    "normal": (lambda rng: 0.5 * rng.standard_normal(SHAPE), np.exp(-0.25), (0.9, 1.0)),
    "laplace": (lambda rng: 0.35 * rng.laplace(size=SHAPE), (1 - 4 * 0.35**2) / (1 - 0.35**2) ** 2, (0.6, 0.9)),
    "t3": (lambda rng: students(rng, 3, SHAPE), of_the_law(3, 0.3, 6), (0.8, 0.97)),
    "shared t4": (
        lambda rng: students(rng, 4, (512, 1)) + 0.1 * rng.standard_normal(SHAPE),
        of_the_law(4, 0.3, 6) * np.exp(-0.01),
        (0.05, 0.4),
    ),
}


@pytest.mark.parametrize("law", LAWS)
def test_an_error_does_not_see_a_tail_that_was_not_sampled(law):
    """Of 100 ESS of normal log-ratios about 95 are within twice their error; of heavier tails fewer (docs/probe.md).

    Those that miss have the smaller shares of a prompt, not the larger: a large share shows a tail, a small one does
    not show that there is none.
    """
    draw, ess, (least, most) = LAWS[law]
    rng = np.random.default_rng(0)
    found = [ess_of_prompts(draw(rng), np.ones(SHAPE, bool), np.arange(512)) for _ in range(100)]
    covers = np.array([abs(one.ess - ess) <= 2 * one.error for one in found])
    share = np.array([one.largest_share for one in found])
    assert least <= covers.mean() <= most
    if law == "normal":
        assert share.max() < 0.1
    else:
        assert np.median(share[~covers]) < np.median(share[covers])
