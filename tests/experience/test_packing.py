"""Packing: rows are saved, nothing is lost, and the loss and its gradient are those of the padded rows."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3o_jax.batch.types import Batch, Inputs, Support
from p3o_jax.experience.packing import first_fit, pack, row_count, sequence_lengths

WIDTH = 12


def make_batch(lengths, responses, seed=0) -> Batch:
    """Row i: `lengths[i]` predictions, of which the last `responses[i]` count. NaN wherever nothing is to be read."""
    rng = np.random.default_rng(seed)
    rows = len(lengths)
    lengths, responses = np.asarray(lengths)[:, None], np.asarray(responses)[:, None]
    at = np.arange(WIDTH)
    mask = (at < lengths) & (at >= lengths - responses)

    def numbers(*shape):
        values = rng.normal(size=(rows, WIDTH, *shape)).astype(np.float32)
        return np.where(mask.reshape(rows, WIDTH, *(1,) * len(shape)), values, np.nan).astype(np.float32)

    tokens = rng.integers(0, 10, (rows, WIDTH + 1)).astype(np.int32)
    return Batch(
        mask=mask,
        behaviour_log_probs=-np.abs(numbers()),
        advantages=numbers(),
        support=Support(rng.integers(0, 10, (rows, WIDTH, 3)), numbers(3), None),
        inputs=Inputs(
            tokens[:, :-1],
            tokens[:, 1:],
            np.tile(at.astype(np.int32), (rows, 1)),
            rng.uniform(0.5, 2, (rows, WIDTH)).astype(np.float32),
        ),
    )


def sequences(batch: Batch) -> list:
    """Everything a batch says of each of its sequences, prompt included, in an order of its own."""
    found = []
    segments = np.zeros(batch.mask.shape, int) if batch.segment_ids is None else batch.segment_ids
    for row in range(len(batch.mask)):
        for segment in set(segments[row].tolist()) - {-1}:
            here = segments[row] == segment
            if batch.segment_ids is None:
                here = here & (np.arange(WIDTH) < sequence_lengths(batch.mask)[row])
            parts = [np.ravel(leaf[row][here]) for leaf in jax.tree.leaves(batch._replace(segment_ids=None))]
            if len(parts[0]):
                found.append(np.concatenate(parts).tolist())
    return sorted(found, key=str)


def test_every_sequence_is_there_once_and_whole():
    lengths = [12, 3, 4, 4, 5, 6, 1, 7, 12, 2, 0, 9]
    batch = make_batch(lengths, [min(n, 1 + i % 3) for i, n in enumerate(lengths)])
    (packed,) = pack([batch], unit=1)
    # 65 predictions in rows of 12 need at least 6 rows; of 12, the counts are 12, 11, 9, 8 and 6.
    assert packed.mask.shape == (6, WIDTH)
    assert packed.mask.sum() == batch.mask.sum()
    assert str(sequences(packed)) == str(sequences(batch))
    for row in range(6):
        for segment in set(packed.segment_ids[row].tolist()) - {-1}:
            positions = packed.inputs.positions[row][packed.segment_ids[row] == segment]
            np.testing.assert_array_equal(positions, np.arange(len(positions)))
    holes = packed.segment_ids == -1
    assert not packed.mask[holes].any()
    np.testing.assert_array_equal(packed.inputs.temperature[holes], 1)


def test_a_batch_that_cannot_be_packed_is_left_as_it_is():
    batch = make_batch([7] * 8, [3] * 8)
    (same,) = pack([batch], unit=1)
    assert same is batch


def test_minibatches_of_a_step_get_one_shape():
    few, many = make_batch([2] * 8, [1] * 8), make_batch([6] * 8, [1] * 8)
    shapes = [batch.mask.shape for batch in pack([few, many], unit=2)]
    assert shapes == [(4, WIDTH)] * 2


def test_a_masked_batch_keeps_one_unit():
    (packed,) = pack([make_batch([5] * 8, [0] * 8)], unit=2)
    assert packed.mask.shape == (2, WIDTH)
    assert not packed.mask.any()


@settings(deadline=None)
@given(st.lists(st.integers(0, WIDTH), min_size=1, max_size=40))
def test_rows_are_never_overfull(lengths):
    plan = first_fit(np.asarray(lengths), WIDTH)
    used = [sum(lengths[i] for i in row) for row in plan]
    assert all(0 < n <= WIDTH for n in used)
    assert sorted(i for row in plan for i in row) == [i for i, n in enumerate(lengths) if n]
    # First fit: any two rows together would not have fitted into one.
    assert all(a + b > WIDTH for n, a in enumerate(used) for b in used[:n])


@given(st.integers(1, 64), st.integers(1, 8), st.data())
def test_row_counts_are_few_and_enough(units, unit, data):
    rows = units * unit
    needed = data.draw(st.integers(0, rows))
    count = row_count(needed, rows, unit)
    assert needed <= count <= rows
    assert count % unit == 0
    assert count <= max(1.25 * needed + unit, unit)
    assert len({row_count(n, rows, unit) for n in range(rows + 1)}) <= 4 * (1 + np.ceil(np.log2(units)))


@pytest.mark.parametrize("needed", [0, 1, 16])
def test_row_count_examples(needed):
    assert row_count(needed, 16, 4) == {0: 4, 1: 4, 16: 16}[needed]
