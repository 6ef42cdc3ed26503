"""Which passes over a step's rows an objective needs: decided here, and read by whoever makes or counts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from p3o_jax.objectives import Objective


@dataclass(frozen=True)
class StepPlan:
    """The passes of a rollout step, for one objective and one way to cut its rows.

    Of every optimizer batch there is a forward and backward pass. Before it may come

    - a snapshot pass (`snapshot_pass`), without gradient: what another set of parameters says of the batch;
    - a first look (`first_look`) within the update, without gradient: the statistics of the whole batch where several
      micro-batches share one, and the snapshot of an epoch that has a single batch.
    """

    objective: Objective
    epochs: int = 1
    """Passes over the rows of a step."""
    minibatches: int = 1
    """Optimizer batches in an epoch."""
    micro_batches: int = 1
    """Parts in which each device's rows of a batch go through the model."""
    staleness: int = 0
    """Rollout steps between the parameters that sample and those that learn."""
    support_tokens: int = 64
    """k of a distribution, for an objective that asks for its top k."""

    @property
    def num_batches(self) -> int:
        """Optimizer batches in a step."""
        return self.epochs * self.minibatches

    @property
    def snapshot_pass(self) -> Literal["step", "epoch"] | None:
        """How often batches are given a snapshot by a pass of their own; None: never.

        Once a step: of the parameters that sampled. Once an epoch: of those it starts with; an epoch of one batch
        starts with the parameters of its own update, which takes the snapshot as it goes.
        """
        if self.objective.snapshot == "rollout":
            return "step"
        return "epoch" if self.objective.snapshot == "epoch" and self.minibatches > 1 else None

    @property
    def snapshot_in_update(self) -> bool:
        """Whether the update takes the snapshot itself, of the parameters it starts with."""
        return self.objective.snapshot == "epoch" and self.snapshot_pass is None

    @property
    def statistics_of_batch(self) -> bool:
        """Whether the objective's statistics are those of the whole optimizer batch."""
        return self.objective.statistics_scope == "batch"

    @property
    def first_look(self) -> bool:
        """Whether an update sees all micro-batches once, without gradient, before it learns from the first."""
        return self.micro_batches > 1 and (self.snapshot_in_update or self.statistics_of_batch)

    @property
    def keeps_params(self) -> bool:
        """Whether a snapshot is wanted of parameters that the learner no longer has."""
        return self.objective.snapshot == "rollout" and self.staleness > 0

    @property
    def sampler_support(self) -> int | Literal["exact"] | None:
        """What the engine keeps of the distributions that it samples from."""
        if self.objective.support not in ("behaviour", "both"):
            return None
        return "exact" if self.objective.support_form == "exact" else self.support_tokens

    @property
    def gradient_free_passes(self) -> int:
        """Forward passes over each row in a step besides those that have a gradient."""
        snapshots = {"step": 1, "epoch": self.epochs, None: 0}[self.snapshot_pass]
        return snapshots + self.epochs * self.first_look
