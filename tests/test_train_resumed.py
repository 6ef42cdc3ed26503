"""A run that goes on after an interruption is the run."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from p3o_jax.devices.precision import Precision
from p3o_jax.learner.optimizer import OptimizerConfig
from tests.small_run import SMALL, Interrupted, rollouts, run, without_times


@pytest.mark.slow
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


def test_a_run_of_an_earlier_version_is_continued(tmp_path):
    """Its configuration names a class where it was then, and lacks a field that has come since; another value than
    the run had is still refused."""
    expected = run(tmp_path / "whole")
    path = tmp_path / "earlier"
    run(path, replace(SMALL, num_steps=2))
    config = json.loads((path / "config.json").read_text())
    config["advantages"]["class"] = config["advantages"]["class"].replace("p3o_jax.batch.", "p3o_jax.")
    del config["support_tokens"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"support_tokens \(was 64, now 32\)"):
        run(path, replace(SMALL, support_tokens=32), resume=True)
    got = run(path, resume=True)
    for a, b in zip(without_times(expected), without_times(got), strict=True):
        assert a == {tag: b[tag] for tag in a}


def test_a_stored_configuration_imports_nothing_that_does_not_run(tmp_path):
    path = tmp_path / "run"
    run(path, replace(SMALL, num_steps=1))
    config = json.loads((path / "config.json").read_text())
    config["task"]["class"] = "antigravity:Flight"  # importing it would open a browser
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"task.class \(was 'antigravity:Flight', now"):
        run(path, replace(SMALL, num_steps=1), resume=True)
    assert "antigravity" not in sys.modules
