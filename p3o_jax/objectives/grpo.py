"""The clipped surrogate of PPO and its group-relative descendants.

    r = pi / pi_old        J_t = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)        L = -mean J_t

`pi_old` is the behaviour policy mu, or a recomputed snapshot (`ratio_to="proximal"`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from p3o_jax.batch import stats
from p3o_jax.batch.types import AnyArray, Batch, Policy
from p3o_jax.objectives.aggregation import Aggregation, ConstantNormaliser
from p3o_jax.objectives.base import Metrics, check_field
from p3o_jax.objectives.ratio import RatioObjective


@dataclass(frozen=True, kw_only=True)
class Ppo(RatioObjective):
    """L = E[ -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) ]     (arXiv:1707.06347, Eq. 7)"""

    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low where A < 0."""

    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high where A > 0."""

    dual_clip: float | None = None
    """Where A < 0, the ratio is also clipped above this number, which is over 1 (arXiv:1912.09729). None: it is not."""

    def __post_init__(self):
        super().__post_init__()
        check_field(self, "clip_low", at_least=0.0)
        check_field(self, "clip_high", at_least=0.0)
        if self.dual_clip is not None:
            check_field(self, "dual_clip", above=1.0)

    def policy_loss(self, policy: Policy, batch: Batch, statistics: Any) -> tuple[Float[Array, "B T"], Metrics]:
        log_ratio = self.log_ratio(policy, batch)
        surrogate = clipped_surrogate(log_ratio, batch.advantages, self.clip_low, self.clip_high, self.dual_clip)
        return -surrogate, clip_metrics(log_ratio, batch, self.clip_low, self.clip_high)


@dataclass(frozen=True, kw_only=True)
class Grpo(Ppo):
    """PPO's clipped surrogate on group-relative advantages     (arXiv:2402.03300, Eq. 3)

    With `clip_high` over `clip_low` and the token mean it is DAPO (arXiv:2503.14476, Eq. 8:
    0.2 and 0.28). The GRPO paper takes `SequenceMean()`; the default is the token mean,
    as for all objectives here. Advantages: `p3o_jax.batch.advantages.GroupZScore`.
    """


@dataclass(frozen=True, kw_only=True)
class DrGrpo(Grpo):
    """GRPO without its two biases     (arXiv:2503.20783, Section 3)

    Token sums over a constant, instead of over each response's own length; and advantages
    r - mean, without the group's standard deviation: `p3o_jax.batch.advantages.MeanOnly`, which
    has to be chosen beside it.
    """

    aggregation: Aggregation
    """How token losses become one number: `ConstantNormaliser(tokens=longest response)`."""

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.aggregation, ConstantNormaliser):
            raise ValueError(f"DrGrpo.aggregation={self.aggregation!r}: give ConstantNormaliser(tokens=...)")


def clipped_surrogate(
    log_ratio: Float[Array, "B T"],
    advantages: Float[AnyArray, "B T"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Float[Array, "B T"]:
    """min(r A, clip(r) A), and at least dual_clip A where A < 0.

    Where the clip decides, the gradient is exactly 0, also at a ratio that overflows; on the
    bound itself it is that of r A, as on the inside.
    """
    ratio = stats.bounded_exp(log_ratio)
    limit = jnp.where(advantages > 0, 1.0 + clip_high, 1.0 - clip_low)
    clipped = jnp.where(advantages > 0, ratio > limit, ratio < limit)
    if dual_clip is not None:
        beyond = (advantages < 0) & (ratio > dual_clip)
        limit = jnp.where(beyond, dual_clip, limit)
        clipped |= beyond
    clipped = jax.lax.stop_gradient(clipped)
    return jnp.where(clipped, limit, ratio) * advantages


def clip_metrics(log_ratio: Float[Array, "B T"], batch: Batch, clip_low: float, clip_high: float) -> Metrics:
    """The share of tokens with a ratio outside the clip range, whatever their advantage."""
    return {"policy/clip_fraction": stats.outside_fraction(log_ratio, batch.mask, clip_low, clip_high)}
