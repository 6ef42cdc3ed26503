"""Policy gradient without ratios: REINFORCE and RLOO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from p3o_jax.batch.types import Batch, Policy
from p3o_jax.objectives.aggregation import Aggregation, ConstantNormaliser
from p3o_jax.objectives.base import Metrics, Objective


@dataclass(frozen=True, kw_only=True)
class Reinforce(Objective):
    """L = E[ -A log pi ]     (Williams, 1992)

    No correction for off-policy data; with P3O's ESS at 1 this is what P3O is.
    """

    def policy_loss(self, policy: Policy, batch: Batch, statistics: Any) -> tuple[Float[Array, "B T"], Metrics]:
        return -jnp.asarray(batch.advantages) * policy.log_probs, {}


@dataclass(frozen=True, kw_only=True)
class Rloo(Reinforce):
    """L = mean_i[ -A_i sum_t log pi(y_it) ],  A_i = r_i - mean of the others' r     (arXiv:2402.14740)

    A whole response is one action, hence the sum over its tokens. The leave-one-out
    baseline is `p3o_jax.batch.advantages.LeaveOneOut`, which has to be chosen beside it.
    """

    aggregation: Aggregation = ConstantNormaliser(tokens=1)
    """How token losses become one number: by default the mean over sequences of token sums."""
