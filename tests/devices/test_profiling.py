"""The trace of a step, opened as Perfetto does."""

from __future__ import annotations

import gzip
import json
import sys

import jax.numpy as jnp
import pytest

from p3o_jax.commands.experiment import parse
from p3o_jax.config import Config
from p3o_jax.devices.profiling import Profiler, parse_steps
from p3o_jax.runs.stopwatch import Stopwatch

PHASES = ("sample", "score", "learn", "evaluate", "write", "save")


def spans(run_dir) -> dict[str, list[dict]]:
    """The complete events of the only trace, by name."""
    (path,) = run_dir.glob("plugins/profile/*/*.trace.json.gz")
    found: dict[str, list[dict]] = {}
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if event.get("ph") == "X":
            found.setdefault(event["name"], []).append(event)
    return found


def test_the_phases_of_the_chosen_steps_are_in_the_trace(tmp_path):
    with Profiler(tmp_path, parse_steps("2:3")) as profiler:
        for step in range(1, 5):
            profiler.before(step)
            clock = Stopwatch(step, PHASES[0])
            for phase in PHASES[1:]:
                clock.begin(phase)
                jnp.arange(step).sum().block_until_ready()
            clock.end()
            profiler.after(step)
    found = spans(tmp_path)
    assert [event["args"]["step_num"] for event in found["step"]] == ["2", "3"]
    for phase in PHASES:
        assert len(found[phase]) == 2, phase
    for step, learn in zip(found["step"], found["learn"], strict=True):
        assert step["ts"] <= learn["ts"] and learn["ts"] + learn["dur"] <= step["ts"] + step["dur"]
    (for_tensorboard,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    assert for_tensorboard.stat().st_size > 0


def test_a_run_that_ends_early_leaves_its_trace(tmp_path):
    with Profiler(tmp_path, parse_steps("1:9")) as profiler:
        profiler.before(1)
        clock = Stopwatch(1, "sample")
        clock.end()
        profiler.after(1)
    assert len(spans(tmp_path)["sample"]) == 1


def test_without_steps_nothing_is_traced(tmp_path):
    with Profiler(tmp_path, parse_steps("")) as profiler:
        profiler.before(1)
        profiler.after(1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["3", "3:", "0:2", "4:3", "a:b", "1:2:3", "-1:2"])
def test_other_forms_are_refused(text):
    with pytest.raises(ValueError, match="give A:B, rollout steps from 1"):
        parse_steps(text)


def test_steps_that_the_run_does_not_make_are_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["experiment"])
    variants = {"one": Config(num_steps=5)}
    with pytest.raises(ValueError, match="--profile-steps 4:6: the run has 5 steps"):
        parse("experiment", "what it is", variants, ["one", "--profile-steps", "4:6"])
    runs = parse("experiment", "what it is", variants, ["one", "--profile-steps", "4:5"])
    assert parse_steps(runs["one"].profile_steps) == range(4, 6)
