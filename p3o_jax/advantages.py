"""Advantages from rewards: (rewards [B], group [B]) -> [B].

Rows with the same group id answer the same prompt; ids are arbitrary integers, in any
order, and groups may differ in size. Give every row that was sampled: statistics are
taken here, before anything is dropped. A row that is filtered out later (too long, too
stale, zero variance) keeps its part in its group's mean and deviation, so that
dropping one answer does not change what the others are worth; a row that was never
given has no part. A reward that is not finite makes its own group not finite.

In a group of equal rewards, or of one row, every advantage is exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class GroupZScore:
    """A_i = (r_i - mean r) / std r over the group     (GRPO, arXiv:2402.03300)"""

    bessel: bool = True
    """Divide the squared deviations by n - 1 (as torch.std); otherwise by n, the population deviation."""

    def __call__(self, rewards: Float[Array, " B"], group: Int[Array, " B"]) -> Float[Array, " B"]:
        groups = _Groups(rewards, group)
        count = groups.count - 1.0 if self.bessel else groups.count
        return _divide_by_deviation(groups, groups.sum(groups.centred**2) / jnp.maximum(count, 1.0))


@dataclass(frozen=True)
class MeanOnly:
    """A_i = r_i - mean r over the group     (Dr.GRPO, arXiv:2503.20783)"""

    def __call__(self, rewards: Float[Array, " B"], group: Int[Array, " B"]) -> Float[Array, " B"]:
        return _Groups(rewards, group).centred


@dataclass(frozen=True)
class LeaveOneOut:
    """A_i = r_i - mean of the others' r in the group = n / (n - 1) (r_i - mean r)     (RLOO, arXiv:2402.14740)

    A group of one has no others to compare with: its advantage is 0.
    """

    def __call__(self, rewards: Float[Array, " B"], group: Int[Array, " B"]) -> Float[Array, " B"]:
        groups = _Groups(rewards, group)
        return groups.centred * (groups.count / jnp.maximum(groups.count - 1.0, 1.0))


@dataclass(frozen=True)
class BatchWhitening:
    """A_i = (r_i - mean r) / std r over the whole batch, whatever the groups; population deviation."""

    def __call__(self, rewards: Float[Array, " B"], group: Int[Array, " B"]) -> Float[Array, " B"]:
        groups = _Groups(rewards, jnp.zeros_like(group))
        return _divide_by_deviation(groups, groups.sum(groups.centred**2) / groups.count)


Advantages = GroupZScore | MeanOnly | LeaveOneOut | BatchWhitening


class _Groups:
    """Sums over groups, each row getting its group's."""

    def __init__(self, rewards: Float[Array, " B"], group: Int[Array, " B"]):
        if rewards.ndim != 1 or group.shape != rewards.shape:
            raise ValueError(f"rewards {rewards.shape} and group {group.shape}: give two vectors of one length")
        rewards = rewards.astype(jnp.float32)
        order = jnp.argsort(group)
        rank = jnp.cumsum(jnp.diff(group[order], prepend=group[order][:1]) != 0)
        self.ids = jnp.zeros_like(rank).at[order].set(rank)
        self.size = rewards.shape[0]
        self.count = self.sum(jnp.ones_like(rewards))
        # Relative to the group's least reward: equal rewards become 0 before anything is rounded.
        self.least = jax.ops.segment_min(rewards, self.ids, self.size)[self.ids]
        above = rewards - self.least
        self.centred = above - self.sum(above) / self.count

    def sum(self, x: Float[Array, " B"]) -> Float[Array, " B"]:
        return jax.ops.segment_sum(x, self.ids, self.size)[self.ids]


def _divide_by_deviation(groups: _Groups, variance: Float[Array, " B"]) -> Float[Array, " B"]:
    """Centred rewards over their deviation; 0 where that is no more than the rounding of the rewards."""
    deviation = jnp.sqrt(variance)
    rounding = 1e-6 * jnp.abs(groups.least)
    return jnp.where(deviation <= rounding, 0.0, groups.centred / jnp.where(deviation <= rounding, 1.0, deviation))
