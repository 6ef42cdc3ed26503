"""The loop as a whole: what must hold of a run, whatever it learns."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from p3o_jax import config as config_lib
from p3o_jax import updates as updates_module
from p3o_jax.chips import CHIPS, Chip
from p3o_jax.config import Config
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.objectives import P3O, P4O, Gspo, P3OSnapshot
from p3o_jax.optimizer import OptimizerConfig
from p3o_jax.precision import Precision
from p3o_jax.rewards import Function, Reward
from p3o_jax.rewards.pool import Verifiers
from p3o_jax.sharding import MeshShape
from p3o_jax.tasks import SortDigits
from p3o_jax.train import train
from p3o_jax.trainer import Trainer
from p3o_jax.types import Batch, Inputs
from p3o_jax.warm_start import WarmStart
from p3o_jax.writers import read_metrics


@dataclass(frozen=True)
class GradedSort(SortDigits):
    """With credit for every digit in its place, so that an untrained policy has something to learn from."""

    def reward(self, prompt, completion):
        return sum(a == b for a, b in zip(completion, prompt.answer, strict=False)) / len(prompt.answer)


@dataclass(frozen=True)
class Nasty(SortDigits):
    """Judged by a verifier that hangs where there is a 9 in a response and fails where there is a 0."""

    reward: Reward = Function("tests.rewards.verifiers:sorted_or_else")


class Interrupted(GradedSort):
    """Interrupted at the rewards of the second step."""

    def reward(self, prompt, completion):
        if prompt.index == 15:  # the second step's last prompt; the evaluation has but 11
            raise KeyboardInterrupt
        return super().reward(prompt, completion)


class Rambling(GradedSort):
    """With room for longer responses than the answer."""

    @property
    def max_response_tokens(self) -> int:
        return 30


MODEL = TransformerConfig(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32)
SMALL = Config(
    task=GradedSort(length=3),
    model=MODEL,
    objective=P3O(),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    prompts_per_step=8,
    samples_per_prompt=4,
    minibatches=2,
    num_steps=4,
    evaluate_every=2,
    evaluation_prompts=11,  # not a multiple of the batch of 8
    save_every=2,
    write_rollouts_every=1,
)


def run(path: Path, config: Config = SMALL, **options) -> list[dict]:
    """The metrics of a run on one device, by step."""
    train(config, path, **{"devices": jax.devices()[:1], **options})
    return read_metrics(path)


def rollouts(path: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (path / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]


def without_times(lines: list[dict]) -> list[dict]:
    return [{tag: value for tag, value in line.items() if not tag.startswith("time/")} for line in lines]


def test_matched_policies_have_an_ess_of_one(tmp_path):
    """Nothing learned, equal temperatures: every ratio is 1 up to rounding, at every temperature, at every step."""
    still = replace(SMALL, optimizer=OptimizerConfig(learning_rate=0.0), num_steps=20, evaluate_every=0, save_every=99)
    for temperature in (0.6, 1.0, 1.2):
        lines = run(tmp_path / str(temperature), replace(still, sampler_temperature=temperature))
        assert len(lines) == 20
        for line in lines:
            assert line["policy/ess"] > 0.9999
            assert line["policy/log_ratio_abs_max"] < 1e-4
            assert line["policy/ratio_mean"] == pytest.approx(1, abs=1e-4)


def test_the_learners_temperature_is_its_own(tmp_path):
    """Sampling at 1.2 for a policy at 1.0 is off-policy from the first step, and the ESS says so."""
    shifted = replace(SMALL, sampler_temperature=2.0, learner_temperature=1.0, num_steps=1, evaluate_every=0)
    (line,) = run(tmp_path / "run", shifted)
    assert line["policy/ess"] < 0.999
    assert line["policy/ratio_mean"] == pytest.approx(1, abs=0.1)


def test_one_device_and_eight_give_the_same_run(tmp_path):
    config = replace(SMALL, num_steps=3)
    one, eight = tmp_path / "one", tmp_path / "eight"
    lines = run(one, config), run(eight, config, devices=jax.devices())
    assert abs(lines[0][-1]["loss/total"]) > 1e-3  # there is something to learn
    for step in (1, 2, 3):
        for a, b in zip(rollouts(one, step), rollouts(eight, step), strict=True):
            assert a["token_ids"] == b["token_ids"]
            np.testing.assert_allclose(a["behaviour_log_probs"], b["behaviour_log_probs"], atol=1e-5)
    for a, b in zip(*map(without_times, lines), strict=True):
        assert a.keys() == b.keys()
        for tag in a:
            if tag.startswith(("loss/", "reward/", "eval/", "rollout/")) or tag == "policy/ess":
                assert b[tag] == pytest.approx(a[tag], rel=1e-4, abs=1e-6), tag


def test_a_sampler_with_devices_of_its_own_gives_the_same_run(tmp_path):
    """Half of the devices learn, sharded by `fsdp`; the others sample, two to a row."""
    one = replace(SMALL, num_steps=2, evaluate_every=0)
    apart = replace(one, mesh=MeshShape(data=2, fsdp=2), sampler_devices=4, sampler_mesh=MeshShape(data=2, tensor=2))
    run(tmp_path / "one", one)
    run(tmp_path / "apart", apart, devices=jax.devices())
    for step in (1, 2):
        for a, b in zip(*(rollouts(tmp_path / name, step) for name in ("one", "apart")), strict=True):
            assert a["token_ids"] == b["token_ids"]
            np.testing.assert_allclose(a["behaviour_log_probs"], b["behaviour_log_probs"], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler_devices": 8}, "sampler_devices=8: each of the 1 hosts must .* keep some of its 8 for the learner"),
        ({"sampler_mesh": MeshShape(tensor=3)}, "sampler_mesh: data x fsdp x tensor = .* x 3 does not use each of"),
        ({"sampler_mesh": MeshShape(data=1, tensor=8)}, "mesh: tensor=8 does not divide the 12 vocabulary of weight"),
        ({"precision": Precision("int4", scales="block", block_size=12)}, "precision.block_size=12 does not divide"),
        (
            {"precision": Precision("int4", scales="block", block_size=16)},
            "block_size=16 does not divide the 8 head_dim",
        ),
    ],
)
def test_a_sampler_that_does_not_fit_is_refused_before_anything_compiles(changes, message):
    with pytest.raises(ValueError, match=message):
        Trainer(replace(SMALL, **changes), jax.devices())


def test_a_resumed_run_is_the_run(tmp_path):
    """With rollouts from past policies, whose quantised weights must survive too."""
    precision = Precision("int8", "fp8_e4m3", "int8")
    config = replace(SMALL, staleness=1, num_steps=5, minibatches=1, epochs=2, precision=precision)
    expected = run(tmp_path / "whole", config)
    interrupted = tmp_path / "interrupted"
    run(interrupted, replace(config, num_steps=3))
    (interrupted / "metrics.jsonl").open("a").write('{"step": 4, "reward/mean": 7.0}\n{"st')  # cut off while writing
    got = run(interrupted, config, resume=True)
    # Step 3 was the last of the shorter run, which evaluates and saves then.
    for a, b in zip(without_times(expected), without_times(got), strict=True):
        assert a == {tag: b[tag] for tag in a}
    for step in (4, 5):
        assert rollouts(interrupted, step) == rollouts(tmp_path / "whole", step)


@pytest.mark.long
def test_resuming_before_the_first_checkpoint_starts_again(tmp_path):
    expected = run(tmp_path / "whole", replace(SMALL, num_steps=2))
    interrupted = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        run(interrupted, replace(SMALL, num_steps=2, task=Interrupted(length=3)))
    config = json.loads((interrupted / "config.json").read_text())
    config["task"]["class"] = config["task"]["class"].replace("Interrupted", "GradedSort")
    (interrupted / "config.json").write_text(json.dumps(config))
    assert without_times(run(interrupted, replace(SMALL, num_steps=2), resume=True)) == without_times(expected)


def test_staleness_is_how_old_the_sampling_policy_is(tmp_path):
    lines = run(tmp_path / "run", replace(SMALL, staleness=2, evaluate_every=0))
    assert [line["rollout/staleness_mean"] for line in lines] == [0, 1, 2, 2]
    # One version samples a step: the ESS of its staleness is that of all, and the other groups are not there.
    for line, staleness in zip(lines, (0, 1, 2, 2), strict=True):
        of_groups = {tag: value for tag, value in line.items() if tag.startswith("policy/ess/staleness=")}
        assert of_groups == {f"policy/ess/staleness={staleness}": line["policy/ess"]}
        assert "policy/precision_gap_kl" not in line
    assert {row["policy_version"] for row in rollouts(tmp_path / "run", 4)} == {1}
    fresh = run(tmp_path / "fresh", replace(SMALL, evaluate_every=0))
    # The first step is the same; then the stale run is more off-policy.
    assert lines[0]["policy/ess"] == fresh[0]["policy/ess"]
    assert lines[3]["policy/log_ratio_abs_mean"] > fresh[3]["policy/log_ratio_abs_mean"]


@pytest.mark.long
def test_micro_batches_do_not_change_a_run(tmp_path):
    lines = run(tmp_path / "1"), run(tmp_path / "4", replace(SMALL, micro_batches=4))
    for a, b in zip(*lines, strict=True):
        for tag in a:
            if tag.startswith(("loss/", "reward/", "eval/")):
                assert b[tag] == pytest.approx(a[tag], rel=1e-3, abs=1e-5), tag


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


def test_resuming_does_not_change_what_was_made(tmp_path):
    """Fewer steps than were made, and another number of steps where the learning rates hang on it, are refused."""
    decaying = replace(SMALL, optimizer=OptimizerConfig(learning_rate=1e-3, decay="linear"), num_steps=2)
    path = tmp_path / "run"
    run(path, decaying)
    before = (path / "config.json").read_text()
    with pytest.raises(ValueError, match="has already made 2 steps, more than num_steps=1"):
        run(path, replace(decaying, num_steps=1), resume=True)
    with pytest.raises(ValueError, match=r"num_steps \(was 2, now 4\)"):
        run(path, replace(decaying, num_steps=4), resume=True)
    assert (path / "config.json").read_text() == before


def test_prompts_that_do_not_fit_are_refused_before_anything_runs(tmp_path):
    class Long(SortDigits):
        max_prompt_tokens = 2

    with pytest.raises(
        ValueError,
        match=r"11 of 11 evaluation prompts are longer .* 2 tokens: .* prompt_tokens=4 ",
    ):
        run(tmp_path / "run", replace(SMALL, task=Long(length=3)))
    assert not (tmp_path / "run").exists()


def test_updates_that_are_never_finite_end_the_run(tmp_path):
    """Rollouts are of the first policy, so that they stay finite when the learner's no longer is."""
    with pytest.raises(
        FloatingPointError, match=r"updates in a row .* rows have log-probs that are not finite, of prompts \d+, "
    ):
        run(
            tmp_path / "run",
            replace(
                SMALL,
                optimizer=OptimizerConfig(learning_rate=1e30),
                max_skipped_updates=3,
                num_steps=20,
                staleness=20,
                evaluate_every=0,
            ),
        )


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


