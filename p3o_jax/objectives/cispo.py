"""CISPO: the importance weight is clipped, the token is never dropped (MiniMax-M1, arXiv:2506.13585)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from p3o_jax.batch import stats
from p3o_jax.batch.types import Batch, Policy
from p3o_jax.objectives.base import Metrics, check_field
from p3o_jax.objectives.grpo import clip_metrics
from p3o_jax.objectives.ratio import RatioObjective


@dataclass(frozen=True, kw_only=True)
class Cispo(RatioObjective):
    """L = E[ -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi ]     (arXiv:2506.13585, Eq. 4 and 5)"""

    clip_low: float = 1.0
    """The weight is at least 1 - clip_low; 1: there is no lower bound, as in the paper."""

    clip_high: float = 4.0
    """The weight is at most 1 + clip_high. The paper tunes it and gives no number."""

    def __post_init__(self):
        super().__post_init__()
        check_field(self, "clip_low", at_least=0.0)
        check_field(self, "clip_high", at_least=0.0)

    def policy_loss(self, policy: Policy, batch: Batch, statistics: Any) -> tuple[Float[Array, "B T"], Metrics]:
        log_ratio = self.log_ratio(policy, batch)
        per_token = clipped_weight_loss(log_ratio, policy, batch, self.clip_low, self.clip_high)
        return per_token, clip_metrics(log_ratio, batch, self.clip_low, self.clip_high)


def clipped_weight_loss(
    log_ratio: Float[Array, "B T"], policy: Policy, batch: Batch, clip_low: float, clip_high: float
) -> Float[Array, "B T"]:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi"""
    weight = jnp.clip(stats.bounded_exp(log_ratio), 1.0 - clip_low, 1.0 + clip_high)
    return -jax.lax.stop_gradient(weight) * batch.advantages * policy.log_probs
