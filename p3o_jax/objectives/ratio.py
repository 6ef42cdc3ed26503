"""What the objectives that weigh tokens by a ratio pi / pi_old have in common: which pi_old."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Array, Float

from p3o_jax.batch.types import AnyArray, Batch, Policy, required
from p3o_jax.objectives.base import Objective, check_choice


@dataclass(frozen=True, kw_only=True)
class RatioObjective(Objective):
    """An objective of r = pi / pi_old, with pi_old the behaviour policy or a recomputed snapshot."""

    ratio_to: Literal["behaviour", "proximal"] = "behaviour"
    """The denominator of the ratio. behaviour: the policy that sampled, as it sampled. proximal: the
    learner's own policy at the start of the epoch, recomputed; blind to what differs in the sampler."""

    def __post_init__(self):
        super().__post_init__()
        check_choice(self, "ratio_to", ("behaviour", "proximal"))

    @property
    def snapshot(self) -> Literal["epoch"] | None:
        return "epoch" if self.ratio_to == "proximal" else None

    def log_ratio(self, policy: Policy, batch: Batch) -> Float[Array, "B T"]:
        """log pi - log pi_old of every token."""
        return policy.log_probs - self.old_log_probs(batch)

    def old_log_probs(self, batch: Batch) -> Float[AnyArray, "B T"]:
        """log pi_old of every token."""
        if self.ratio_to == "behaviour":
            return batch.behaviour_log_probs
        return required(batch.proximal_log_probs, "proximal_log_probs")
