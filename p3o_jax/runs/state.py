"""All that a run is made of between two steps, and hence what a checkpoint holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from p3o_jax.experience.past import PolicyRing
    from p3o_jax.learner.learner import TrainState


class Loop(NamedTuple):
    """What the loop holds on the host, the same on every process."""

    prompt_position: int = 0
    """The cursor of the source: prompts of the stream that were taken, over all processes."""
    skipped_in_a_row: int = 0
    """Updates up to this step that were not finite."""
    rolled_back: int = 0
    """How often the run went back to a checkpoint."""


class RunState(NamedTuple):
    """A run between two steps."""

    step: int  # rollout steps made
    state: TrainState
    ring: PolicyRing
    loop: Loop
