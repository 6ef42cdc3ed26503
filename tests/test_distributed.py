"""Two processes with four devices each against one with eight, and what must end all processes alike."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from p3o_jax.writers import read_metrics

ROOT = Path(__file__).parents[1]
PROGRAM = [sys.executable, str(ROOT / "tests" / "distributed_program.py")]
LAUNCH = [sys.executable, str(ROOT / "launch" / "local_processes.py"), "--processes", "2", "--devices", "4"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}

pytestmark = pytest.mark.slow


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=ENVIRONMENT | environment)


def reports(output: str) -> list[dict]:
    return sorted((json.loads(line) for line in re.findall(r"\{.*\}", output)), key=lambda report: report["process"])


def rollouts(path: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (path / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict:
    """The same program in one process and in two: run directories, and what each of the two reports."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    of_one = run(*PROGRAM, str(one), JAX_NUM_CPU_DEVICES="8")
    of_two = run(*LAUNCH, *PROGRAM, str(two))
    for result in (of_one, of_two):
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return {"one": one / "run", "two": two / "run", "reports": reports(of_two.stdout)}


def test_two_processes_make_the_same_run(runs):
    """Rollouts token for token, losses to rounding; interrupted after two of four steps, and resumed."""
    one, two, of_two = runs.values()
    for step in (1, 2, 3, 4):
        for a, b in zip(rollouts(one, step), rollouts(two, step), strict=True):
            assert (a["prompt_index"], a["token_ids"], a["reward"]) == (b["prompt_index"], b["token_ids"], b["reward"])
            np.testing.assert_allclose(a["behaviour_log_probs"], b["behaviour_log_probs"], atol=1e-5)
    lines = read_metrics(one), read_metrics(two)
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]] == [0, 1, 2, 3, 4]
    for a, b in zip(*lines, strict=True):
        assert a.keys() == b.keys()
        for tag in a:
            if not tag.startswith("time/"):
                assert b[tag] == pytest.approx(a[tag], rel=1e-4, abs=1e-5), tag
    assert of_two[0]["loss"] == of_two[1]["loss"] == lines[1][-1]["loss/total"] != 0


def test_one_process_writes(runs):
    two = runs["two"]
    assert len((two / "command.txt").read_text().splitlines()) == 2  # started, and resumed
    assert len(list(two.glob("events.out.tfevents.*"))) == 2
    assert {path.name for path in (two / "checkpoints").iterdir()} == {"2", "4"}


def test_bad_data_on_one_host_is_skipped_on_all(runs):
    of_two = runs["reports"]
    assert len(of_two) == 2
    assert all(report["skipped"] and report["unchanged"] for report in of_two)


def test_an_error_on_one_host_is_an_error_on_all(runs):
    first, second = runs["reports"]
    assert first["occupied"].startswith("FileExistsError") and "holds another run" in first["occupied"]
    assert second["occupied"].startswith("ElsewhereError: process 0:") and "holds another run" in second["occupied"]
    assert second["broken"] == "ValueError: the verifier is broken"
    assert first["broken"] == "ElsewhereError: process 1: the verifier is broken"
    assert first["impossible"] == second["impossible"]
    assert "does not use each of the 8 devices once" in first["impossible"]


def test_a_wrong_configuration_ends_every_process_with_one_line(tmp_path):
    experiment = [sys.executable, "-m", "experiments.quickstart", "p3o", "--run-dir", str(tmp_path / "run")]
    result = run(*LAUNCH, *experiment, "--prompts-per-step", "12", "--minibatches", "2")
    assert result.returncode != 0
    lines = [line for line in result.stdout.splitlines() if "error:" in line]
    assert [line[:10] for line in sorted(lines)] == ["[0] error:", "[1] error:"]
    assert "Traceback" not in result.stdout
    assert not (tmp_path / "run").exists()
