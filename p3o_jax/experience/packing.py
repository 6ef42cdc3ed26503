"""Short sequences share rows, so that padding is not paid for.

On the host, on this process's rows. A packed row holds sequences one after another, told
apart by `segment_ids`; positions restart with each. What is left over is masked, and in a
segment of its own (-1). Objectives and attention respect segments, so the loss and its
gradient are those of the unpacked batch.

How many rows a batch needs differs from step to step. It is rounded up to one of a few
counts, of which a run meets a handful: each is another shape, compiled once. All
processes and all minibatches of a step use the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int, Shaped

from p3o_jax.batch.types import AnyArray, Batch, required
from p3o_jax.devices import sharding

HOLE = -1


def pack(batches: Sequence[Batch], unit: int) -> list[Batch]:
    """The batches with as few rows as their sequences need, or as they are if that saves none.

    Args:
        batches: of equal shape, one sequence a row; every process has as many.
        unit: what the number of this process's rows must be a multiple of; divides it now.
    """
    rows, width = batches[0].mask.shape
    plans = [first_fit(sequence_lengths(batch.mask), width) for batch in batches]
    needed = sharding.gather_over_processes(np.asarray([len(plan) for plan in plans])).max()
    count = row_count(int(needed), rows, unit)
    if count == rows:
        return list(batches)
    return [_packed(batch, plan, count) for batch, plan in zip(batches, plans, strict=True)]


def sequence_lengths(mask: Bool[AnyArray, "B T"]) -> Int[np.ndarray, " B"]:
    """Columns of each row up to its last that counts; 0 where none does."""
    return np.where(mask.any(axis=1), mask.shape[1] - np.argmax(mask[:, ::-1], axis=1), 0)


def first_fit(lengths: Int[np.ndarray, " B"], width: int) -> list[list[int]]:
    """Which sequences share each row, longest first, each in the first row with room (first-fit decreasing).

    At most 11/9 of the fewest rows possible (Johnson et al., 1974). Sequences of length 0 are left out.
    """
    plan: list[list[int]] = []
    room = np.zeros(len(lengths), np.int64)
    for i in np.argsort(-lengths, kind="stable"):
        if lengths[i] == 0:
            break
        fits = room[: len(plan)] >= lengths[i]
        row = int(np.argmax(fits)) if fits.any() else len(plan)
        if row == len(plan):
            plan.append([])
            room[row] = width
        plan[row].append(int(i))
        room[row] -= lengths[i]
    return plan


def row_count(needed: int, rows: int, unit: int) -> int:
    """The least of rows x {8, 7, 6, 5} / 8, the halves of those, their halves ... that is enough, in whole units."""
    best, scale = rows, 1
    while True:
        for eighths in (8, 7, 6, 5):
            count = -(-rows * eighths // (8 * scale * unit)) * unit
            if count < needed:
                return best
            best = count
        if best == unit:
            return best
        scale *= 2


def _packed(batch: Batch, plan: list[list[int]], count: int) -> Batch:
    """The batch in `count` rows, those after the plan's empty."""
    width = batch.mask.shape[1]
    lengths = sequence_lengths(batch.mask)
    source_row, source_column = np.zeros((2, count, width), np.int64)
    segments = np.full((count, width), HOLE, np.int32)
    for row, sequences in enumerate(plan):
        start = 0
        for segment, i in enumerate(sequences):
            here = slice(start, start + lengths[i])
            source_row[row, here], source_column[row, here] = i, np.arange(lengths[i])
            segments[row, here] = segment
            start += lengths[i]
    hole = segments == HOLE

    def gather(leaf: Shaped[AnyArray, "B T ..."], filler: Any = 0) -> Shaped[np.ndarray, "R T ..."]:
        found = np.asarray(leaf)[source_row, source_column]
        found[hole] = filler
        return found

    packed = jax.tree.map(gather, batch)
    temperature = gather(required(batch.inputs, "inputs").temperature, 1.0)  # logits are divided by it, in holes too
    return packed._replace(segment_ids=segments, inputs=packed.inputs._replace(temperature=temperature))
