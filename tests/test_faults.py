"""What happens to a run when a host is stopped or killed, or a disk is full."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from p3o_jax.runs import status as run_status
from p3o_jax.runs.checkpoint import steps_in
from p3o_jax.writers import read_metrics

ROOT = Path(__file__).parents[1]
PROGRAM = [sys.executable, str(ROOT / "tests" / "faults_program.py"), "tiny"]
# After which jax.distributed gives a process up; a broken collective is noticed sooner, if it is.
HEARTBEAT_SECONDS = 100
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST}


class Process:
    """The program, its output in a file."""

    def __init__(self, log: Path, *flags: str, **environment: str):
        self._log = log
        with open(log, "w") as file:
            command = [*PROGRAM, *flags]
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=ENVIRONMENT | environment
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_until(self, condition: Callable[[], bool], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.said[-3000:]
            assert time.monotonic() < deadline, f"not within {seconds} s: {self.said[-3000:]}"
            time.sleep(0.02)

    def wait_for(self, text: str, count: int) -> None:
        self.wait_until(lambda: self.said.count(text) >= count)

    def ends(self, seconds: float) -> int:
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {seconds} s: {self.said[-3000:]}") from None


@contextmanager
def two(tmp_path: Path, *flags: str):
    """Two processes of two devices each, in the middle of their run."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    common = {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": "2", "JAX_NUM_CPU_DEVICES": "2"}
    arguments = ["--distributed", "--resume", "--run-dir", str(tmp_path / "run"), *flags]
    processes = [
        Process(tmp_path / f"log_{index}", *arguments, **common, JAX_PROCESS_ID=str(index)) for index in range(2)
    ]
    try:
        for process in processes:
            process.wait_for("now: learning", 4)
        yield processes
    finally:
        for process in processes:
            process.process.kill()
            process.process.wait()


@pytest.mark.long
def test_sigterm_to_one_saves_on_both_at_the_same_step(tmp_path):
    """To the second; then a restart with the same command goes on, and SIGTERM to the first does the same."""
    ended, checkpoints = [], tmp_path / "run" / "checkpoints"
    for asked in (1, 0):
        with two(tmp_path) as processes:
            started = time.monotonic()
            processes[asked].process.send_signal(signal.SIGTERM)
            assert [process.ends(60) for process in processes] == [0, 0]
            assert time.monotonic() - started < 30
            found = [re.findall(r"asked to end: .* a checkpoint of step (\d+)", process.said) for process in processes]
            assert found[0] == found[1] and len(found[0]) == 1
            ended.append(int(found[0][0]))
            assert steps_in(checkpoints)[-1] == ended[-1]
            assert ("is damaged" in processes[0].said) == (asked == 0) and "is damaged" not in processes[1].said
        if asked == 1:  # then one host cannot read its part of the newest checkpoint, and both fall back
            (checkpoints / str(ended[-1]) / "state" / "ocdbt.process_1" / "manifest.ocdbt").unlink()
    # And one process alone goes on from there.
    flags = ("--resume", "--run-dir", str(tmp_path / "run"), "--num-steps", str(ended[1] + 2))
    alone = Process(tmp_path / "log", *flags, JAX_NUM_CPU_DEVICES="4")
    assert alone.ends(120) == 0, alone.said[-3000:]
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(1, ended[1] + 3))


@pytest.mark.long
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_host_that_stops_is_reported_by_the_other_within_the_limit(tmp_path, stopped):
    """Process 0, which all depend on, or the other; the one that reports is told to end the run."""
    limit = 8
    with two(tmp_path, "--watchdog-seconds", str(limit), "--watchdog-ends") as processes:
        other = processes[1 - stopped]
        at = time.monotonic()
        processes[stopped].process.send_signal(signal.SIGSTOP)
        assert other.ends(2 * limit) == 1
        assert time.monotonic() - at < 1.5 * limit  # a look every tenth of it
        (line,) = [line for line in other.said.splitlines() if line.startswith("watchdog:")]
        assert re.match(
            rf"watchdog: process {1 - stopped} \(.+\): step \d+ has taken \d+ s, the limit is 8 s; phase: ", line
        )
        silent = "process 0, which all depend on, has not answered" if stopped == 0 else "silent: process 1 ("
        assert silent in line
    status = run_status.read(tmp_path / "run")
    assert stopped == 0 or (status["state"] == "failed" and status["reason"] == line)


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_a_host_that_is_killed_ends_the_other_with_a_message(tmp_path, killed):
    with two(tmp_path) as processes:
        other = processes[1 - killed]
        processes[killed].process.kill()
        assert other.ends(HEARTBEAT_SECONDS + 50) != 0
        # The collective that is broken notices, or the service of process 0, by which JAX ends itself, or both at once.
        ours = f"error: process {1 - killed}: another process is lost, and this one ends with it ("
        of_jax = "Terminating process because the JAX distributed service detected fatal errors. This most likely"
        assert (other.said.count(ours), other.said.count(of_jax)) in ((1, 0), (0, 1), (1, 1)), other.said[-3000:]
        assert "Traceback" not in other.said


@contextmanager
def small_disk(path: Path, size: str):
    """A file system of its own, as root."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small disk needs root: mount says {mounted.stderr.decode().strip()!r}; nothing was checked")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path, but: int) -> Path:
    """Takes all the space but so many bytes, while nobody writes."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        with suppress(OSError):
            while file.write(bytes(4096)):
                pass
        file.truncate(file.tell() - but)
    return filler


@pytest.mark.long
@pytest.mark.parametrize("during", ["a save", "logging"])
def test_a_full_disk_ends_the_run_in_one_line_and_loses_nothing(tmp_path, during):
    """Room is left for less than a checkpoint, or for nothing at all. With space again the run goes on."""
    flags = ("--num-steps", "400", "--save-every", "4")
    with small_disk(tmp_path / "disk", "32m") as disk:
        run_dir = disk / "run"
        process = Process(tmp_path / "log", "--resume", "--run-dir", str(run_dir), *flags)
        try:
            process.wait_until(lambda: 4 in steps_in(run_dir / "checkpoints"))
            process.process.send_signal(signal.SIGSTOP)
            filler = fill(disk, but=65_536 if during == "a save" else 0)  # a checkpoint takes more
            process.process.send_signal(signal.SIGCONT)
            assert process.ends(60) == 1
        finally:
            process.process.kill()
        lines = [line for line in process.said.splitlines() if line.startswith("error:")]
        assert len(lines) == 1 and "No space left on device" in lines[0], process.said[-3000:]
        assert "Traceback" not in process.said
        if during == "a save":
            assert re.match(rf"error: cannot write checkpoint {run_dir}/checkpoints/\d+: .* the newest whole", lines[0])
        left = steps_in(run_dir / "checkpoints")[-1]
        filler.unlink()
        flags = (*flags[:1], str(left + 2), *flags[2:])
        again = Process(tmp_path / "again", "--resume", "--run-dir", str(run_dir), *flags)
        assert again.ends(120) == 0, again.said[-3000:]
        assert "damaged" not in again.said
        assert [line["step"] for line in read_metrics(run_dir)] == list(range(1, left + 3))
        assert run_status.read(run_dir)["state"] == "finished"


@pytest.mark.long
def test_a_directory_that_cannot_be_written_is_said_to_be_so(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        process = Process(tmp_path / "log", "--run-dir", str(disk / "run"))
        assert process.ends(60) == 1
        lines = process.said.splitlines()
        assert lines[-1].startswith(f"error: cannot write the run directory {disk / 'run'}: [Errno 30] Read-only")
        assert "Traceback" not in process.said
