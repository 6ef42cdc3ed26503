from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import jax
import pytest

from p3o_jax.runs.directory import RunDirectory, environment, write_atomically

CONFIG = {"seed": 0, "num_steps": 60, "objective": {"class": "P3O", "kl": "k3"}, "mesh": {"data": 1}}
ARGV = ["python", "-m", "experiments.quickstart", "p3o", "--run-dir", "a b"]


def test_a_new_run_is_described(tmp_path):
    directory = RunDirectory.open(tmp_path / "runs" / "x", CONFIG, ARGV)
    assert directory.path == tmp_path / "runs" / "x"
    assert json.loads((directory.path / "config.json").read_text()) == CONFIG
    assert (directory.path / "command.txt").read_text() == "python -m experiments.quickstart p3o --run-dir 'a b'\n"
    (start,) = json.loads((directory.path / "environment.json").read_text())
    assert start["packages"]["jax"] == jax.__version__
    assert start["devices"] == {"kind": "cpu", "count": 8, "processes": 1}
    assert re.fullmatch(r"3\.\d+\.\d+\S*", start["python"])


def test_an_empty_directory_will_do(tmp_path):
    RunDirectory.open(tmp_path, CONFIG, ARGV)
    assert (tmp_path / "config.json").exists()


def test_another_run_is_not_overwritten(tmp_path):
    RunDirectory.open(tmp_path, CONFIG, ARGV)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(FileExistsError, match=r"holds another run: continue it with --resume, or") as caught:
        RunDirectory.open(tmp_path, {**CONFIG, "seed": 1}, ARGV)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="is not a run"):
        RunDirectory.open(tmp_path, CONFIG, ARGV)
    with pytest.raises(FileExistsError, match="is not a run"):
        RunDirectory.open(tmp_path / "thesis.tex", CONFIG, ARGV)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_only_one_process_at_a_time_writes_a_run(tmp_path):
    with RunDirectory.open(tmp_path, CONFIG, ARGV):
        with pytest.raises(BlockingIOError, match="is being written by another process"):
            RunDirectory.open(tmp_path, CONFIG, ARGV, resume=True)
        assert (tmp_path / "command.txt").read_text().count("\n") == 1
    with RunDirectory.open(tmp_path, CONFIG, ARGV, resume=True):
        pass


def test_a_process_that_was_killed_holds_nothing(tmp_path):
    program = f"""
import os, signal
from pathlib import Path
from p3o_jax.runs.directory import RunDirectory
with RunDirectory.open(Path({str(tmp_path)!r}), {CONFIG!r}, []):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == -signal.SIGKILL
    assert (tmp_path / "lock").exists()
    with RunDirectory.open(tmp_path, CONFIG, ARGV, resume=True):
        pass


def test_resuming_keeps_a_record_of_every_start(tmp_path):
    RunDirectory.open(tmp_path, CONFIG, ARGV)
    RunDirectory.open(tmp_path, CONFIG, [*ARGV, "--resume"], resume=True)
    assert (tmp_path / "command.txt").read_text().count("\n") == 2
    assert len(json.loads((tmp_path / "environment.json").read_text())) == 2


def test_a_longer_run_may_be_resumed_and_its_config_is_kept(tmp_path):
    RunDirectory.open(tmp_path, CONFIG, ARGV)
    RunDirectory.open(tmp_path, {**CONFIG, "num_steps": 90}, ARGV, resume=True)
    assert json.loads((tmp_path / "config.json").read_text())["num_steps"] == 90


def test_another_configuration_is_not_resumed_and_the_fields_are_named(tmp_path):
    RunDirectory.open(tmp_path, CONFIG, ARGV)
    changed = {**CONFIG, "num_steps": 90, "seed": 1, "objective": {"class": "Grpo", "clip_low": 0.2}}
    with pytest.raises(ValueError, match="was started with another configuration") as caught:
        RunDirectory.open(tmp_path, changed, ARGV, resume=True)
    message = str(caught.value)
    for field in (
        "seed (was 0, now 1)",
        "objective.class (was 'P3O', now 'Grpo')",
        "objective.kl (was 'k3', now 'absent')",
        "objective.clip_low (was 'absent', now 0.2)",
    ):
        assert field in message
    assert "num_steps" not in message
    assert "\n" not in message
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG


def test_tuples_in_a_configuration_do_not_differ_from_the_lists_they_became(tmp_path):
    config = {**CONFIG, "edges": (1, 2)}
    RunDirectory.open(tmp_path, config, ARGV)
    RunDirectory.open(tmp_path, config, ARGV, resume=True)


@pytest.mark.parametrize("name", ["missing", ""])
def test_the_command_that_continues_a_run_may_be_the_one_that_starts_it(tmp_path, name):
    RunDirectory.open(tmp_path / name, CONFIG, [*ARGV, "--resume"], resume=True)
    RunDirectory.open(tmp_path / name, CONFIG, [*ARGV, "--resume"], resume=True)
    assert (tmp_path / name / "command.txt").read_text().count("--resume") == 2


@pytest.mark.parametrize("left", [["command.txt"], ["command.txt", "environment.json"], ["config.json.tmp"]])
def test_a_start_that_was_cut_short_is_started_again(tmp_path, left):
    for name in left:
        tmp_path.joinpath(name).write_text("[]")
    RunDirectory.open(tmp_path, CONFIG, ARGV, resume=True)
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG


def test_resume_does_not_adopt_a_directory_of_something_else(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="is not a run"):
        RunDirectory.open(tmp_path, CONFIG, ARGV, resume=True)


@pytest.mark.parametrize("name", ["config.json", "environment.json"])
def test_a_damaged_record_is_named(tmp_path, name):
    RunDirectory.open(tmp_path, CONFIG, ARGV)
    (tmp_path / name).write_text('{"seed":')
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path / name))} is damaged"):
        RunDirectory.open(tmp_path, CONFIG, ARGV, resume=True)


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    directory = RunDirectory.open(tmp_path / "run", CONFIG, ARGV)
    assert directory.checkpoints == tmp_path / "run" / "checkpoints"
    assert not directory.path.exists()


def test_errors_of_the_disk_name_the_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=re.escape(f"cannot write the run directory {tmp_path / 'file' / 'run'}")):
        RunDirectory.open(tmp_path / "file" / "run", CONFIG, ARGV)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_atomically(path, "old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_environment_records_what_jax_and_xla_were_told(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/x")
    monkeypatch.setenv("SECRET", "not for the record")
    record = environment()
    assert record["variables"]["XLA_FLAGS"] == "--xla_dump_to=/x"
    assert "SECRET" not in json.dumps(record)
