"""P4O: P3O between two anchors, the behaviour policy and a proximal snapshot of the learner.

    e_b = ESS(pi / mu)    e_p = ESS(pi / p)    e = min(e_b, e_p)    v = 1 - e_(.)
    log m_t = log( (v_b mu(y_t) + v_p p(y_t)) / (v_b + v_p) )
    L   = mean_t[ -sg(min(rho_t, e)) A_t log pi(y_t) + (1 - e) KL_t(pi || m) ]

It is P3O when the snapshot is uninformative (e_p = 1, or p = mu), and P3O anchored to the
snapshot when the behaviour policy is (e_b = 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from p3o_jax.batch import stats
from p3o_jax.batch.metrics import Mean, Min
from p3o_jax.batch.types import AnyArray, Batch, Policy, required
from p3o_jax.objectives import kl
from p3o_jax.objectives.base import Metrics
from p3o_jax.objectives.p3o import P3O, capped_score, support_kl

# 1 - e in float32 is known to about 1e-7; below this, the proportion of the anchors is
# rounding, and the weight of the term is too.
INFORMATIVE = 1e-6


class TwoMoments(NamedTuple):
    """The batch statistics of P4O."""

    behaviour: stats.RatioMoments
    proximal: stats.RatioMoments


@dataclass(frozen=True, kw_only=True)
class P4O(P3O):
    """L = E[ -sg(min(rho, e)) A log pi + (1 - e) KL(pi || m) ],  m a mixture of mu and a snapshot

    The snapshot is the learner's policy at the start of each epoch. Like P3O it has no number
    to tune. The sampled KL forms take the mixture for their anchor: `importance` stays
    unbiased for KL(pi, m) and `reverse` for KL(m, pi) under samples of mu.
    """

    @property
    def snapshot(self) -> Literal["epoch"]:
        return "epoch"

    @property
    def support(self) -> Literal["both"] | None:
        return "both" if self.kl in kl.DISTRIBUTION_FORMS else None

    def statistics(self, policy: Policy, batch: Batch) -> TwoMoments:
        self.check_needs(policy, batch)
        proximal = required(batch.proximal_log_probs, "proximal_log_probs")
        return TwoMoments(
            behaviour=super().statistics(policy, batch),
            proximal=super().statistics(policy, batch._replace(behaviour_log_probs=proximal)),
        )

    def policy_loss(self, policy: Policy, batch: Batch, statistics: Any) -> tuple[Float[Array, "B T"], Metrics]:
        dtype = policy.log_probs.dtype
        ess_b, ess_p = (jax.lax.stop_gradient(m.ess()).astype(dtype) for m in statistics)
        ess = jnp.minimum(ess_b, ess_p)
        distrust_b, distrust_p = 1.0 - ess_b, 1.0 - ess_p
        distrust = distrust_b + distrust_p
        # A NaN is kept: a batch with a log-ratio that is not finite has no ESS and is refused.
        informative = ~(1.0 - ess <= INFORMATIVE)
        share_b = jnp.where(informative, distrust_b / jnp.where(informative, distrust, 1.0), 1.0)
        share_p = jnp.where(informative, distrust_p / jnp.where(informative, distrust, 1.0), 0.0)

        score, metrics = capped_score(policy, batch, self.cap(ess))
        divergence = self.divergence_from_mixture(policy, batch, share_b, share_p)
        weight = jnp.where(informative, self.kl_weight(ess), 0.0)

        count = jnp.sum(batch.mask, dtype=dtype)
        some = jnp.where(distrust > 0, distrust, 1.0)
        metrics |= {
            "policy/ess_mixture": Min(ess),
            "policy/mixture_behaviour_share": Mean(count * distrust_b / some, count),
            "policy/mixture_proximal_share": Mean(count * distrust_p / some, count),
            "loss/score": self.term(score, batch),
            "loss/mixture_kl": self.term(jnp.where(informative, divergence, 0.0), batch),
            "loss/behaviour_kl": self.term(self.divergence_from_mixture(policy, batch, 1.0, 0.0), batch),
            "loss/proximal_kl": self.term(self.divergence_from_mixture(policy, batch, 0.0, 1.0), batch),
        }
        return score + weight * divergence, metrics

    def divergence_from_mixture(
        self, policy: Policy, batch: Batch, share_b: Float[Array, ""] | float, share_p: Float[Array, ""] | float
    ) -> Float[Array, "B T"]:
        """The KL of every token to share_b mu + share_p p, before its weight."""
        if self.kl in kl.DISTRIBUTION_FORMS:
            anchors = required(batch.support, "support")
            behaviour = required(anchors.behaviour_log_probs, "support.behaviour_log_probs")
            proximal = required(anchors.proximal_log_probs, "support.proximal_log_probs")
            mixture = _log_mixture(behaviour, proximal, share_b, share_p)
            return support_kl(self.kl, policy, batch, mixture)
        proximal = required(batch.proximal_log_probs, "proximal_log_probs")
        mixture = _log_mixture(batch.behaviour_log_probs, proximal, share_b, share_p)
        return kl.sampled(self.kl, policy.log_probs - mixture, policy.log_probs - batch.behaviour_log_probs)


def _log_mixture(
    log_b: Float[AnyArray, "..."],
    log_p: Float[AnyArray, "..."],
    share_b: Float[Array, ""] | float,
    share_p: Float[Array, ""] | float,
) -> Float[Array, "..."]:
    """log(share_b exp(log_b) + share_p exp(log_p)), a constant; a share of 0 takes its part out."""
    share_b, share_p = jnp.asarray(share_b, log_b.dtype), jnp.asarray(share_p, log_b.dtype)
    return jax.lax.stop_gradient(jnp.logaddexp(jnp.log(share_b) + log_b, jnp.log(share_p) + log_p))
