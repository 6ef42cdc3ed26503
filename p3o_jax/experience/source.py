"""Where the rows of a step come from: a source samples and scores them, or takes them from elsewhere.

`FreshRollouts` asks the engine; `filtering.FilteredGroups` is a layer over any source. Another source, such as a store
of earlier rollouts, implements `ExperienceSource`; the step that uses it does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Key

from p3o_jax.batch.types import Rollout
from p3o_jax.devices import sharding
from p3o_jax.devices.processes import fail_together, row_part
from p3o_jax.experience.batches import local_prompts, rollout_metrics
from p3o_jax.experience.prompts import EncodedPrompt
from p3o_jax.experience.scoring import Scorer, Scores, agreed, score_metrics
from p3o_jax.sampler import Engine, Requests, Sampling
from p3o_jax.tasks.base import Prompt, Task


class Sampled(NamedTuple):
    """Rows of this process and what they are worth."""

    rollout: Rollout
    scores: Scores


class Experience(NamedTuple):
    """The rows of this process out of which the batch of a step is made."""

    prompts: list[Prompt]
    """All that were asked, of all processes."""
    rollout: Rollout
    scores: Scores
    kept: Bool[np.ndarray, " B"]
    """Rows that count in the loss."""
    cursor: int
    """Where the source goes on after these: prompts of the stream that were taken, over all processes."""
    sampled: Sampled
    """All that was sampled for these rows, those left out included."""
    metrics: dict[str, float]
    """What was left out, over all processes."""


@runtime_checkable
class Clock(Protocol):
    """Is told which phase of a step runs."""

    phase: str

    def begin(self, phase: str) -> None:
        """Ends the phase that runs and begins the next."""


@runtime_checkable
class ExperienceSource(Protocol):
    """Gives each step its rows. Every process must make each call."""

    def next(self, step: int, weights: Any, clock: Clock, pause: Callable[[], None]) -> Experience:
        """Returns the rows of a step.

        Args:
            step: the step, from 1.
            weights: what the engine draws from, if it is asked.
            clock: in its phase `sample`; left in `score`.
            pause: called after rollouts, and may raise, on all processes alike.
        """


class FreshRollouts:
    """Asks the engine for a group of responses to each of the next prompts, and scores them."""

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        prompts: Iterator[list[EncodedPrompt]],
        *,
        key: Callable[[int], Key[Array, ""]],
        num_samples: int,
        sampling: Sampling,
        support: Any,
    ):
        """
        Args:
            prompts: batches of the stream, of all processes, from the cursor on.
            key: of a step.
            num_samples: responses to each prompt.
            sampling: how they are drawn.
            support: what is kept of every distribution sampled from, as in `Requests`.
        """
        self._engine, self._scorer, self._prompts = engine, scorer, prompts
        self._key, self._num_samples, self._sampling, self._support = key, num_samples, sampling, support

    def next(self, step: int, weights: Any, clock: Clock, pause: Callable[[], None]) -> Experience:
        """Samples and scores one batch of prompts."""
        if clock.phase != "sample":
            clock.begin("sample")
        asked, mesh = next(self._prompts), self._engine.mesh
        part, num_parts = row_part(mesh)
        mine = local_prompts(asked, num_parts, part)
        requests = Requests(
            [ids for _, ids in mine],
            [prompt.index for prompt, _ in mine],
            self._key(step),
            self._num_samples,
            self._sampling,
            support=self._support,
        )
        task = np.repeat([prompt.task for prompt, _ in mine], self._num_samples).astype(np.int32)
        rollout = sharding.to_local(self._engine.generate(weights, requests))._replace(task=task)
        pause()
        clock.begin("score")
        with fail_together():
            scores = self._scorer([prompt for prompt, _ in mine], rollout)
        scores = agreed(scores, mesh)
        prompts = [prompt for prompt, _ in asked]
        return Experience(
            prompts, rollout, scores, scores.known, prompts[-1].index + 1, Sampled(rollout, scores), metrics={}
        )


def experience_metrics(experience: Experience, task: Task, mesh: Mesh, *, step: int, since: int) -> dict[str, Any]:
    """Computes what is logged of all that was sampled for a step.

    Args:
        experience: the step's.
        task: asks.
        mesh: the learner's.
        step: the step.
        since: the cursor before it.

    Raises:
        ValueError: no row of any process has a reward.
    """
    rollout, scores = experience.sampled
    metrics: dict[str, Any] = dict(score_metrics(scores, rollout.group, rollout.task, task, mesh))
    if math.isnan(metrics["reward/mean"]):
        raise ValueError(
            f"the verifier failed on every response of a step: {metrics['reward/verifier_errors']:.0f} errors, "
            f"{metrics['reward/verifier_timeouts']:.0f} time-outs; here first: {scores.failures[0]}"
        )
    too_long = experience.cursor - since - len(experience.prompts)
    metrics |= experience.metrics | {"rollout/prompts_too_long": too_long}
    return metrics | rollout_metrics(rollout, step - 1, task.max_response_tokens)


def joined(parts: list[Sampled]) -> Sampled:
    """Concatenates rows."""
    rollouts, scores = zip(*parts, strict=True)
    return Sampled(jax.tree.map(lambda *leaves: np.concatenate(leaves), *rollouts), Scores.joined(scores))
