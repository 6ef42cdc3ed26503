"""What a run leaves behind."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from p3o_jax import config as config_lib
from p3o_jax.devices.chips import CHIPS, Chip
from p3o_jax.learner.optimizer import OptimizerConfig
from tests.small_run import SMALL, Rambling, rollouts, run

TAGS = {
    "policy/ess", "policy/ess_min_micro_batch", "policy/ess/source=0", "policy/ess/staleness=0", "policy/ratio_mean",
    "policy/ratio_max", "policy/log_ratio_abs_mean", "policy/log_ratio_abs_max", "policy/cap_fraction",
    "policy/outside_0.2_fraction", "policy/behaviour_kl_proxy", "policy/chi2", "policy/entropy",
    "policy/precision_gap_kl", "loss/score", "loss/behaviour_kl", "loss/total", "optim/grad_norm",
    "optim/learning_rate", "optim/skipped_updates", "reward/mean", "reward/zero_variance_group_fraction",
    "rollout/response_tokens_mean", "rollout/truncated_fraction", "rollout/staleness_mean",
    "rollout/dropped/nonfinite_update", "eval/sort_digits/pass@1", "time/sample_seconds", "time/learn_seconds",
    "time/learner_tokens_per_second", "time/sampler_tokens_per_second", "time/mfu",
}  # fmt: skip
"""What every run must log, besides the breakdown of the ESS by position."""


def test_a_run_leaves_what_one_needs_to_read_it(tmp_path, monkeypatch):
    monkeypatch.setitem(CHIPS, jax.devices()[0].device_kind, Chip(1, 1e12))  # without a peak there is no MFU
    path = tmp_path / "run"
    lines = run(path, argv=["python", "-m", "something"], profile_steps=range(2, 4))
    assert config_lib.load(path / "config.json") == SMALL
    assert path.joinpath("command.txt").read_text() == "python -m something\n"
    assert json.loads(path.joinpath("environment.json").read_text())[0]["packages"]["jax"]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval/sort_digits/pass@1" in line] == [0, 2, 4]
    assert all(line["eval/sort_digits/num_prompts"] == 11 for line in lines if "eval/sort_digits/num_prompts" in line)
    assert not TAGS - lines[2].keys()
    assert "policy/ess/position=1-3" in lines[2]
    assert lines[1].keys() - lines[3].keys() == set()  # every step logs the same
    accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0, "histograms": 0}).Reload()
    assert set(accumulator.Tags()["scalars"]) == set().union(*lines) - {"step"}
    for tag in ("policy/log_ratio_histogram", "policy/ratio_histogram", "rollout/response_tokens_histogram"):
        assert [event.step for event in accumulator.Histograms(tag)] == [1, 2, 3, 4]
    (lengths,) = {event.histogram_value.num for event in accumulator.Histograms("rollout/response_tokens_histogram")}
    assert lengths == 32
    results = json.loads((path / "evaluations" / "step_4" / "sort_digits.json").read_text())
    assert results["results"]["pass@1"] == lines[-1]["eval/sort_digits/pass@1"]
    assert results["settings"]["temperature"] == 1.0
    assert results["settings"]["samples"] == SMALL.evaluation_samples
    completions = (path / "evaluations" / "step_4" / "sort_digits.jsonl").read_text().splitlines()
    assert len(completions) == 11 * (SMALL.evaluation_samples + 1)  # and the most likely one
    (trace,) = path.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    for phase in ("step", "sample", "score", "learn", "evaluate", "write", "save"):
        assert names.count(phase) == 2, phase
    row = rollouts(path, 1)[0]
    assert len(row["tokens"]) == len(row["log_ratios"]) == len(row["behaviour_log_probs"]) == len(row["token_ids"])
    assert row["prompt"].endswith("=")
    assert list(path.glob("events.out.tfevents.*"))
    with pytest.raises(FileExistsError, match="another run"):
        run(path)
    with pytest.raises(ValueError, match=r"optimizer.learning_rate \(was 0.001, now 0.1\)"):
        run(path, replace(SMALL, optimizer=OptimizerConfig(learning_rate=0.1)), resume=True)


@pytest.mark.slow
def test_the_ratios_in_the_rollouts_are_those_of_the_logged_ess(tmp_path):
    """Of packed rows, cut into micro-batches over devices, back in the rollouts' own."""
    config = replace(SMALL, task=Rambling(length=3), sampler_temperature=1.5, learner_temperature=1.0, micro_batches=2)
    config = replace(config, minibatches=1, epochs=2, num_steps=2, evaluate_every=0)
    lines = run(tmp_path / "run", config, devices=jax.devices()[:4])
    for line in lines:
        rows = rollouts(tmp_path / "run", line["step"])
        ratios = np.exp(np.concatenate([row["log_ratios"] for row in rows]))
        ess = ratios.mean() ** 2 / (ratios**2).mean()
        assert ess < 0.99
        # Of the first epoch; in the second the policy has moved a little.
        assert line["policy/ess"] == pytest.approx(ess, abs=2e-3)
        early = np.exp(np.concatenate([row["log_ratios"][3:15] for row in rows]))
        assert line["policy/ess/position=4-15"] == pytest.approx(early.mean() ** 2 / (early**2).mean(), abs=2e-3)
