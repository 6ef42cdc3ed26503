"""Runs that are asked to end, lose a checkpoint, or meet data that poison them; killed ones are in test_killed.py."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from p3o_jax import train as train_module
from p3o_jax.batch.advantages import GroupZScore
from p3o_jax.batch.keys import Purpose, run_key
from p3o_jax.config import Config
from p3o_jax.experience.batches import make_batch
from p3o_jax.learner.nonfinite import read_dump
from p3o_jax.learner.warm_start import WarmStart
from p3o_jax.parts import Parts
from p3o_jax.runs import status as run_status
from p3o_jax.runs.checkpoint import Checkpoints, steps_in
from p3o_jax.runs.preemption import Preempted
from p3o_jax.sampler import Sampler
from p3o_jax.train import train
from p3o_jax.writers import read_metrics
from tests import small_run

SMALL = replace(small_run.SMALL, evaluate_every=0, save_every=1, keep_checkpoints=4, max_skipped_updates=2)
OF_A_STEP = SMALL.prompts_per_step


def run(path: Path, config: Config = SMALL, **options) -> list[dict]:
    train(config, path, **{"devices": jax.devices()[:1], **options})
    return lines(path)


def lines(path: Path) -> list[dict]:
    return [{tag: value for tag, value in line.items() if not tag.startswith("time/")} for line in read_metrics(path)]


def rollouts(path: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in (path / "rollouts").iterdir()}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """These steps are faster than the disk: every checkpoint is waited for, so that it is there to be lost."""
    monkeypatch.setattr(Checkpoints, "busy", property(lambda self: bool(self.wait())))


@pytest.mark.long
def test_no_step_waits_for_a_checkpoint_that_is_being_written(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Checkpoints, "busy", property(lambda self: self.newest == 2))
    run(tmp_path / "run")
    assert steps_in(tmp_path / "run" / "checkpoints") == [1, 2, 4]  # the last is made whatever it takes
    assert "no checkpoint of step 3: that of step 2 is still being written" in caplog.text


def _made(path: Path) -> Path:
    run(path)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Checkpoints, "busy", property(lambda self: bool(self.wait())))
        return _made(tmp_path_factory.mktemp("whole") / "run")


def assert_same_run(path: Path, whole: Path) -> None:
    """Every line, every rollout and every event once, and equal."""
    assert lines(path) == lines(whole)
    assert rollouts(path) == rollouts(whole)
    events = EventAccumulator(str(path)).Reload()
    assert [event.step for event in events.Scalars("loss/total")] == [1, 2, 3, 4]


def test_a_run_that_loses_its_newest_checkpoint_is_the_run(whole, tmp_path, capsys):
    path = shutil.copytree(whole, tmp_path / "run")
    assert steps_in(path / "checkpoints")[-2:] == [3, 4]
    victim = max((path / "checkpoints" / "4" / "state").glob("**/d/*"), key=lambda file: file.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-100])
    run(path, resume=True)
    assert_same_run(path, whole)
    said = capsys.readouterr().err
    assert f"{path / 'checkpoints' / '4'} is damaged: state/" in said and "continuing from" in said
    assert steps_in(path / "checkpoints")[-1] == 4


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_saves_and_is_the_run(whole, tmp_path, monkeypatch):
    """Asked while it samples the second step, which it does not wait for; asked again in the middle of the third.
    Its checkpoints are not due at either. The same command, with --resume, starts it and continues it."""
    path, rarely = tmp_path / "run", replace(SMALL, save_every=9)
    before = signal.getsignal(signal.SIGTERM)

    def asked_while_sampling(self, weights, requests, generate=Sampler.generate):
        if requests.key == run_key(SMALL.seed, Purpose.TRAIN, 2):
            os.kill(os.getpid(), signal.SIGTERM)
        return generate(self, weights, requests)

    def asked_after_the_rewards(*arguments, compute=make_batch, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return compute(*arguments, **options)

    for where, name, replacement, made in (
        (Sampler, "generate", asked_while_sampling, 1),
        (train_module, "make_batch", asked_after_the_rewards, 2),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, replacement)
            with pytest.raises(Preempted, match=f"has a checkpoint of step {made}; --resume"):
                run(path, rarely, resume=True)
        assert signal.getsignal(signal.SIGTERM) == before
        assert steps_in(path / "checkpoints")[-1] == made
        status = run_status.read(path)
        assert (status["state"], status["reason"]) == ("stopped", "asked to end")
    run(path, rarely, resume=True)
    assert_same_run(path, whole)
    assert run_status.read(path)["state"] == "finished"


def test_asked_in_the_warm_start_it_ends_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(Parts, "start", lambda self, pause: os.kill(os.getpid(), signal.SIGTERM) or pause())
    with pytest.raises(Preempted, match="before the first step"):
        run(tmp_path / "run", replace(SMALL, warm_start=WarmStart()))


@dataclass(frozen=True)
class Poisoned(GroupZScore):
    """Advantages of the third step's prompts are NaN, whichever step they come in."""

    def __call__(self, rewards, group, known):
        bad = (group >= 2 * OF_A_STEP) & (group < 3 * OF_A_STEP)
        return jnp.where(bad, jnp.nan, super().__call__(rewards, group, known))


POISONED = replace(SMALL, advantages=Poisoned())


def test_poisoned_data_end_the_run_and_are_kept(whole, tmp_path):
    path = tmp_path / "run"
    with pytest.raises(FloatingPointError, match=r"2 updates in a row .*; the batch is in .*/nonfinite/step_3\.npz"):
        run(path, POISONED)
    assert steps_in(path / "checkpoints") == [1, 2]
    status = run_status.read(path)
    assert status["state"] == "failed" and status["reason"].startswith("2 updates in a row")
    dump = read_dump(path / "nonfinite" / "step_3.npz")
    assert set(dump.group) == set(range(2 * OF_A_STEP, 3 * OF_A_STEP))
    assert np.isnan(dump.batch.advantages).all() and dump.batch.mask.any()
    assert np.isfinite(dump.policy_log_probs[dump.batch.mask]).all()
    assert dump.batch.inputs.tokens.shape == dump.batch.mask.shape and dump.batch.support is None


@pytest.mark.slow
def test_a_run_goes_back_and_on_with_other_data(whole, tmp_path):
    """To the checkpoint before; the third step is made of the fourth step's prompts, and the run goes on to its end."""
    path = tmp_path / "run"
    config = replace(POISONED, roll_back=1)
    run(path, config)
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]
    assert lines(path)[:2] == lines(whole)[:2]
    assert all(line["optim/skipped_updates"] == 0 for line in lines(path))
    for step, first in ((2, OF_A_STEP), (3, 3 * OF_A_STEP), (4, 4 * OF_A_STEP)):
        rows = [json.loads(row) for row in rollouts(path)[f"step_{step}.jsonl"].splitlines()]
        assert {row["prompt_index"] for row in rows} == set(range(first, first + OF_A_STEP))
    made = lines(path)
    shutil.rmtree(path / "checkpoints" / "4")
    assert run(path, config, resume=True) == made  # the position of the prompts, not that of the steps, is restored


@pytest.mark.long
def test_between_skipped_updates_no_checkpoint_takes_the_place_of_a_good_one(tmp_path, monkeypatch):
    path, saved, save = tmp_path / "run", [], Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda self, step, *rest: saved.append(step) or save(self, step, *rest))
    run(path, replace(POISONED, max_skipped_updates=9, keep_checkpoints=1))
    assert [line["optim/skipped_updates_in_a_row"] for line in lines(path)] == [0, 0, 2, 0]
    assert saved == [1, 2, 4]
