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
from jaxtyping import Array, Float, Int

from p3o_jax.batch import metrics as metrics_lib
from p3o_jax.batch.breakdowns import logged
from p3o_jax.batch.types import AnyArray, Batch, required
from p3o_jax.devices import sharding
from p3o_jax.devices.processes import row_part
from p3o_jax.experience.batches import minibatches
from p3o_jax.experience.packing import pack
from p3o_jax.experience.past import PastPolicy
from p3o_jax.learner.learner import Learner, TrainState
from p3o_jax.learner.nonfinite import Dump, nonfinite_rows, write_dump
from p3o_jax.models import lora

_logger = logging.getLogger(__name__)


class Updated(NamedTuple):
    """What a step's updates come to."""

    state: TrainState
    metrics: dict[str, Any]  # as they are logged
    skipped_in_a_row: int  # updates up to now that were not finite
    log_probs: list[Float[Array, "b t"]]  # what the updates of the first epoch saw, for `Updates.token_log_probs`


class Updates:
    """Makes the updates of each step of a run. Every process must make each call."""

    def __init__(self, learner: Learner, *, group_size: int, packed: bool, max_skipped: int):
        """
        Args:
            learner: makes an update; its plan says how a step is cut.
            group_size: rows of each prompt.
            packed: let short sequences share rows, unless statistics are those of a micro-batch, which it would change.
            max_skipped: this many updates in a row that are not finite end the run.
        """
        self._learner, self._mesh, self._plan = learner, learner.mesh, learner.plan
        self._group_size, self._max_skipped = group_size, max_skipped
        self._packed = packed and learner.objective.statistics_scope != "micro_batch"

    def __call__(
        self, state: TrainState, batch: Batch, group: Int[AnyArray, " B"], sampled_by: PastPolicy, dump_to: Path
    ) -> Updated:
        """Makes one optimizer update a minibatch, epoch after epoch; nothing waits for the device in between.

        Args:
            state: the learner's.
            batch: this process's rows of the step.
            group: the prompt of each row.
            sampled_by: the policy that sampled.
            dump_to: where the batch goes if an update is skipped (`nonfinite.write_dump`).

        Raises:
            FloatingPointError: too many updates in a row were not finite.
        """
        plan, snapshot, of_updates = self._plan, self._learner.snapshot, []
        parts = self.minibatches(batch)
        if plan.snapshot_pass == "step":
            trained, kept = lora.split(state.params)
            params = lora.join(trained if sampled_by.params is None else sampled_by.params, kept)
            parts = [snapshot(params, part) for part in parts]
        log_probs: list[Float[Array, "b t"]] = []
        for epoch in range(plan.epochs):
            of_epoch = parts
            if plan.snapshot_pass == "epoch":
                of_epoch = [snapshot(state.params, part) for part in parts]
            for part in of_epoch:
                state, update = self._learner.update(state, part)
                of_updates.append(update.metrics)
                if epoch == 0 and update.log_probs is not None:
                    log_probs.append(update.log_probs)
        # Without staleness the first update's policy is the one that sampled: what it sees is the precision gap.
        metrics = _merge(of_updates, first_is_gap=plan.staleness == 0)
        metrics, in_a_row = jax.device_get((metrics, state.num_skipped_in_a_row))
        metrics["optim/skipped_updates_in_a_row"] = in_a_row
        if metrics["optim/empty_updates"] and jax.process_index() == 0:
            _logger.warning(
                "%d of %d updates had no row to learn from and were left out",
                metrics["optim/empty_updates"],
                len(of_updates),
            )
        if metrics["optim/skipped_updates"]:
            self._say_what_was_skipped(state, batch, group, metrics, int(in_a_row), dump_to)
        return Updated(state, logged(metrics), int(in_a_row), log_probs)

    def _say_what_was_skipped(
        self,
        state: TrainState,
        batch: Batch,
        group: Int[AnyArray, " B"],
        metrics: dict[str, Any],
        in_a_row: int,
        dump_to: Path,
    ) -> None:
        def log_probs(part: Batch) -> Float[Array, "b t"]:
            return self._learner.log_probs(state.params, part)[0]

        found, seen = nonfinite_rows(log_probs, batch, group, self._plan.minibatches, self._mesh)
        message = f"{metrics['policy/nonfinite_log_ratio']:.0f} log-ratios in the last step; {found}"
        if write_dump(dump_to, Dump(batch, group, seen), self._mesh):
            message += f"; the batch is in {dump_to}"
        if in_a_row >= self._max_skipped:
            raise FloatingPointError(
                f"{in_a_row} updates in a row had a loss, gradient or log-ratio that is not finite ({message}); "
                "the parameters are those before them"
            )
        if jax.process_index() == 0:
            _logger.warning("%d updates skipped: %s", metrics["optim/skipped_updates"], message)

    def token_log_probs(self, batch: Batch, log_probs: Sequence[Float[Array, "_ _"]]) -> Float[np.ndarray, "B T"]:
        """Puts what the updates of the first epoch saw back in the rows of this process's batch; NaN where masked.

        Every process must call it.
        """
        rows = np.broadcast_to(np.arange(len(batch.mask), dtype=np.int32)[:, None], batch.mask.shape)
        found = np.full(batch.mask.shape, np.nan, np.float32)
        for part, seen in zip(self._cut(batch._replace(row=rows)), log_probs, strict=True):
            row, position = required(part.row, "row"), required(part.inputs, "inputs").positions
            found[row[part.mask], position[part.mask]] = sharding.to_local(seen)[part.mask]
        return found

    def minibatches(self, batch: Batch) -> list[Batch]:
        """Cuts a step's rows into optimizer batches, packed, on the devices."""
        return [sharding.to_global(part, self._mesh) for part in self._cut(batch)]

    def _cut(self, batch: Batch) -> list[Batch]:
        parts = list(minibatches(batch, self._plan.minibatches, 1, self._group_size))
        if self._packed:
            shards = sharding.num_batch_shards(self._mesh) // row_part(self._mesh)[1]
            parts = pack(parts, shards * self._plan.micro_batches)
        return parts


@partial(jax.jit, static_argnames="first_is_gap")
def _merge(of_updates: list[dict[str, Any]], *, first_is_gap: bool) -> dict[str, Any]:
    """Merges the updates' metrics by type into the values of a step; the precision gap perhaps of the first alone."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_updates)
    values = metrics_lib.values(metrics_lib.fold(stacked))
    if first_is_gap:
        values.setdefault("policy/precision_gap_kl", of_updates[0]["policy/behaviour_kl_reverse"].value())
    return values
