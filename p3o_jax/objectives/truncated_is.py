"""Importance-weighted REINFORCE with the weight cut off or masked, and VCPO, which slows down instead.

Token weights r_t = pi / pi_old correct each token's own distribution, not that of its
prefix; sequence weights prod_t r_t correct both, at a variance that grows with length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from p3o_jax.batch import stats
from p3o_jax.batch.types import Batch, Policy
from p3o_jax.objectives.base import Metrics, check_choice, check_field
from p3o_jax.objectives.ratio import RatioObjective


@dataclass(frozen=True, kw_only=True)
class TruncatedIs(RatioObjective):
    """L = E[ -sg(min(r, cap)) A log pi ]     (IMPALA's truncation, arXiv:1802.01561; Ionides, 2008)"""

    cap: float = 2.0
    """The largest weight, C."""

    level: Literal["token", "sequence"] = "token"
    """Whose ratio r is: each token's own, or the product over the token's sequence."""

    def __post_init__(self):
        super().__post_init__()
        check_field(self, "cap", above=0.0)
        check_choice(self, "level", ("token", "sequence"))

    def policy_loss(self, policy: Policy, batch: Batch, statistics: Any) -> tuple[Float[Array, "B T"], Metrics]:
        log_ratio = self.log_ratio(policy, batch)
        if self.level == "sequence":
            log_ratio = stats.sequence_sum(log_ratio, batch.mask, batch.segment_ids)
        ratio = jax.lax.stop_gradient(stats.bounded_exp(log_ratio))
        cap_fraction = stats.token_mean((ratio > self.cap).astype(ratio.dtype), batch.mask)
        weight = jnp.minimum(ratio, self.cap)
        return -weight * batch.advantages * policy.log_probs, {"policy/cap_fraction": cap_fraction}


@dataclass(frozen=True, kw_only=True)
class MaskedIs(RatioObjective):
    """L = E[ -sg(r 1[low <= r <= high]) A log pi ]     (IcePop, arXiv:2510.18855)

    A token outside the band has no loss; it still counts in the denominator.
    """

    low: float = 0.5
    """The smallest ratio that is kept."""

    high: float = 5.0
    """The largest ratio that is kept."""

    def __post_init__(self):
        super().__post_init__()
        check_field(self, "low", at_least=0.0)
        check_field(self, "high", at_least=self.low)

    def policy_loss(self, policy: Policy, batch: Batch, statistics: Any) -> tuple[Float[Array, "B T"], Metrics]:
        ratio = jax.lax.stop_gradient(stats.bounded_exp(self.log_ratio(policy, batch)))
        kept = (ratio >= self.low) & (ratio <= self.high)
        weight = jnp.where(kept, ratio, 0.0)
        masked_fraction = stats.token_mean((~kept).astype(ratio.dtype), batch.mask)
        return -weight * batch.advantages * policy.log_probs, {"policy/masked_fraction": masked_fraction}


@dataclass(frozen=True, kw_only=True)
class Vcpo(TruncatedIs):
    """Truncated IS whose learning rate is multiplied by sqrt(ESS)     (VCPO, arXiv:2602.17616)

    The ESS is over the optimizer batch, of the ratios at `level`; at the sequence level it
    falls with length even where every token is nearly on-policy. The paper's second part,
    a baseline of least variance from per-sample gradient norms, is not here: it is a
    choice of advantages that no objective of log-probs can make.
    """

    level: Literal["token", "sequence"] = "sequence"
    """Whose ratio r is: each token's own, or the product over the token's sequence (the paper's)."""

    @property
    def statistics_scope(self) -> Literal["batch"]:
        return "batch"

    def statistics(self, policy: Policy, batch: Batch) -> stats.RatioMoments:
        self.check_needs(policy, batch)
        log_ratio = stats.log_ratio(policy.log_probs, self.old_log_probs(batch), batch.mask)
        if self.level == "sequence":
            return stats.sequence_moments(log_ratio, batch.mask, batch.segment_ids)
        return stats.RatioMoments.of(log_ratio, batch.mask)

    def learning_rate_factor(self, statistics: stats.RatioMoments) -> Float[Array, ""]:
        return jnp.sqrt(statistics.ess())
