"""Learning from what went well: an objective of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from p3o_jax.batch import stats
from p3o_jax.batch.types import Batch, Policy
from p3o_jax.objectives.base import Metrics, Objective, check_field


@dataclass(frozen=True, kw_only=True)
class LearnFromSuccess(Objective):
    """L = E[ -sg(min(rho, 1)) A' log pi ],   A' = A where A > 0, else negative_weight A

    Arrays in, a loss for every token out: what is masked, the mean over tokens and the metrics that all objectives
    have are not its business.
    """

    negative_weight: float = 0.0
    """What advantages below 0 are multiplied by: 1 treats failures as successes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_field(self, "negative_weight", at_least=0.0)

    def policy_loss(self, policy: Policy, batch: Batch, statistics: Any) -> tuple[Float[Array, "B T"], Metrics]:
        log_ratio = policy.log_probs - batch.behaviour_log_probs
        weight = jax.lax.stop_gradient(jnp.exp(jnp.minimum(log_ratio, 0.0)))
        better = batch.advantages > 0
        advantages = jnp.where(better, batch.advantages, self.negative_weight * batch.advantages)
        metrics = {"policy/better_fraction": stats.token_mean(better.astype(weight.dtype), batch.mask)}
        return -weight * advantages * policy.log_probs, metrics
