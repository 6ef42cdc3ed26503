"""A real run that is killed again and again, and is in the end the run that nobody killed.

The moments are drawn by a seed that is printed; `P3O_KILL_SEED` draws others.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from p3o_jax.writers import read_metrics
from tests import kill_program

pytestmark = pytest.mark.long
SEED = int(os.environ.get("P3O_KILL_SEED", "0"))
MOMENTS = ("any", "restoring", "saving", "writing")


class Runs:
    """Starts the program as processes of their own, forked where everything is imported and nothing has run."""

    def __init__(self, log: Path):
        self._log = log
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.kill_program"])

    def start(self, run_dir: Path, *flags: str, devices: int = 2) -> multiprocessing.Process:
        self._log.unlink(missing_ok=True)
        arguments = ["tiny", "--run-dir", str(run_dir), "--resume", *flags]
        process = self._context.Process(target=kill_program.run, args=(arguments, str(self._log), devices))
        process.start()
        return process

    def finish(self, run_dir: Path, *flags: str, devices: int = 2) -> str:
        process = self.start(run_dir, *flags, devices=devices)
        process.join(timeout=300)
        assert process.exitcode == 0, self.said[-3000:]
        return self.said

    @property
    def said(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def wait_for(self, process: multiprocessing.Process, condition: Callable[[], bool]) -> None:
        """Until it holds or the process has ended."""
        while process.is_alive() and not condition():
            time.sleep(0.001)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("log") / "log")


class Whole(NamedTuple):
    """The run that nobody kills, and its times: moments are drawn in proportion to them, on any machine."""

    path: Path
    start_seconds: float
    step_seconds: float


@pytest.fixture(scope="module")
def whole(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    runs.finish(path.with_name("first"), "--num-steps", "1")  # compiles
    process, times = runs.start(path), []
    for said in ("now: entered", "now: saving"):
        runs.wait_for(process, lambda said=said: said in runs.said)
        times.append(time.monotonic())
    process.join(timeout=300)
    assert process.exitcode == 0, runs.said[-3000:]
    steps = kill_program.CONFIG.num_steps
    return Whole(path, times[1] - times[0], (time.monotonic() - times[1]) / steps)


def lines(path: Path) -> list[dict]:
    return [{tag: value for tag, value in line.items() if not tag.startswith("time/")} for line in read_metrics(path)]


def rollouts(path: Path) -> dict[str, list[dict]]:
    files = (path / "rollouts").iterdir()
    return {file.name: [json.loads(row) for row in file.read_text().splitlines()] for file in files}


def parameters(path: Path) -> dict:
    """The fingerprints of everything in the last checkpoint: parameters, moments, past policies."""
    meta = json.loads((path / "checkpoints" / str(kill_program.CONFIG.num_steps) / "meta" / "metadata").read_text())
    return {key: meta[key] for key in ("state", "past", "loop")}


def assert_same_run(path: Path, whole: Path) -> None:
    assert lines(path) == lines(whole)
    assert rollouts(path) == rollouts(whole)
    assert parameters(path) == parameters(whole)


def is_writing(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def wait_for_moment(runs: Runs, process, run_dir: Path, moment: str, whole: Whole, rng: np.random.Generator) -> None:
    """Until a random time after anything, or after something worth being killed in has begun; two steps on at most."""
    start, step = whole.start_seconds, whole.step_seconds
    wanted = int(rng.integers(1, 4)) if moment == "saving" else 1  # not always the first, so that the run gets on
    begun, seconds = {
        "any": (lambda: "now: entered" in runs.said, start + 2 * step),
        "restoring": (lambda: "now: restoring" in runs.said, start / 4),
        "saving": (lambda: runs.said.count("now: saving") >= wanted, step),
        "writing": (lambda: is_writing(run_dir), step),
    }[moment]
    runs.wait_for(process, begun)
    deadline = time.monotonic() + rng.uniform(0, seconds)
    runs.wait_for(process, lambda: time.monotonic() > deadline or runs.said.count("now: saving") > wanted + 1)


def test_a_run_killed_at_25_moments_is_the_run(runs, whole, tmp_path):
    rng, path, killed = np.random.default_rng(SEED), tmp_path / "run", {moment: 0 for moment in MOMENTS}
    while sum(killed.values()) < 25:
        moment = MOMENTS[sum(killed.values()) % len(MOMENTS)]
        if moment == "restoring" and not list((path / "checkpoints").glob("*")):
            moment = "saving"
        process = runs.start(path)
        wait_for_moment(runs, process, path, moment, whole, rng)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"ended before it was killed: {runs.said[-2000:]}"
        killed[moment] += 1
    said = runs.finish(path)
    print(f"seed {SEED}: killed {killed}")
    assert "damaged" not in said  # what is committed is whole
    assert_same_run(path, whole.path)
    leftover = [entry.name for entry in (path / "checkpoints").iterdir() if not entry.name.isdigit()]
    assert leftover == []


def test_a_run_asked_to_end_at_10_moments_is_the_run(runs, whole, tmp_path):
    rng, path, steps = np.random.default_rng(SEED + 1), tmp_path / "run", []
    for i in range(10):
        process = runs.start(path)
        runs.wait_for(process, lambda: "entered" in runs.said)
        wait_for_moment(runs, process, path, MOMENTS[i % len(MOMENTS)] if i else "any", whole, rng)
        asked = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        process.join(timeout=60)
        assert process.exitcode == 0, runs.said[-2000:]
        assert time.monotonic() - asked < 30
        (step,) = re.findall(r"asked to end: .* has a checkpoint of step (\d+); --resume continues", runs.said)
        steps.append(int(step))
    runs.finish(path)
    print(f"seed {SEED + 1}: ended after steps {steps}")
    assert steps == sorted(steps)
    assert_same_run(path, whole.path)


def test_on_another_mesh_it_is_the_run_to_rounding(runs, tmp_path):
    """Begun on two devices that share rows, continued on four that share weights, heads and rows, then on one."""
    expected, path = tmp_path / "expected", tmp_path / "run"
    runs.finish(expected, "--num-steps", "6")
    for last, devices, flags in ((2, 2, ()), (4, 4, ("--mesh.fsdp", "2", "--mesh.tensor", "2")), (6, 1, ())):
        runs.finish(path, "--num-steps", str(last), *flags, devices=devices)
    made, wanted = lines(path), lines(expected)
    assert [line["step"] for line in made] == [line["step"] for line in wanted] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(made, wanted, strict=True):
        assert a.keys() == b.keys()
        for tag in a:
            if tag.startswith(("loss/", "reward/", "rollout/", "optim/")) or tag == "policy/ess":
                assert a[tag] == pytest.approx(b[tag], rel=1e-4, abs=1e-6), tag
    for name, rows in rollouts(expected).items():
        for a, b in zip(rollouts(path)[name], rows, strict=True):
            assert (a["prompt_index"], a["token_ids"], a["reward"]) == (b["prompt_index"], b["token_ids"], b["reward"])
            np.testing.assert_allclose(a["behaviour_log_probs"], b["behaviour_log_probs"], atol=1e-5)
