"""The phases of a step: how long each takes, and its name in a profile."""

from __future__ import annotations

import time

import jax


class Stopwatch:
    """A step and its phases, one after another; `phase` is the one that runs now.

    In a profile the step and each phase are spans of the host's timeline, by these names. What a device still has to do
    when a phase ends falls into the phase that waits for it.
    """

    def __init__(self, step: int, phase: str):
        self.seconds: dict[str, float] = {}
        self._step = jax.profiler.StepTraceAnnotation("step", step_num=step)
        self._step.__enter__()
        self._start(phase)

    def begin(self, phase: str) -> None:
        """Ends the phase that runs and begins the next; one that comes again adds to its time."""
        self._stop()
        self._start(phase)

    def end(self) -> None:
        """Ends the last phase, and the step."""
        self._stop()
        self._step.__exit__(None, None, None)

    def _start(self, phase: str) -> None:
        self.phase = phase
        self._span = jax.profiler.TraceAnnotation(phase)
        self._span.__enter__()
        self._since = time.perf_counter()

    def _stop(self) -> None:
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + time.perf_counter() - self._since
        self._span.__exit__(None, None, None)
