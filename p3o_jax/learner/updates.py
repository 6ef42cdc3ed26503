"""The updates of a rollout step: its batch in optimizer batches, an update each, epoch after epoch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from p3o_jax.batch import metrics as metrics_lib
from p3o_jax.batch.breakdowns import logged
from p3o_jax.batch.types import Batch
from p3o_jax.config import Config
from p3o_jax.devices import sharding
from p3o_jax.devices.processes import row_part
from p3o_jax.experience.batches import minibatches
from p3o_jax.experience.packing import pack
from p3o_jax.learner.learner import TOKEN_LOG_PROBS, Learner, TrainState
from p3o_jax.learner.nonfinite import Dump, nonfinite_rows, write_dump
from p3o_jax.models import lora

_logger = logging.getLogger(__name__)


class Updated(NamedTuple):
    """What a step's updates come to."""

    state: TrainState
    metrics: dict[str, Any]  # as they are logged
    log_probs: list[jax.Array]  # what the updates of the first epoch saw, for `Updates.token_log_probs`


class Updates:
    """The updates of each step of a run. Every process must make each call."""

    def __init__(self, config: Config, learner: Learner):
        self._config, self._learner, self._mesh = config, learner, learner.mesh

    def __call__(
        self, state: TrainState, batch: Batch, group: np.ndarray, sampled_by: dict[str, Any], dump_to: Path
    ) -> Updated:
        """One optimizer update a minibatch, epoch after epoch; nothing waits for the device in between.

        Args:
            state: the learner's.
            batch: this process's rows of the step.
            group: the prompt of each row.
            sampled_by: what is remembered of the policy that sampled.
            dump_to: where the batch goes if an update is skipped (`nonfinite.write_dump`).

        Raises:
            FloatingPointError: too many updates in a row were not finite.
        """
        config, snapshot, of_updates = self._config, self._learner.snapshot, []
        parts = self.minibatches(batch)
        if config.objective.snapshot == "rollout":
            trained, kept = lora.split(state.params)
            params = lora.join(sampled_by.get("learner", trained), kept)
            parts = [snapshot(params, part) for part in parts]
        log_probs: list[jax.Array] = []
        for epoch in range(config.epochs):
            of_epoch = parts
            if config.objective.snapshot == "epoch" and len(parts) > 1:  # the learner takes that of a single one itself
                of_epoch = [snapshot(state.params, part) for part in parts]
            for part in of_epoch:
                state, metrics = self._learner.update(state, part)
                of_tokens = metrics.pop(TOKEN_LOG_PROBS, None)
                of_updates.append(metrics)
                if epoch == 0 and of_tokens is not None:
                    log_probs.append(of_tokens)
        # Without staleness the first update's policy is the one that sampled: what it sees is the precision gap.
        metrics = _merge(of_updates, first_is_gap=config.staleness == 0)
        metrics, in_a_row = jax.device_get((metrics, state.num_skipped_in_a_row))
        metrics["optim/skipped_updates_in_a_row"] = in_a_row
        if metrics["optim/skipped_updates"]:
            found, seen = nonfinite_rows(
                lambda part: self._learner.log_probs(state.params, part)[0],
                batch,
                group,
                config.minibatches,
                self._mesh,
            )
            message = f"{metrics['policy/nonfinite_log_ratio']:.0f} log-ratios in the last step; {found}"
            if write_dump(dump_to, Dump(batch, group, seen), self._mesh):
                message += f"; the batch is in {dump_to}"
            if in_a_row >= config.max_skipped_updates:
                raise FloatingPointError(
                    f"{in_a_row} updates in a row had a loss, gradient or log-ratio that is not finite ({message}); "
                    "the parameters are those before them"
                )
            if jax.process_index() == 0:
                _logger.warning("%d updates skipped: %s", metrics["optim/skipped_updates"], message)
        return Updated(state, logged(metrics), log_probs)

    def token_log_probs(self, batch: Batch, log_probs: Sequence[jax.Array]) -> np.ndarray:
        """What the updates of the first epoch saw, back in the rows [B, T] of this process's batch; NaN where masked.

        Every process must call it.
        """
        rows = np.broadcast_to(np.arange(len(batch.mask), dtype=np.int32)[:, None], batch.mask.shape)
        found = np.full(batch.mask.shape, np.nan, np.float32)
        # The same cut and packing of a batch whose source says which row a token comes from.
        for part, seen in zip(self._minibatches(batch._replace(source=rows)), log_probs, strict=True):
            found[part.source[part.mask], part.inputs.positions[part.mask]] = sharding.to_local(seen)[part.mask]
        return found

    def minibatches(self, batch: Batch) -> list[Batch]:
        """A step's optimizer batches, packed, on the devices."""
        return [sharding.to_global(part, self._mesh) for part in self._minibatches(batch)]

    def _minibatches(self, batch: Batch) -> list[Batch]:
        config = self._config
        parts = list(minibatches(batch, config.minibatches, 1, config.samples_per_prompt))
        if config.pack and config.objective.statistics_scope != "micro_batch":
            shards = sharding.num_batch_shards(self._mesh) // row_part(self._mesh)[1]
            parts = pack(parts, shards * config.micro_batches)
        return parts


@partial(jax.jit, static_argnames="first_is_gap")
def _merge(of_updates: list[dict[str, Any]], *, first_is_gap: bool) -> dict[str, Any]:
    """The values of a step: its updates' metrics, merged by type; the precision gap perhaps of the first alone."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_updates)
    values = metrics_lib.values(metrics_lib.fold(stacked))
    if first_is_gap:
        values.setdefault("policy/precision_gap_kl", of_updates[0]["policy/behaviour_kl_reverse"].value())
    return values
