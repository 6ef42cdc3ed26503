"""Properties of the ratio statistics, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3o_jax.batch import metrics, stats
from p3o_jax.batch.stats import RatioMoments

N = 32  # every drawn batch is padded to this, with NaN, so that one program serves all
ROUNDING = 16 * 2.0**-23

log_ratios = st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=N).map(
    lambda values: np.array(values, np.float32)
)
PROPERTIES = settings(max_examples=60, deadline=None, derandomize=True)


def pad(values):
    padded = np.full(N, np.nan, np.float32)
    padded[: len(values)] = values
    return jnp.asarray(padded), jnp.arange(N) < len(values)


@jax.jit
def summary(log_ratio, mask):
    moments = RatioMoments.of(log_ratio, mask)
    return moments, moments.ess()


def ess(values):
    return float(summary(*pad(values))[1])


def ess_in_float64(values):
    shifted = np.float64(values) - np.float64(values).max()
    ratio = np.exp(shifted)
    return ratio.sum() ** 2 / (ratio**2).sum() / ratio.size


@PROPERTIES
@given(log_ratios)
def test_ess_is_that_of_float64_at_any_magnitude(values):
    assert ess(values) == pytest.approx(ess_in_float64(values), rel=ROUNDING)


@PROPERTIES
@given(log_ratios)
def test_ess_is_a_fraction_of_at_least_one_sample(values):
    assert np.float32(1) / np.float32(len(values)) <= ess(values) <= 1


@PROPERTIES
@given(log_ratios, st.randoms(use_true_random=False), st.floats(-80, 80, width=32))
def test_ess_ignores_order_and_scale(values, random, shift):
    shuffled = list(values)
    random.shuffle(shuffled)
    assert ess(shuffled) == pytest.approx(ess(values), rel=ROUNDING)
    # The sum is rounded to float32, by up to 2^-24 of 380: what is added must be exactly one constant.
    multiple = np.round(values * 64) / 64
    assert ess(multiple + np.round(shift * 64) / 64) == pytest.approx(ess(multiple), rel=ROUNDING)


@jax.jit
def merged_ess(parts):
    moments = [RatioMoments.of(*part) for part in parts]
    merged = metrics.combine(moments[2], metrics.combine(moments[0], moments[1]))
    return merged, merged.ess()


@PROPERTIES
@given(log_ratios, st.integers(0, N), st.integers(0, N))
def test_ess_does_not_depend_on_the_split(values, first, second):
    """Three parts, any of which may be empty, merged in another order."""
    first, second = sorted((min(first, len(values)), min(second, len(values))))
    parts = [pad(values[:first]), pad(values[first:second]), pad(values[second:])]
    merged, merged_value = merged_ess(parts)
    assert merged.count == len(values)
    assert merged_value == pytest.approx(ess(values), rel=ROUNDING)


@PROPERTIES
@given(st.integers(1, N), st.floats(-300, 300, width=32))
def test_ess_of_equal_ratios_is_exactly_one(count, log_ratio):
    """Fresh data (log_ratio 0), and any uniform shift, which only the mean ratio shows."""
    assert ess(np.full(count, log_ratio, np.float32)) == 1.0


def test_ess_of_fresh_data_is_exactly_one_for_many_tokens():
    log_ratio = jnp.zeros((512, 1111), jnp.float32)
    mask = jnp.arange(1111) < jnp.arange(512)[:, None] + 300
    moments = RatioMoments.of(log_ratio, mask)
    assert moments.ess() == 1.0
    assert moments.ratio_mean() == 1.0
    assert moments.chi2() == 0.0


@PROPERTIES
@given(st.integers(2, N), st.floats(20, 300, width=32))
def test_one_dominating_token_leaves_one_sample(count, log_ratio):
    values = np.zeros(count, np.float32)
    values[count // 2] = log_ratio
    assert ess(values) == pytest.approx(1 / count, rel=ROUNDING)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_nonfinite_ratio_is_reported_never_averaged(value):
    log_ratio = jnp.asarray([0.1, value, -0.2, value], jnp.float32)
    moments = RatioMoments.of(log_ratio, jnp.ones(4, bool))
    assert (moments.count, moments.nonfinite) == (2, 2)
    for statistic in (moments.ess(), moments.ratio_mean(), moments.chi2()):
        assert np.isnan(statistic)
    # Through a merge with a healthy part too.
    healthy = RatioMoments.of(jnp.zeros(4, jnp.float32), jnp.ones(4, bool))
    assert np.isnan(metrics.combine(healthy, moments).ess())
    masked = RatioMoments.of(log_ratio, jnp.asarray([True, False, True, False]))
    assert masked.nonfinite == 0
    assert masked.ess() == RatioMoments.of(log_ratio[::2], jnp.ones(2, bool)).ess()


def test_an_empty_part_adds_nothing():
    empty = RatioMoments.of(jnp.full(3, jnp.nan), jnp.zeros(3, bool))
    some = RatioMoments.of(jnp.asarray([0.5, -1.0]), jnp.ones(2, bool))
    assert empty.ess() == 1.0
    assert metrics.combine(empty, empty).ess() == 1.0
    for merged in (metrics.combine(empty, some), metrics.combine(some, empty)):
        for field, expected in zip(merged, some, strict=True):
            assert field == expected


@PROPERTIES
@given(log_ratios, st.integers(0, 1000))
def test_groups_are_their_own_batches(values, seed):
    group = np.random.default_rng(seed).integers(-1, 4, size=N)  # -1 and 3 are out of range: in no group
    log_ratio, mask = pad(values)
    moments = grouped(log_ratio, mask, jnp.asarray(group))
    for g in range(3):
        own = values[group[: len(values)] == g]
        assert moments.count[g] == len(own)
        assert moments.ess()[g] == pytest.approx(ess_in_float64(own) if len(own) else 1.0, rel=ROUNDING)


@jax.jit
def grouped(log_ratio, mask, group):
    return RatioMoments.of(log_ratio, mask, group, 3)


def test_statistics_have_no_gradient():
    log_ratio, mask = jnp.asarray([0.3, -0.1]), jnp.ones(2, bool)
    for statistic in (RatioMoments.ess, RatioMoments.ratio_mean, RatioMoments.chi2):
        gradient = jax.grad(lambda x, statistic=statistic: statistic(RatioMoments.of(x, mask)))(log_ratio)
        assert (gradient == 0).all()


def test_bfloat16_log_probs_give_float32_statistics():
    log_probs = jnp.asarray([[-1.0, -2.5]], jnp.bfloat16)
    behaviour = jnp.asarray([[-1.001, -2.498]], jnp.float32)
    mask = jnp.ones((1, 2), bool)
    log_ratio = stats.log_ratio(log_probs, behaviour, mask)
    assert log_ratio.dtype == jnp.float32
    np.testing.assert_allclose(log_ratio, [[0.001, -0.002]], rtol=1e-4)  # bfloat16 would say 0 and 0
    for value in jax.tree.leaves(stats.ratio_metrics(log_ratio, mask)):
        assert value.dtype == jnp.float32
    assert RatioMoments.of(log_ratio.astype(jnp.bfloat16), mask).ess().dtype == jnp.float32


def test_mean_ratio_and_chi2_by_hand():
    """Ratios 1 and 3: mean 2; mean square 5, less 1 is 4; ESS 4 / 5."""
    moments = RatioMoments.of(jnp.log(jnp.asarray([1.0, 3.0])), jnp.ones(2, bool))
    assert moments.ratio_mean() == pytest.approx(2)
    assert moments.chi2() == pytest.approx(4)
    assert moments.ess() == pytest.approx(0.8)


def test_small_chi2_keeps_its_digits():
    log_ratio = np.float32(1e-4) * np.array([1, -1, 1, -1], np.float32)
    expected = (np.exp(np.float64(log_ratio)) ** 2).mean() - 1  # 2e-8
    chi2 = RatioMoments.of(jnp.asarray(log_ratio), jnp.ones(4, bool)).chi2()
    assert abs(chi2 - expected) < 4 * 2.0**-24


def test_statistics_beyond_float32_saturate():
    moments = RatioMoments.of(jnp.asarray([200.0, 0.0]), jnp.ones(2, bool))
    assert moments.ratio_mean() == moments.chi2() == pytest.approx(np.exp(88), rel=1e-5)


def test_ratio_metrics_by_hand():
    """Ratios 1.5, 1, 1/1.5 and a masked NaN: two of three outside 1 +- 0.2."""
    up = np.log(1.5)
    log_ratio = jnp.asarray([[up, 0.0, -up, np.nan]], jnp.float32)
    logged = metrics.values(stats.ratio_metrics(log_ratio, jnp.asarray([[True, True, True, False]])))
    k3 = ((up + 1 / 1.5 - 1) + 0 + (-up + 1.5 - 1)) / 3
    expected = {
        "policy/ratio_mean": (1.5 + 1 + 1 / 1.5) / 3,
        "policy/ratio_max": 1.5,
        "policy/log_ratio_abs_mean": 2 * up / 3,
        "policy/log_ratio_abs_max": up,
        "policy/outside_0.2_fraction": 2 / 3,
        "policy/behaviour_kl_proxy": k3,
        "policy/nonfinite_log_ratio": 0,
        "policy/chi2": (2.25 + 1 + 1 / 2.25) / 3 - 1,
    }
    for name, value in expected.items():
        assert logged[name] == pytest.approx(value, rel=2e-6), name
    counts = logged["policy/log_ratio_histogram"]
    assert counts.sum() == 3 and counts[0] == 0
    # By the lower edge of their bins: [-0.5, -0.2), [-0.001, 0.001) and [0.2, 0.5).
    np.testing.assert_allclose(stats.LOG_RATIO_EDGES[np.flatnonzero(counts) - 1], [-0.5, -0.001, 0.2])


def test_nonfinite_ratios_are_counted_and_left_out_of_the_other_metrics():
    log_ratio = jnp.asarray([[0.5, np.nan, -np.inf, 0.0]], jnp.float32)
    logged = metrics.values(stats.ratio_metrics(log_ratio, jnp.ones((1, 4), bool)))
    assert logged["policy/nonfinite_log_ratio"] == 2
    assert np.isnan(logged["policy/ess"])
    assert logged["policy/log_ratio_abs_mean"] == 0.25
    assert logged["policy/log_ratio_histogram"].sum() == 2


def test_histogram_puts_every_value_in_one_bin():
    edges = np.array([-1, 0, 2], np.float32)
    x = jnp.asarray([[-5.0, -1.0, -0.5, 0.0, 1.9, 2.0, 1e30, 7.0]])
    mask = jnp.asarray([[True] * 7 + [False]])
    assert stats.histogram(x, mask, edges).value().tolist() == [1, 2, 2, 2]


def test_bounded_exp_keeps_its_slope_where_it_is_clipped():
    x = jnp.asarray([-50.0, 0.0, 3.0, 50.0])
    value = stats.bounded_exp(x, 10.0)
    np.testing.assert_allclose(value, np.exp(np.clip(x, -10, 10)), rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(lambda x: stats.bounded_exp(x, 10.0).sum())(x), value)
    assert np.isnan(stats.bounded_exp(jnp.asarray([np.inf, -np.inf, np.nan]))).all()
    assert np.isfinite(stats.bounded_exp(jnp.asarray([3e38])))


def test_position_buckets_count_tokens_of_a_sequence():
    mask = jnp.asarray([[False, True, True, True, True, False], [True, True, False, True, True, True]])
    assert stats.position_bucket(mask).tolist() == [[-1, 0, 1, 1, 2, -1], [0, 1, -1, 1, 2, 2]]
    segments = jnp.asarray([[7, 0, 0, 1, 1, 7], [0, 0, 9, 2, 2, 2]])
    assert stats.position_bucket(mask, segments).tolist() == [[-1, 0, 1, 0, 1, -1], [0, 1, -1, 0, 1, 1]]


def test_sequence_sums_of_packed_rows():
    mask = jnp.asarray([[True, True, False, True], [False, True, False, False]])
    x = jnp.asarray([[1.0, 2.0, np.nan, 4.0], [np.nan, 5.0, np.nan, np.nan]])
    assert stats.sequence_sum(x, mask).tolist() == [[7, 7, 0, 7], [0, 5, 0, 0]]
    segments = jnp.asarray([[0, 0, 50, 1], [-3, 3, 3, 3]])
    assert stats.sequence_sum(x, mask, segments).tolist() == [[3, 3, 0, 4], [0, 5, 0, 0]]
    assert stats.sequence_lengths(mask, segments).tolist() == [[2, 2, 0, 1], [0, 1, 0, 0]]
    assert (stats.num_sequences(mask), stats.num_sequences(mask, segments)) == (2, 3)
    log_ratios = stats.sequence_moments(x, mask, segments)  # of the ratios e^3, e^4, e^5
    assert log_ratios.count == 3
    assert log_ratios.ess() == pytest.approx(ess_in_float64(np.array([3.0, 4.0, 5.0])), rel=1e-6)
