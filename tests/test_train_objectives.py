"""Runs of the objectives that need more than log-probs, and of every way to cut their batches."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from p3o_jax.batch.types import Batch, Inputs
from p3o_jax.devices.precision import Precision
from p3o_jax.learner.optimizer import OptimizerConfig
from p3o_jax.learner.updates import Updates
from p3o_jax.objectives import P3O, P4O, Gspo, P3OSnapshot
from p3o_jax.parts import build
from tests.small_run import SMALL, Rambling, run, without_times


@pytest.mark.slow
def test_the_snapshot_is_of_the_parameters_that_sampled(tmp_path):
    """Two steps ago, at the learner's precision: with a sampler of the same precision, no gap is left between the two,
    however far the policy has moved; after an interruption too."""
    config = replace(SMALL, objective=P3OSnapshot(kl="top_k"), staleness=2, num_steps=5, evaluate_every=0)
    config = replace(config, optimizer=OptimizerConfig(learning_rate=1e-2), support_tokens=3)
    lines = run(tmp_path / "whole", config)
    for line in lines:
        assert line["policy/ess/proximal_to_behaviour"] > 0.9999
        assert line["policy/precision_gap_kl"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["policy/ess"] < 0.99
    assert lines[-1]["loss/snapshot_kl"] > 1e-3
    run(tmp_path / "interrupted", replace(config, num_steps=4))
    resumed = run(tmp_path / "interrupted", config, resume=True)
    assert without_times(resumed) == without_times(lines)


def test_the_precision_gap_is_what_is_left_at_the_same_parameters(tmp_path):
    config = replace(SMALL, objective=P3OSnapshot(kl="exact"), num_steps=2, evaluate_every=0)
    for line in run(tmp_path / "run", replace(config, precision=Precision("bfloat16", "bfloat16", "bfloat16"))):
        assert 1e-8 < line["policy/precision_gap_kl"] < 1e-3
        assert line["policy/ess/proximal_to_behaviour"] < 1 - 1e-7


@pytest.mark.long
@pytest.mark.parametrize(
    ("objective", "minibatches", "tags"),
    [
        (P4O(kl="top_k"), 2, {"loss/mixture_kl", "policy/ess/policy_to_proximal"}),
        (P3O(kl="exact"), 1, {"loss/behaviour_kl"}),
        (P3O(kl="top_k"), 1, {"loss/behaviour_kl"}),
    ],
    ids=["p4o_top_k", "p3o_exact", "p3o_top_k"],
)
def test_objectives_are_given_what_they_ask_for(tmp_path, objective, minibatches, tags):
    """Distributions of the sampler, and snapshots of each epoch's start, in a run on several devices."""
    config = replace(SMALL, objective=objective, num_steps=2, epochs=2, minibatches=minibatches, evaluate_every=0)
    lines = run(tmp_path / "run", config, devices=jax.devices()[:4])
    for line in lines:
        assert tags <= line.keys()
        assert all(np.isfinite(line[tag]) for tag in line if tag.startswith(("loss/", "policy/", "optim/")))
        assert line["optim/skipped_updates"] == 0


@pytest.mark.long
def test_a_run_does_not_depend_on_packing(tmp_path, monkeypatch):
    """Responses from 1 to 30 tokens, of which several fit into a row; the same updates, in fewer rows."""
    shapes, update = [], Updates.minibatches
    monkeypatch.setattr(Updates, "minibatches", lambda self, batch: shapes.append(update(self, batch)) or shapes[-1])
    config = replace(SMALL, task=Rambling(length=3), objective=Gspo(), num_steps=2, evaluate_every=0)
    packed, padded = run(tmp_path / "packed", config), run(tmp_path / "padded", replace(config, pack=False))
    assert [len(parts) for parts in shapes] == [2] * 4
    assert all(batch.mask.shape[0] < 16 for parts in shapes[:2] for batch in parts)
    assert all(batch.mask.shape[0] == 16 for parts in shapes[2:] for batch in parts)
    for a, b in zip(packed, padded, strict=True):
        for tag in a:
            if tag.startswith(("loss/", "reward/", "optim/", "policy/entropy")):
                assert b[tag] == pytest.approx(a[tag], rel=1e-4, abs=1e-6), tag


@pytest.mark.long
def test_micro_batches_do_not_change_a_run(tmp_path):
    lines = run(tmp_path / "1"), run(tmp_path / "4", replace(SMALL, micro_batches=4))
    for a, b in zip(*lines, strict=True):
        for tag in a:
            if tag.startswith(("loss/", "reward/", "eval/")):
                assert b[tag] == pytest.approx(a[tag], rel=1e-3, abs=1e-5), tag


def test_what_is_in_a_micro_batch_is_not_changed_where_it_matters():
    """Rows of one token each, of which all fit into one row."""
    mask = np.arange(8) < np.ones((32, 1))
    numbers, ids = np.zeros(mask.shape, np.float32), np.zeros(mask.shape, np.int32)
    batch = Batch(mask, numbers, numbers, inputs=Inputs(ids, ids, ids, numbers))
    for objective, rows in ((P3O(), 2), (P3O(ess_scope="micro_batch"), 16)):
        parts = build(replace(SMALL, objective=objective), jax.devices()[:1])
        assert [part.mask.shape for part in parts.updates.minibatches(batch)] == [(rows, 8)] * 2
