"""What a run says of itself, and what is found out of one that cannot say it any more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from p3o_jax.commands import runs
from p3o_jax.runs import status as run_status
from p3o_jax.runs.preemption import Preempted
from p3o_jax.runs.status import RunStatus


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (None, "finished", ""),
        (Preempted("asked"), "stopped", "asked to end"),
        (KeyboardInterrupt(), "stopped", "interrupted"),
        (ValueError("first line\nsecond"), "failed", "first line"),
        (RuntimeError(), "failed", "RuntimeError"),
    ],
)
def test_how_a_run_ended(tmp_path, error, state, reason):
    with suppress(BaseException), RunStatus(tmp_path, 9) as status:
        assert run_status.read(tmp_path)["state"] == "running"
        status.update(3)
        if error is not None:
            raise error
    found = run_status.read(tmp_path)
    assert (found["state"], found["reason"], found["step"], found["num_steps"]) == (state, reason, 3, 9)


def test_a_killed_run_is_lost_and_not_running(tmp_path):
    program = f"""
import os, signal, sys
from p3o_jax.runs.status import RunStatus
with RunStatus({str(tmp_path)!r}, 9):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not waited for
    assert run_status.read(tmp_path)["state"] == "lost"
    process.wait()
    assert run_status.read(tmp_path)["state"] == "lost"


@pytest.mark.parametrize(("silent_seconds", "state"), [(60, "running"), (7200, "lost")])
def test_a_run_elsewhere_is_running_while_it_is_heard_of(tmp_path, silent_seconds, state):
    with RunStatus(tmp_path, 9):
        status = json.loads((tmp_path / "status.json").read_text())
    status |= {"state": "running", "host": "elsewhere", "time": time.time() - silent_seconds}
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert run_status.read(tmp_path)["state"] == state


def test_a_disabled_status_writes_nothing(tmp_path):
    with RunStatus(tmp_path, 9, enabled=False) as status:
        status.update(1)
    assert list(tmp_path.iterdir()) == []


def test_runs_are_listed(tmp_path, capsys):
    for name, age in (("b", 1), ("deep/a", 9)):
        path = tmp_path / name
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
        os.utime(path / "config.json", (time.time() - age, time.time() - age))
    with RunStatus(tmp_path / "b", 60):
        pass
    (tmp_path / "b" / "metrics.jsonl").write_text(
        '{"step": 1, "policy/ess": 0.5, "reward/mean": 0.25}\n{"step": 12, "policy/ess": 0.9876}\n'
    )
    runs.run([str(tmp_path)])
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "step", "reward", "ESS", "state"]
    assert first.split() == ["deep/a", "0", "-", "-", "unknown:", "no", "readable", "status.json"]
    assert second.split() == ["b", "12/60", "0.250", "0.988", "finished"]
    with pytest.raises(ValueError, match="no runs in"):
        runs.run([str(tmp_path / "b" / "none")])


def test_a_run_that_fails_before_it_makes_a_step_keeps_the_step_it_had_reached(tmp_path):
    with RunStatus(tmp_path, 60) as status:
        status.update(12)
    with suppress(ValueError), RunStatus(tmp_path, 60):
        assert run_status.read(tmp_path)["step"] == 12
        raise ValueError("at once")
    assert (run_status.read(tmp_path)["state"], run_status.read(tmp_path)["step"]) == ("failed", 12)
    (tmp_path / "status.json").write_text('{"step": "many"}')
    with RunStatus(tmp_path, 60):
        assert run_status.read(tmp_path)["step"] == 0


def test_a_reason_ends_at_the_end_of_its_line_only(tmp_path):
    with suppress(ValueError), RunStatus(tmp_path, 9):
        raise ValueError("a\u2028b\x85c\nd")
    assert run_status.read(tmp_path)["reason"] == "a\u2028b\x85c"
