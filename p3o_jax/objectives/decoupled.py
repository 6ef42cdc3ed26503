"""Decoupled objectives: a trust region around a snapshot p, and a weight for what mu did differently.

q_t = pi(y_t) / p(y_t)                  what is clipped
w_t = min(p(y_t) / mu(y_t), cap)        the behaviour weight, a constant

Above the cap the weight is the cap, as in the P3O authors' code (FeynRL). In AReaL's public code
it is 0 there: such a token adds nothing, and stays in the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from p3o_jax.batch import stats
from p3o_jax.batch.metrics import Max, Min
from p3o_jax.batch.types import Batch, Policy, required
from p3o_jax.objectives.base import Metrics, Objective, check_field
from p3o_jax.objectives.cispo import clipped_weight_loss
from p3o_jax.objectives.grpo import clip_metrics, clipped_surrogate


@dataclass(frozen=True, kw_only=True)
class _Decoupled(Objective):
    clip_low: float = 0.2
    """The proximal ratio is clipped below 1 - clip_low."""

    clip_high: float = 0.2
    """The proximal ratio is clipped above 1 + clip_high."""

    behaviour_weight_cap: float | None = None
    """The largest behaviour weight p / mu, which takes the place of larger ones (AReaL's code makes
    those 0). None: it is not capped."""

    def __post_init__(self):
        super().__post_init__()
        check_field(self, "clip_low", at_least=0.0)
        check_field(self, "clip_high", at_least=0.0)
        if self.behaviour_weight_cap is not None:
            check_field(self, "behaviour_weight_cap", above=0.0)

    @property
    def snapshot(self) -> Literal["epoch"]:
        return "epoch"

    def behaviour_weight(self, batch: Batch) -> tuple[Float[Array, "B T"], Metrics]:
        """The weight of every token, and its metrics."""
        log_weight = required(batch.proximal_log_probs, "proximal_log_probs") - batch.behaviour_log_probs
        weight = jax.lax.stop_gradient(stats.bounded_exp(log_weight))
        metrics = {}
        if self.behaviour_weight_cap is not None:
            weight = jnp.minimum(weight, self.behaviour_weight_cap)
            capped = (weight >= self.behaviour_weight_cap).astype(weight.dtype)
            metrics["policy/behaviour_weight_cap_fraction"] = stats.token_mean(capped, batch.mask)
        return weight, metrics | {
            "policy/behaviour_weight_mean": stats.token_mean(weight, batch.mask),
            "policy/behaviour_weight_max": Max(jnp.max(jnp.where(batch.mask, weight, -jnp.inf))),
            "policy/behaviour_weight_min": Min(jnp.min(jnp.where(batch.mask, weight, jnp.inf))),
            "policy/behaviour_weight_log_mean": stats.token_mean(log_weight, batch.mask),
        }


@dataclass(frozen=True, kw_only=True)
class DecoupledPpo(_Decoupled):
    """L = E[ -w min(q A, clip(q, 1 - clip_low, 1 + clip_high) A) ]     (Hilton et al., arXiv:2110.00641)

    With group-relative advantages it is decoupled GRPO, as asynchronous systems use it
    (AReaL, arXiv:2505.24298).
    """

    def policy_loss(self, policy: Policy, batch: Batch, statistics: Any) -> tuple[Float[Array, "B T"], Metrics]:
        log_ratio = policy.log_probs - required(batch.proximal_log_probs, "proximal_log_probs")
        weight, metrics = self.behaviour_weight(batch)
        surrogate = clipped_surrogate(log_ratio, batch.advantages, self.clip_low, self.clip_high)
        return -weight * surrogate, metrics | clip_metrics(log_ratio, batch, self.clip_low, self.clip_high)


@dataclass(frozen=True, kw_only=True)
class DecoupledCispo(_Decoupled):
    """L = E[ -w sg(clip(q, 1 - clip_low, 1 + clip_high)) A log pi ]     (CISPO, decoupled as in Hilton et al.)"""

    def policy_loss(self, policy: Policy, batch: Batch, statistics: Any) -> tuple[Float[Array, "B T"], Metrics]:
        log_ratio = policy.log_probs - required(batch.proximal_log_probs, "proximal_log_probs")
        weight, metrics = self.behaviour_weight(batch)
        per_token = weight * clipped_weight_loss(log_ratio, policy, batch, self.clip_low, self.clip_high)
        return per_token, metrics | clip_metrics(log_ratio, batch, self.clip_low, self.clip_high)
