"""A skipped update names the rows that are to blame."""

from __future__ import annotations

import numpy as np
import pytest

from p3o_jax.batch.types import Batch, Inputs
from p3o_jax.devices.sharding import MeshShape, make_mesh
from p3o_jax.learner.nonfinite import nonfinite_rows

ROWS, TOKENS = 16, 4
GROUP = np.repeat([7, 3, 12, 5], 4).astype(np.int32)


def make_batch() -> Batch:
    """Row i has log-prob -i; whatever is masked is NaN."""
    mask = np.ones((ROWS, TOKENS), bool)
    mask[:, 0] = False
    values = np.where(mask, -np.arange(ROWS, dtype=np.float32)[:, None], np.nan).astype(np.float32)
    tokens = np.zeros((ROWS, TOKENS), np.int32)
    return Batch(mask, values, values, inputs=Inputs(tokens, tokens, tokens, values))


@pytest.mark.parametrize("num_parts", [1, 2])
def test_rows_are_named_by_their_prompts(num_parts):
    batch = make_batch()
    batch.behaviour_log_probs[9, 2] = -np.inf  # prompt 12
    batch.behaviour_log_probs[2, 0] = np.inf  # masked

    def log_probs(part):
        """The policy's: NaN for rows 5 and 7, of prompt 3."""
        row = -part.inputs.temperature
        return row * np.where((row == 5) | (row == 7), np.nan, 1.0).astype(np.float32)

    found, policy = nonfinite_rows(log_probs, batch, GROUP, num_parts, make_mesh(MeshShape(data=4, tensor=2)))
    assert found == "3 rows have log-probs that are not finite, of prompts 3, 12"
    assert np.flatnonzero(np.isnan(policy[:, 1:]).any(axis=1)).tolist() == [5, 7]
    assert policy[3, 1:].tolist() == [3.0] * (TOKENS - 1)


def test_none_is_an_answer_too():
    found, _ = nonfinite_rows(lambda part: part.behaviour_log_probs, make_batch(), GROUP, 2, make_mesh())
    assert found.startswith("every row's log-probs are finite")