@pytest.mark.parametrize(
    ("objective", "minibatches", "tags"),
    [
        (P4O(kl="top_k"), 2, {"loss/mixture_kl", "policy/ess/policy_to_proximal"}),
        pytest.param(P3O(kl="exact"), 1, {"loss/behaviour_kl"}, marks=pytest.mark.long),
        pytest.param(P3O(kl="top_k"), 1, {"loss/behaviour_kl"}, marks=pytest.mark.long),
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
    shapes = []
    packing = updates_module.pack
    monkeypatch.setattr(updates_module, "pack", lambda *a: shapes.append(packing(*a)) or shapes[-1])
    config = replace(SMALL, task=Rambling(length=3), objective=Gspo(), num_steps=2, evaluate_every=0)
    config = replace(config, write_rollouts_every=0)  # which packs again
    packed, padded = run(tmp_path / "packed", config), run(tmp_path / "padded", replace(config, pack=False))
    assert [len(parts) for parts in shapes] == [2, 2]
    assert all(batch.mask.shape[0] < 16 for parts in shapes for batch in parts)
    for a, b in zip(packed, padded, strict=True):
        for tag in a:
            if tag.startswith(("loss/", "reward/", "optim/", "policy/entropy")):
                assert b[tag] == pytest.approx(a[tag], rel=1e-4, abs=1e-6), tag


def test_what_is_in_a_micro_batch_is_not_changed_where_it_matters():
    """Rows of one token each, of which all fit into one row."""
    mask = np.arange(8) < np.ones((32, 1))
    numbers, ids = np.zeros(mask.shape, np.float32), np.zeros(mask.shape, np.int32)
    batch = Batch(mask, numbers, numbers, inputs=Inputs(ids, ids, ids, numbers))
    for objective, rows in ((P3O(), 2), (P3O(ess_scope="micro_batch"), 16)):
        trainer = Trainer(replace(SMALL, objective=objective), jax.devices()[:1])
        assert [part.mask.shape for part in trainer.updates.minibatches(batch)] == [(rows, 8)] * 2


def test_bfloat16_rollouts_show_as_an_ess_below_one(tmp_path):
    coarse = replace(SMALL, precision=Precision("bfloat16", "bfloat16", "bfloat16"), num_steps=1, evaluate_every=0)
    (line,) = run(tmp_path / "run", coarse)
    assert 0.99 < line["policy/ess"] < 1 - 1e-7
    assert line["policy/log_ratio_abs_max"] > 1e-4


def test_training_goes_on_without_the_rows_whose_verifier_fails(tmp_path):
    config = replace(SMALL, task=Nasty(length=3), verifiers=Verifiers(timeout_seconds=0.3), num_steps=2)
    lines = run(tmp_path / "run", replace(config, evaluate_every=0))
    for step, line in enumerate(lines, start=1):
        rows = rollouts(tmp_path / "run", step)
        failed = [row for row in rows if row["reward"] == "nan"]
        assert {row["advantage"] for row in failed} == {0.0}
        # On a busy machine others may be late too.
        assert all(row in failed for row in rows if set("09") & set(row["completion"]))
        assert line["reward/verifier_timeouts"] >= sum("9" in row["completion"] for row in rows) > 0
        assert line["reward/verifier_errors"] > 0
        assert line["reward/verifier_errors"] + line["reward/verifier_timeouts"] == len(failed)
        assert line["reward/mean"] == pytest.approx(np.mean([row["reward"] for row in rows if row not in failed]))
        assert np.isfinite(line["loss/total"]) and line["optim/skipped_updates"] == 0
    assert config_lib.load(tmp_path / "run" / "config.json").task == config.task


@pytest.mark.long
def test_reward_rises(tmp_path):
    """From a warm start that leaves room, on four digits; the quickstart does the same on ten."""
    config = replace(
        SMALL,
        task=SortDigits(length=4),
        model=TransformerConfig(),
        warm_start=WarmStart(num_steps=200, rows_per_step=64),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_updates=10),
        prompts_per_step=32,
        num_steps=30,
        evaluate_every=30,
        evaluation_prompts=128,
        evaluation_samples=4,
        write_rollouts_every=0,
    )
    lines = run(tmp_path / "run", config)
    before, after = (lines[i]["eval/sort_digits/pass@1"] for i in (0, -1))
    assert 0.2 < before < 0.7
    assert after > before + 0.15
