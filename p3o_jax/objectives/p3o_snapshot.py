"""P3O with its trust region around the learner's own snapshot instead of the behaviour policy.

    e = ESS(pi / mu)       s = the learner's policy at the parameters that sampled
    L = mean_t[ -sg(min(rho_t, e)) A_t log pi(y_t) + w(e) KL_t(pi || s) ]

mu is a noisy copy of s (another precision, another kernel), and pi has to leave it all the
time: e measures staleness and that noise together, but only the first should be an anchor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from p3o_jax.batch.types import Batch, Policy, required
from p3o_jax.objectives import kl
from p3o_jax.objectives.base import check_choice
from p3o_jax.objectives.p3o import P3O, support_kl


@dataclass(frozen=True, kw_only=True)
class P3OSnapshot(P3O):
    """L = E[ -sg(min(rho, e)) A log pi + w(e) KL(pi || snapshot) ]

    An extension of P3O (arXiv:2605.12380), also without a number to tune. Its controls are
    subclasses that override `kl_weight` (a constant) or `cap` (1).
    """

    kl: Literal["exact", "top_k", "k3", "reference", "importance", "reverse"] = "exact"
    """What stands for KL(pi || snapshot), as in P3O: exact or top_k from the snapshot's distributions, or a
    form of the sampled token, of which `importance` and `reverse` are unbiased under samples of mu."""

    weight: Literal["coefficient_of_variation", "one_minus_ess"] = "coefficient_of_variation"
    """w(e): sqrt(1/e - 1), the coefficient of variation of the ratios, or 1 - e, the paper's."""

    def __post_init__(self):
        super().__post_init__()
        check_choice(self, "weight", ("coefficient_of_variation", "one_minus_ess"))

    @property
    def snapshot(self) -> Literal["rollout"]:
        return "rollout"

    @property
    def support(self) -> Literal["proximal"] | None:
        return "proximal" if self.kl in kl.DISTRIBUTION_FORMS else None

    @property
    def kl_tag(self) -> str:
        return "loss/snapshot_kl"

    def kl_weight(self, ess: Float[Array, ""]) -> Float[Array, ""] | float:
        return 1.0 - ess if self.weight == "one_minus_ess" else jnp.sqrt(1.0 / ess - 1.0)

    def divergence(self, policy: Policy, batch: Batch) -> Float[Array, "B T"]:
        if self.kl in kl.DISTRIBUTION_FORMS:
            anchor = required(required(batch.support, "support").proximal_log_probs, "support.proximal_log_probs")
            return support_kl(self.kl, policy, batch, anchor)
        drift = policy.log_probs - required(batch.proximal_log_probs, "proximal_log_probs")
        return kl.sampled(self.kl, drift, policy.log_probs - batch.behaviour_log_probs)
