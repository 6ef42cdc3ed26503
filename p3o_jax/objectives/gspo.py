"""GSPO: one ratio a sequence, the geometric mean of its tokens' ratios (arXiv:2507.18071).

s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|) = exp(mean_t log_ratio_it)
L   = mean_i[ -min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i) ]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from p3o_jax.batch import stats
from p3o_jax.batch.types import Batch, Policy
from p3o_jax.objectives.aggregation import Aggregation, SequenceMean
from p3o_jax.objectives.base import Metrics, check_field
from p3o_jax.objectives.grpo import clip_metrics, clipped_surrogate
from p3o_jax.objectives.ratio import RatioObjective


@dataclass(frozen=True, kw_only=True)
class Gspo(RatioObjective):
    """L = E_i[ -min(s_i A_i, clip(s_i) A_i) ],  s_i = exp(mean_t log_ratio)     (arXiv:2507.18071, Eq. 5)"""

    clip_low: float = 3e-4
    """The sequence ratio is clipped below 1 - clip_low where A < 0."""

    clip_high: float = 4e-4
    """The sequence ratio is clipped above 1 + clip_high where A > 0."""

    aggregation: Aggregation = SequenceMean()
    """How token losses become one number: by default every sequence weighs the same."""

    def __post_init__(self):
        super().__post_init__()
        check_field(self, "clip_low", at_least=0.0)
        check_field(self, "clip_high", at_least=0.0)

    def policy_loss(self, policy: Policy, batch: Batch, statistics: Any) -> tuple[Float[Array, "B T"], Metrics]:
        log_ratio = self.sequence_log_ratio(self.log_ratio(policy, batch), batch)
        surrogate = clipped_surrogate(log_ratio, batch.advantages, self.clip_low, self.clip_high)
        return -surrogate, clip_metrics(log_ratio, batch, self.clip_low, self.clip_high)

    def sequence_log_ratio(self, log_ratio: Float[Array, "B T"], batch: Batch) -> Float[Array, "B T"]:
        """log s_i at every token of sequence i."""
        lengths = stats.sequence_lengths(batch.mask, batch.segment_ids, log_ratio.dtype)
        return stats.sequence_sum(log_ratio, batch.mask, batch.segment_ids) / jnp.maximum(lengths, 1.0)


@dataclass(frozen=True, kw_only=True)
class GspoToken(Gspo):
    """GSPO with s_it = sg(s_i) pi_it / sg(pi_it), for advantages that differ by token     (arXiv:2507.18071)

    Same value as GSPO; token t's gradient is weighed by its own A_t. With one advantage a
    sequence it is GSPO.
    """

    def sequence_log_ratio(self, log_ratio: Float[Array, "B T"], batch: Batch) -> Float[Array, "B T"]:
        sequence = jax.lax.stop_gradient(super().sequence_log_ratio(log_ratio, batch))
        return sequence + (log_ratio - jax.lax.stop_gradient(log_ratio))
