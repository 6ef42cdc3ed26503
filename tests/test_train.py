"""The loop as a whole: what must hold of a run, whatever it learns."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from p3o_jax import config as config_lib
from p3o_jax.devices.precision import Precision
from p3o_jax.devices.sharding import MeshShape
from p3o_jax.learner.optimizer import OptimizerConfig
from p3o_jax.learner.warm_start import WarmStart
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.parts import build
from p3o_jax.rewards import Function, Reward
from p3o_jax.rewards.pool import Verifiers
from p3o_jax.tasks import SortDigits
from tests.small_run import SMALL, rollouts, run, without_times


@dataclass(frozen=True)
class Nasty(SortDigits):
    """Judged by a verifier that hangs where there is a 9 in a response and fails where there is a 0."""

    reward: Reward = Function("tests.rewards.verifiers:sorted_or_else")


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.long
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
        build(replace(SMALL, **changes), jax.devices())


@pytest.mark.slow
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


def test_bfloat16_rollouts_show_as_an_ess_below_one(tmp_path):
    coarse = replace(SMALL, precision=Precision("bfloat16", "bfloat16", "bfloat16"), num_steps=1, evaluate_every=0)
    (line,) = run(tmp_path / "run", coarse)
    assert 0.99 < line["policy/ess"] < 1 - 1e-7
    assert line["policy/log_ratio_abs_max"] > 1e-4


@pytest.mark.slow
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
    assert config_lib.load(tmp_path / "run" / "config.json", ["tests.rewards.verifiers"]).task == config.task


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
