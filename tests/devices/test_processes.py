"""What each process has of the rows; errors of several are in tests/test_distributed.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from p3o_jax.devices import processes


def mesh_of(owners) -> SimpleNamespace:
    """A mesh [row shards, tensor] whose devices belong to these processes."""
    owners = np.asarray(owners)
    devices = np.asarray([SimpleNamespace(process_index=int(owner)) for owner in owners.flat], object)
    return SimpleNamespace(devices=devices.reshape(owners.shape), shape={"tensor": owners.shape[1]})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("owners", "parts"),
    [
        ([[0], [0], [1], [1]], [(0, 2), (1, 2)]),
        ([[1], [0], [1], [0]], [(1, 2), (0, 2)]),  # by their first row shard, wherever the mesh has put them
        ([[0, 0], [1, 1]], [(0, 2), (1, 2)]),
        ([[0, 1], [2, 3]], [(0, 2), (0, 2), (1, 2), (1, 2)]),  # tensor groups across hosts: the same rows on both
        ([[0, 1]], [(0, 1), (0, 1)]),
    ],
)
def test_processes_that_hold_the_same_rows_feed_the_same_part(owners, parts, monkeypatch):
    for process, part in enumerate(parts):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert processes.row_part(mesh_of(owners)) == part


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("owners", [[[0, 0], [0, 1]], [[0], [0], [1]]])
def test_rows_that_do_not_divide_over_processes_are_refused(owners):
    with pytest.raises(ValueError, match=r"mesh: .* unevenly"):
        processes.row_part(mesh_of(owners))


def test_alone_an_error_is_itself():
    with pytest.raises(KeyError), processes.fail_together():
        raise KeyError("x")


def test_without_other_processes_the_command_line_says_what_to_set(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    command = [
        sys.executable,
        "-m",
        "experiments.quickstart",
        "p3o",
        "--distributed",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 1
    assert result.stderr.startswith("error: --distributed: no other processes found; set JAX_COORDINATOR_ADDRESS")
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_what_process_0_finds_is_known_to_all():
    root = Path(__file__).parents[2]
    launch = [sys.executable, str(root / "launch" / "local_processes.py"), "--processes", "2", "--devices", "1"]
    result = subprocess.run(
        [*launch, sys.executable, str(root / "tests" / "devices" / "of_process_0_program.py")],
        capture_output=True, text=True, timeout=120, cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "[0] told ValueError: row 3 of d.jsonl" in result.stdout
    assert "[1] told ElsewhereError: process 0: row 3 of d.jsonl" in result.stdout
