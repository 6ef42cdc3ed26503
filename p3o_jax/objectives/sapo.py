"""SAPO: a sigmoid gate instead of a clip (arXiv:2511.20347)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from p3o_jax.batch import stats
from p3o_jax.batch.types import Batch, Policy
from p3o_jax.objectives.base import Metrics, check_field
from p3o_jax.objectives.ratio import RatioObjective


@dataclass(frozen=True, kw_only=True)
class Sapo(RatioObjective):
    """L = E[ -f(r) A ],  f(r) = 4 / tau sigmoid(tau (r - 1))     (arXiv:2511.20347)

    f'(1) = 1: on-policy its gradient is REINFORCE's, and it fades as r leaves 1 on either side.
    The paper's mean is over sequences of their token means, `aggregation=SequenceMean()`; the
    default here is over tokens, as of the other objectives with a ratio a token, so that a
    comparison with them is one of the gate.
    """

    temperature_positive: float = 1.0
    """tau where A > 0."""

    temperature_negative: float = 1.05
    """tau where A <= 0; larger, so that negative updates fade sooner."""

    def __post_init__(self):
        super().__post_init__()
        check_field(self, "temperature_positive", above=0.0)
        check_field(self, "temperature_negative", above=0.0)

    def policy_loss(self, policy: Policy, batch: Batch, statistics: Any) -> tuple[Float[Array, "B T"], Metrics]:
        ratio = stats.bounded_exp(self.log_ratio(policy, batch))
        tau = jnp.where(batch.advantages > 0, self.temperature_positive, self.temperature_negative)
        tau = tau.astype(ratio.dtype)
        return -(4.0 / tau) * jax.nn.sigmoid(tau * (ratio - 1.0)) * batch.advantages, {}
