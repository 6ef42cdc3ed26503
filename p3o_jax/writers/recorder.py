"""What is written of a run as it goes: metrics, rollouts, the line of progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from p3o_jax.devices.processes import fail_together
from p3o_jax.writers.progress import Progress
from p3o_jax.writers.writer import Writer


class Recorder:
    """Records one run, while it is inside `with`. Every process must make each call; only the first writes."""

    def __init__(self, run_dir: Path, num_steps: int, hyperparameters: Mapping[str, bool | int | float | str]):
        """
        Args:
            run_dir: where it is written.
            num_steps: of the whole run, for the line of progress.
            hyperparameters: what TensorBoard compares runs by.
        """
        is_main = jax.process_index() == 0
        self._writer, self._progress = Writer(run_dir, enabled=is_main), Progress(num_steps, enabled=is_main)
        self._hyperparameters = hyperparameters
        self.last: dict[str, float] = {}
        """The last value of every metric."""
        self.flush = self._writer.flush
        """Brings everything to the disk."""

    def start_at(self, step: int) -> None:
        """Begins, or goes back: what was written of this step and those after it is forgotten."""
        with fail_together():
            self._writer.resume_at(step)
            self._writer.describe(self._hyperparameters)

    def metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the metrics of a step."""
        with fail_together():
            self.last |= self._writer.write(step, metrics)

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes the rollouts of a step, as `batches.readable` makes them of all processes' rows."""
        with fail_together():
            self._writer.rollouts(step, rows)

    def progress(self, step: int) -> None:
        """Shows how far the run is."""
        self._progress.update(step, self.last)

    def __enter__(self) -> Recorder:
        with ExitStack() as stack:
            stack.enter_context(self._writer)
            stack.enter_context(self._progress)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
