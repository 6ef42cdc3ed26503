"""What keeps a run alive: checkpoints and going back to them, requests to end, the watchdog, the status for others."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax

from p3o_jax.devices.processes import agreed_any, fail_together
from p3o_jax.runs.checkpoint import Checkpoints
from p3o_jax.runs.directory import RunDirectory
from p3o_jax.runs.preemption import Preempted, Preemption
from p3o_jax.runs.state import Loop, RunState
from p3o_jax.runs.status import RunStatus
from p3o_jax.runs.stopwatch import Stopwatch
from p3o_jax.runs.watchdog import Watchdog

_logger = logging.getLogger(__name__)


class Lifecycle:
    """Of one run, while it is inside it. Every process must make each call."""

    def __init__(
        self,
        directory: RunDirectory,
        *,
        num_steps: int,
        save_every: int,
        keep_checkpoints: int,
        keep_every: int,
        roll_back: int,
        watchdog_seconds: float,
        watchdog_ends: bool,
        before_save: Callable[[], None],
    ):
        """
        Args:
            directory: where the run is kept.
            num_steps, save_every, keep_checkpoints, keep_every, roll_back, watchdog_seconds, watchdog_ends: as in
                `Config`.
            before_save: writes what must not be older than a checkpoint.
        """
        self._num_steps, self._save_every, self._max_roll_backs = num_steps, save_every, roll_back
        self._before_save, self._path = before_save, directory.path
        self._status = RunStatus(directory.path, num_steps, enabled=jax.process_index() == 0)
        self._preemption = Preemption()
        self._watchdog = Watchdog(watchdog_seconds, end=self._end if watchdog_ends else None)
        self.checkpoints = Checkpoints(directory.checkpoints, keep=keep_checkpoints, keep_every=keep_every)

    def pause_before_first_step(self) -> None:
        """Raises Preempted if any process was asked to end while the run's beginning is made."""
        if self._preemption.requested(0):
            raise Preempted(f"asked to end before the first step: {self._path} holds nothing but its configuration")

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
            self.checkpoints.check()

    def leave_if_asked(self, run: RunState, score: float = math.nan) -> None:
        """Raises Preempted, with a checkpoint made, if any process was asked to end.

        Args:
            run: as it was after its last step; nothing may have changed it since.
            score: of an evaluation in that step.
        """
        if not self._preemption.requested(run.step):
            return
        if self.checkpoints.newest != run.step:
            self._save(run, score)
        self.checkpoints.wait()
        raise Preempted(f"asked to end: {self._path} has a checkpoint of step {run.step}; --resume continues from it")

    def end_step(self, run: RunState, score: float = math.nan) -> None:
        """Ends a step: saves a checkpoint if one is due, the last one if the run was asked to end.

        None is made between updates that were skipped, so that one to go back to remains; and none while another is
        being written, so that no step waits for the disk.
        """
        self._status.update(run.step)
        if run.step == self._num_steps:
            self._save(run, score)
            return
        self.leave_if_asked(run, score)
        if run.step % self._save_every == 0 and not run.loop.skipped_in_a_row:
            if agreed_any(self.checkpoints.busy):
                _logger.warning(
                    "no checkpoint of step %d: that of step %d is still being written; a larger save_every spares this",
                    run.step, self.checkpoints.newest,
                )  # fmt: skip
            else:
                self._save(run, score)

    def may_roll_back(self, loop: Loop, error: FloatingPointError) -> Loop:
        """Returns what the loop holds when it goes back because of an error.

        Raises:
            FloatingPointError: the error, if the run has gone back too often.
        """
        if loop.rolled_back >= self._max_roll_backs:
            raise error
        if jax.process_index() == 0:
            _logger.warning("going back to the last good checkpoint: %s", error)
        return loop._replace(rolled_back=loop.rolled_back + 1, skipped_in_a_row=0)

    def _save(self, run: RunState, score: float) -> None:
        self._before_save()
        # The newest is what the state gives.
        past = {version: policy.stored() for version, policy in run.ring.past.items() if version != run.step}
        self.checkpoints.save(run.step, run.state, past, run.loop._asdict(), score)

    def _end(self, reason: str) -> None:
        """From the watchdog's thread: the main one cannot be asked."""
        self._status.failed(reason)
        os._exit(1)

    def __enter__(self) -> Lifecycle:
        with ExitStack() as stack:
            for part in (self._status, self._preemption, self._watchdog, self.checkpoints):
                stack.enter_context(part)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
