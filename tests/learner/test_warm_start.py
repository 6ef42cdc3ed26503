"""Demonstrations: what the supervised steps see."""

from __future__ import annotations

import numpy as np
import pytest

from p3o_jax.learner.warm_start import WarmStart, demonstrations
from p3o_jax.tasks import SortDigits
from p3o_jax.tasks.base import split_of

TASK = SortDigits(length=4)


def decoded(batch):
    """Each row's prompt and the part that is learned."""
    tokens = np.concatenate([batch.inputs.tokens[:, :1], batch.inputs.targets], axis=1)
    for row, mask in zip(tokens, batch.mask, strict=True):
        start = int(np.flatnonzero(mask)[0]) + 1
        yield TASK.tokenizer.decode(row[:start].tolist()), row[start : start + int(mask.sum())].tolist()


def test_targets_are_answers_and_the_end():
    (batch,) = demonstrations(TASK, WarmStart(num_steps=1, rows_per_step=32, noise=0.0), seed=0)
    for prompt, target in decoded(batch):
        assert target[-1] == TASK.tokenizer.eos_ids[0]
        assert TASK.tokenizer.decode(target) == "".join(sorted(prompt.rstrip("=")))
        assert split_of(prompt) == "train"
    assert batch.advantages.min() == batch.advantages.max() == 1


def test_noise_replaces_the_share_it_says():
    batches = demonstrations(TASK, WarmStart(num_steps=10, rows_per_step=100, noise=0.5), seed=0)
    changed = [
        a != b
        for batch in batches
        for prompt, target in decoded(batch)
        for a, b in zip(TASK.tokenizer.decode(target), sorted(prompt.rstrip("=")), strict=True)
    ]
    assert np.mean(changed) == pytest.approx(0.45, abs=0.03)  # a tenth of the replacements are the digit itself


def test_two_processes_see_the_rows_of_one():
    config = WarmStart(num_steps=2, rows_per_step=8)
    one = list(demonstrations(TASK, config, seed=3))
    parts = [list(demonstrations(TASK, config, seed=3, num_processes=2, process=i)) for i in range(2)]
    for whole, *halves in zip(one, *parts, strict=True):
        rows = np.concatenate([half.inputs.targets for half in halves])
        np.testing.assert_array_equal(rows, whole.inputs.targets)


def test_a_demonstration_that_does_not_fit_is_refused():
    class Short(SortDigits):
        max_response_tokens = 3

    with pytest.raises(ValueError, match=r"demonstration 0 has 5 \+ 5 tokens, but the task allows 5 \+ 3"):
        next(demonstrations(Short(length=4), WarmStart(), seed=0))


@pytest.mark.parametrize("change", [{"noise": 1.5}, {"num_steps": 0}, {"rows_per_step": 0}])
def test_impossible_settings_are_refused_by_name(change):
    with pytest.raises(ValueError, match=f"warm_start.{next(iter(change))}"):
        WarmStart(**change)
