"""Advantages, by hand and by property; groups are ragged, unordered and arbitrarily named."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3o_jax.batch.advantages import BatchWhitening, GroupZScore, LeaveOneOut, MeanOnly

ALL = [GroupZScore(), GroupZScore(bessel=False), MeanOnly(), LeaveOneOut(), BatchWhitening()]
REWARDS = jnp.asarray([1.0, 5.0, 0.0, 2.0, 0.5, 3.0])
GROUP = jnp.asarray([7, -4, 7, -4, 7, 1000])  # rewards {1, 0, 0.5}, {5, 2} and {3}


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [
        # {1, 0, .5}: mean .5, squares .25 + .25 = .5, deviation sqrt(.5 / 2) = .5; {5, 2}: 3.5, sqrt(4.5 / 1)
        (GroupZScore(), [1, 1.5 / np.sqrt(4.5), -1, -1.5 / np.sqrt(4.5), 0, 0]),
        (GroupZScore(bessel=False), [np.sqrt(1.5), 1, -np.sqrt(1.5), -1, 0, 0]),
        (MeanOnly(), [0.5, 1.5, -0.5, -1.5, 0, 0]),
        (LeaveOneOut(), [0.75, 3, -0.75, -3, 0, 0]),  # 1 - (0 + .5) / 2, 5 - 2, ...
    ],
)
def test_by_hand(advantages, expected):
    np.testing.assert_allclose(advantages(REWARDS, GROUP), expected, rtol=2e-7)
    np.testing.assert_allclose(jax.jit(advantages)(REWARDS, GROUP), expected, rtol=2e-7)


def test_batch_whitening_ignores_groups():
    rewards = np.asarray(REWARDS)
    np.testing.assert_allclose(
        BatchWhitening()(REWARDS, GROUP), (rewards - rewards.mean()) / rewards.std(), rtol=1e-6, atol=1e-7
    )


def test_equal_rewards_give_exactly_zero():
    """In float32, where three times 0.1 is not 0.3: a group of every size from 1 to 16 for every reward."""
    values = np.array([0.1, 1 / 3, 0.7, 1e-30, 1e9, -0.3, 0.0], np.float32)
    pairs = [(value, 100 * size + i) for size in range(1, 17) for i, value in enumerate(values) for _ in range(size)]
    rewards, group = (jnp.asarray(column) for column in zip(*pairs, strict=True))
    for advantages in ALL[:4]:
        assert (advantages(rewards, group) == 0.0).all()
    for value in values:
        assert (BatchWhitening()(jnp.full(7, value), jnp.arange(7)) == 0.0).all()


def test_rewards_that_differ_by_rounding_only_are_equal():
    """A sum of parts, added in two orders: 0.1 + 0.2 + 0.3 against 0.3 + 0.2 + 0.1. No z-score of 1."""
    one = np.float32(0.1) + np.float32(0.2) + np.float32(0.3)
    rewards = jnp.asarray([one, np.nextafter(one, np.float32(1))])
    assert rewards[0] != rewards[1]
    assert (GroupZScore()(rewards, jnp.zeros(2, jnp.int32)) == 0.0).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(-3, 3)), min_size=12, max_size=12))
def test_exact_arithmetic(rows):
    """Leave-one-out and mean-only against fractions, whatever the groups."""
    rewards = jnp.asarray([reward for reward, _ in rows], jnp.float32)
    group = jnp.asarray([name for _, name in rows])
    for advantages, least in ((MeanOnly(), 1), (LeaveOneOut(), 2)):
        for (reward, name), actual in zip(rows, jax.jit(advantages)(rewards, group).tolist(), strict=True):
            own = [Fraction(r) for r, n in rows if n == name]
            centred = Fraction(reward) - sum(own) / len(own)
            expected = centred * len(own) / (len(own) - 1) if least == 2 and len(own) > 1 else centred
            assert actual == pytest.approx(float(expected), abs=2e-4)


@pytest.mark.parametrize("advantages", ALL)
def test_order_and_names_do_not_matter(advantages):
    order = np.array([3, 0, 5, 1, 4, 2])
    renamed = jnp.asarray(np.array([2, -9, 2, -9, 2, 5])[order])
    np.testing.assert_allclose(
        advantages(REWARDS[order], renamed), advantages(REWARDS, GROUP)[order], rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("advantages", ALL[:4])
def test_a_reward_that_is_not_finite_spoils_its_own_group_only(advantages):
    result = advantages(REWARDS.at[1].set(jnp.nan), GROUP)
    assert np.isnan(result[1]) and np.isnan(result[3])
    np.testing.assert_array_equal(result[jnp.array([0, 2, 4, 5])], advantages(REWARDS, GROUP)[jnp.array([0, 2, 4, 5])])


def test_what_dropping_a_row_does():
    """Statistics are of the rows given: dropped after, a row keeps its part; dropped before, it has none."""
    kept = np.array([0, 1, 3, 4, 5])
    after = MeanOnly()(REWARDS, GROUP)[kept]
    before = MeanOnly()(REWARDS[kept], GROUP[kept])
    np.testing.assert_allclose(after, [0.5, 1.5, -1.5, 0, 0])
    np.testing.assert_allclose(before, [0.25, 1.5, -1.5, -0.25, 0])  # {1, 0.5}: mean 0.75


@pytest.mark.parametrize("advantages", ALL)
def test_a_row_without_a_reward_has_no_part_in_it(advantages):
    """As if it had never been sampled, whatever stands in its place; a group of which nothing is known is all 0."""
    known = jnp.asarray([True, False, True, True, True, False])
    garbage = jnp.where(known, REWARDS, jnp.nan)
    expected = advantages(REWARDS[known], GROUP[known])
    found = advantages(garbage, GROUP, known)
    np.testing.assert_allclose(found[known], expected, rtol=1e-6)
    assert (found[~known] == 0).all()
    assert (advantages(garbage, GROUP, jnp.zeros(6, bool)) == 0).all()


@pytest.mark.usefixtures("unchecked")
def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"rewards \(6,\) and group \(5,\)"):
        MeanOnly()(REWARDS, GROUP[:5])
