"""Advantages from rewards: (rewards [B], group [B]) -> [B].

Rows with the same group id answer the same prompt; ids are arbitrary integers, in any
order, and groups may differ in size. Give every row that was sampled: statistics are
taken here, before anything is dropped. A row that is filtered out later (too long, too
stale, zero variance) keeps its part in its group's mean and deviation, so that
dropping one answer does not change what the others are worth; a row that was never
given has no part. A reward that is not finite makes its own group not finite.

`known` [B] marks the rows that have a reward at all (None: all): a row whose verifier
failed has none, so it has no part in its group, its advantage is 0, and its reward is
not read.

In a group of equal rewards, or of one row, every advantage is exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@dataclass(frozen=True)
class GroupZScore:
    """A_i = (r_i - mean r) / std r over the group     (GRPO, arXiv:2402.03300)"""

    bessel: bool = True
    """Divide the squared deviations by n - 1 (as torch.std); otherwise by n, the population deviation."""

    def __call__(
        self, rewards: Float[Array, " B"], group: Int[Array, " B"], known: Bool[Array, " B"] | None = None
    ) -> Float[Array, " B"]:
        groups = _Groups(rewards, group, known)
        count = groups.count - 1.0 if self.bessel else groups.count
        return _divide_by_deviation(groups, groups.sum(groups.centred**2) / jnp.maximum(count, 1.0))


@dataclass(frozen=True)
class MeanOnly:
    """A_i = r_i - mean r over the group     (Dr.GRPO, arXiv:2503.20783)"""

    def __call__(
        self, rewards: Float[Array, " B"], group: Int[Array, " B"], known: Bool[Array, " B"] | None = None
    ) -> Float[Array, " B"]:
        return _Groups(rewards, group, known).centred


@dataclass(frozen=True)
class LeaveOneOut:
    """A_i = r_i - mean of the others' r in the group = n / (n - 1) (r_i - mean r)     (RLOO, arXiv:2402.14740)

    A group of one has no others to compare with: its advantage is 0.
    """

    def __call__(
        self, rewards: Float[Array, " B"], group: Int[Array, " B"], known: Bool[Array, " B"] | None = None
    ) -> Float[Array, " B"]:
        groups = _Groups(rewards, group, known)
        return groups.centred * (groups.count / jnp.maximum(groups.count - 1.0, 1.0))


@dataclass(frozen=True)
class BatchWhitening:
    """A_i = (r_i - mean r) / std r over the whole batch, whatever the groups; population deviation."""

    def __call__(
        self, rewards: Float[Array, " B"], group: Int[Array, " B"], known: Bool[Array, " B"] | None = None
    ) -> Float[Array, " B"]:
        groups = _Groups(rewards, jnp.zeros_like(group), known)
        return _divide_by_deviation(groups, groups.sum(groups.centred**2) / groups.count)


Advantages = GroupZScore | MeanOnly | LeaveOneOut | BatchWhitening


class _Groups:
    """Sums over groups, each row getting its group's."""

    def __init__(self, rewards: Float[Array, " B"], group: Int[Array, " B"], known: Bool[Array, " B"] | None):
        if rewards.ndim != 1 or group.shape != rewards.shape:
            raise ValueError(f"rewards {rewards.shape} and group {group.shape}: give two vectors of one length")
        rewards = rewards.astype(jnp.float32)
        order = jnp.argsort(group)
        rank = jnp.cumsum(jnp.diff(group[order], prepend=group[order][:1]) != 0)
        self.ids = jnp.zeros_like(rank).at[order].set(rank)
        self.size = rewards.shape[0]
        known = jnp.ones(rewards.shape, bool) if known is None else known
        self.count = jnp.maximum(self.sum(known.astype(jnp.float32)), 1.0)
        # Relative to the group's least reward: equal rewards become 0 before anything is rounded.
        rewards = jnp.where(known, rewards, jnp.inf)
        least = jax.ops.segment_min(rewards, self.ids, self.size)[self.ids]
        above = jnp.where(known, rewards - least, 0.0)
        self.least = jnp.where(self.sum(known.astype(jnp.float32)) > 0, least, 0.0)
        self.centred = jnp.where(known, above - self.sum(above) / self.count, 0.0)

    def sum(self, x: Float[Array, " B"]) -> Float[Array, " B"]:
        return jax.ops.segment_sum(x, self.ids, self.size)[self.ids]


def _divide_by_deviation(groups: _Groups, variance: Float[Array, " B"]) -> Float[Array, " B"]:
    """Centred rewards over their deviation; 0 where that is no more than the rounding of the rewards."""
    deviation = jnp.sqrt(variance)
    rounding = 1e-6 * jnp.abs(groups.least)
    return jnp.where(deviation <= rounding, 0.0, groups.centred / jnp.where(deviation <= rounding, 1.0, deviation))
