"""What keeps a run alive: checkpoints and going back to them, requests to end, the watchdog, the status for others."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from p3o_jax.devices.processes import agreed_any, fail_together
from p3o_jax.runs.checkpoint import Checkpoints
from p3o_jax.runs.directory import RunDirectory
from p3o_jax.runs.preemption import Preempted, Preemption
from p3o_jax.runs.status import RunStatus
from p3o_jax.runs.stopwatch import Stopwatch
from p3o_jax.runs.watchdog import Watchdog
from p3o_jax.trainer import RunState, Trainer

_logger = logging.getLogger(__name__)


class Lifecycle:
    """Of one run, while it is inside it. Every process must make each call."""

    def __init__(self, trainer: Trainer, directory: RunDirectory, *, before_save: Callable[[], None]):
        """
        Args:
            trainer: the run's parts.
            directory: where it is kept.
            before_save: writes what must not be older than a checkpoint.
        """
        config = trainer.config
        self._trainer, self._config, self._before_save = trainer, config, before_save
        self._path = directory.path
        self._status = RunStatus(directory.path, config.num_steps, enabled=trainer.is_main)
        self._preemption = Preemption()
        self._watchdog = Watchdog(config.watchdog_seconds, end=self._end if config.watchdog_ends else None)
        self._checkpoints = Checkpoints(
            directory.checkpoints, keep=config.keep_checkpoints, keep_every=config.keep_every
        )

    def start(self) -> RunState:
        """The run's beginning.

        Raises:
            Preempted: it was asked to end meanwhile.
        """

        def pause() -> None:
            if self._preemption.requested(0):
                raise Preempted(f"asked to end before the first step: {self._path} holds nothing but its configuration")

        return self._trainer.start(pause)

    def restore(self) -> RunState | None:
        """What the newest checkpoint that is whole holds; None if there never was one.

        Raises:
            CheckpointError: there are checkpoints, but none that is whole.
        """
        return self._trainer.restore(self._checkpoints)

    def begin(self, step: int) -> Stopwatch:
        """A step begins; the stopwatch is in its phase `sample`."""
        clock = Stopwatch(step, "sample")
        self._watchdog.watch(step, clock)
        return clock

    def between(self, run: RunState) -> None:
        """In the middle of a step, of whose rollouts `run` knows nothing yet.

        Raises:
            Preempted: any process was asked to end; there is a checkpoint of `run`.
            CheckpointError: what was being saved could not be.
        """
        self.leave_if_asked(run)
        with fail_together():
            self._checkpoints.check()

    def leave_if_asked(self, run: RunState, score: float = math.nan) -> None:
        """Raises Preempted, with a checkpoint made, if any process was asked to end.

        Args:
            run: as it was after its last step; nothing may have changed it since.
            score: of an evaluation in that step.
        """
        if not self._preemption.requested(run.step):
            return
        if self._checkpoints.newest != run.step:
            self._save(run, score)
        self._checkpoints.wait()
        raise Preempted(f"asked to end: {self._path} has a checkpoint of step {run.step}; --resume continues from it")

    def end_step(self, run: RunState, metrics: Mapping[str, Any]) -> None:
        """A step is done: a checkpoint if one is due, the last one if the run was asked to end.

        None is made between updates that were skipped, so that one to go back to remains; and none while another is
        being written, so that no step waits for the disk.
        """
        self._status.update(run.step)
        score = np.mean([value for tag, value in metrics.items() if tag.endswith("/pass@1")] or [math.nan])
        if run.step == self._config.num_steps:
            self._save(run, score)
            return
        self.leave_if_asked(run, score)
        if self._config.is_due(run.step, self._config.save_every) and not run.loop["skipped_in_a_row"]:
            if agreed_any(self._checkpoints.busy):
                _logger.warning(
                    "no checkpoint of step %d: that of step %d is still being written; a larger save_every spares this",
                    run.step, self._checkpoints.newest,
                )  # fmt: skip
            else:
                self._save(run, score)

    def may_roll_back(self, loop: dict[str, Any], error: FloatingPointError) -> dict[str, Any]:
        """What the loop holds when it goes back because of an error. Raises the error if it has gone back too often."""
        if loop["rolled_back"] >= self._config.roll_back:
            raise error
        if self._trainer.is_main:
            _logger.warning("going back to the last good checkpoint: %s", error)
        return loop | {"rolled_back": loop["rolled_back"] + 1, "skipped_in_a_row": 0}

    def roll_back(self, loop: dict[str, Any]) -> RunState:
        """The last good checkpoint, with what the loop holds now: the prompts go on where they are.

        Raises:
            FloatingPointError: there is none.
        """
        run = self._trainer.restore(self._checkpoints, within_streak=False)
        if run is None:
            raise FloatingPointError("updates in a row were not finite, and there is no checkpoint to go back to")
        return run._replace(loop=loop)

    def _save(self, run: RunState, score: float) -> None:
        self._before_save()
        # The newest is what the state gives.
        past = {version: policy for version, policy in run.ring.past.items() if version != run.step}
        self._checkpoints.save(run.step, run.state, past, run.loop, float(score))

    def _end(self, reason: str) -> None:
        """From the watchdog's thread: the main one cannot be asked."""
        self._status.failed(reason)
        os._exit(1)

    def __enter__(self) -> Lifecycle:
        with ExitStack() as stack:
            for part in (self._status, self._preemption, self._watchdog, self._checkpoints):
                stack.enter_context(part)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
