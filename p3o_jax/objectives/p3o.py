"""P3O: cap and trust region from one batch statistic (arXiv:2605.12380, Eq. 12).

rho_t = pi(y_t) / mu(y_t)        e = ESS of rho over the optimizer batch, a constant
L     = mean_t[ -sg(min(rho_t, e)) A_t log pi(y_t) + (1 - e) KL_t(pi || mu) ]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from p3o_jax.batch import stats
from p3o_jax.batch.types import AnyArray, Batch, Policy, required
from p3o_jax.objectives import kl
from p3o_jax.objectives.base import Metrics, Objective, check_choice


@dataclass(frozen=True, kw_only=True)
class P3O(Objective):
    """L = E[ -sg(min(rho, e)) A log pi + (1 - e) KL(pi || mu) ]     (arXiv:2605.12380, Eq. 12)

    `P3O()` is the published algorithm. It has no number to tune.
    """

    kl: Literal["k3", "reference", "importance", "reverse", "exact", "top_k"] = "k3"
    """What stands for KL(pi || mu); `p3o_jax.objectives.kl` has values, gradients and expectations.
    k3: the authors' estimator, right sign everywhere. reference: theirs, exponent clamp included.
    importance: unbiased for KL(pi, mu) under samples of mu. reverse: unbiased for KL(mu, pi).
    exact: KL(pi, mu) from mu's full distribution, no sampling. top_k: the sampler's k most likely
    tokens and one bucket for the others, a lower bound of exact."""

    ess_scope: Literal["batch", "micro_batch"] = "batch"
    """What e is taken over: the optimizer batch, or one micro-batch over all devices (the authors' code)."""

    def __post_init__(self):
        super().__post_init__()
        check_choice(self, "kl", kl.SAMPLED_FORMS + kl.DISTRIBUTION_FORMS)
        check_choice(self, "ess_scope", ("batch", "micro_batch"))

    @property
    def statistics_scope(self) -> Literal["batch", "micro_batch"]:
        return self.ess_scope

    @property
    def support(self) -> Literal["behaviour", "proximal", "both"] | None:
        return "behaviour" if self.kl in kl.DISTRIBUTION_FORMS else None

    @property
    def support_form(self) -> Literal["exact", "top_k"] | None:
        return self.kl if self.kl in ("exact", "top_k") else None

    def statistics(self, policy: Policy, batch: Batch) -> Any:
        log_ratio = stats.log_ratio(policy.log_probs, batch.behaviour_log_probs, batch.mask)
        return stats.RatioMoments.of(log_ratio, batch.mask)

    @property
    def kl_tag(self) -> str:
        """The metric of the KL term, before its weight."""
        return "loss/behaviour_kl"

    def cap(self, ess: Float[Array, ""]) -> Float[Array, ""] | float:
        """The largest weight of a token's score."""
        return ess

    def kl_weight(self, ess: Float[Array, ""]) -> Float[Array, ""] | float:
        """The weight of the KL term."""
        return 1.0 - ess

    def policy_loss(self, policy: Policy, batch: Batch, statistics: Any) -> tuple[Float[Array, "B T"], Metrics]:
        ess = jax.lax.stop_gradient(statistics.ess()).astype(policy.log_probs.dtype)
        score, metrics = capped_score(policy, batch, self.cap(ess))
        divergence = self.divergence(policy, batch)
        return score + self.kl_weight(ess) * divergence, metrics | {
            "loss/score": self.term(score, batch),
            self.kl_tag: self.term(divergence, batch),
        }

    def divergence(self, policy: Policy, batch: Batch) -> Float[Array, "B T"]:
        """The KL of every token, before its weight."""
        if self.kl in kl.DISTRIBUTION_FORMS:
            anchor = required(required(batch.support, "support").behaviour_log_probs, "support.behaviour_log_probs")
            return support_kl(self.kl, policy, batch, anchor)
        return kl.sampled(self.kl, policy.log_probs - batch.behaviour_log_probs)


def capped_score(policy: Policy, batch: Batch, cap: Float[Array, ""] | float) -> tuple[Float[Array, "B T"], Metrics]:
    """-sg(min(rho, cap)) A log pi, and the share of tokens that were capped."""
    log_rho = jax.lax.stop_gradient(policy.log_probs - batch.behaviour_log_probs)
    rho = stats.bounded_exp(log_rho)
    cap_fraction = stats.token_mean((rho > cap).astype(rho.dtype), batch.mask)
    return -jnp.minimum(rho, cap) * batch.advantages * policy.log_probs, {"policy/cap_fraction": cap_fraction}


def support_kl(
    form: str, policy: Policy, batch: Batch, anchor_log_probs: Float[AnyArray, "B T K"]
) -> Float[Array, "B T"]:
    """KL(pi, anchor) over the batch's support, for the forms that need distributions."""
    indices = required(batch.support, "support").indices
    if (form == "exact") != (indices is None):
        have = "the whole vocabulary" if indices is None else "a few tokens"
        raise ValueError(f"kl={form!r} does not fit support.indices, which say that the support is {have}")
    return kl.distribution(form, required(policy.support_log_probs, "support_log_probs"), anchor_log_probs)
