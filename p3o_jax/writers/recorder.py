"""What is written of a run as it goes: metrics, rollouts, the line of progress."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from p3o_jax.batch.types import Batch
from p3o_jax.config import hyperparameters
from p3o_jax.devices.processes import all_rows, fail_together
from p3o_jax.experience.batches import readable
from p3o_jax.experience.filtering import Gathered
from p3o_jax.runs.directory import RunDirectory
from p3o_jax.trainer import Trainer
from p3o_jax.writers import Progress, Writer


class Recorder:
    """Of one run, while it is inside it. Every process must make each call; only the first writes."""

    def __init__(self, trainer: Trainer, directory: RunDirectory):
        self._trainer, self._config = trainer, trainer.config
        self._writer = Writer(directory.path, enabled=trainer.is_main)
        self._progress = Progress(trainer.config.num_steps, enabled=trainer.is_main)
        self.last: dict[str, float] = {}
        """The last value of every metric."""
        self.flush = self._writer.flush
        """Brings everything to the disk."""

    def start_at(self, step: int) -> None:
        """Begins, or goes back: what was written of this step and those after it is forgotten."""
        with fail_together():
            self._writer.resume_at(step)
            self._writer.describe(hyperparameters(self._config))

    def metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the metrics of a step."""
        with fail_together():
            self.last |= self._writer.write(step, metrics)

    def step(
        self,
        step: int,
        metrics: Mapping[str, Any],
        gathered: Gathered,
        batch: Batch,
        advantages: np.ndarray,
        log_probs: list[jax.Array],
    ) -> None:
        """Writes a step: its metrics, and its rollouts if that is due.

        Args:
            log_probs: what the updates saw (`updates.Updated`).
        """
        self.metrics(step, metrics)
        if self._config.is_due(step, self._config.write_rollouts_every):
            rewards = np.where(gathered.scores.known, gathered.scores.rewards, np.nan)
            seen = self._trainer.updates.token_log_probs(batch, log_probs)
            rows = (gathered.rollout._replace(support=None), rewards, advantages, seen)
            rows = all_rows(rows, self._trainer.mesh)
            with fail_together():
                self._writer.rollouts(step, readable(gathered.prompts, *rows, tokenizer=self._trainer.tokenizer))
        self._progress.update(step, self.last)

    def __enter__(self) -> Recorder:
        with ExitStack() as stack:
            stack.enter_context(self._writer)
            stack.enter_context(self._progress)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
