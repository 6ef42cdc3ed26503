"""The tool on projects outside this repository, in processes of their own, as `p3o` runs: without their directory."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ("-P", "-m", "p3o_jax.commands.main")  # -P: as for an installed command, the working directory is not searched
FEW = ("--num-prompts", "4", "--samples-per-prompt", "2", "--prompts-per-batch", "4", "--response-tokens", "3")

IN_ONE_FILE = """
from dataclasses import dataclass
from pathlib import Path

from p3o_jax.commands.experiment import run_experiment
from p3o_jax.config import Config
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.objectives import P3O
from p3o_jax.rewards.base import Reward
from p3o_jax.tasks import SortDigits


@dataclass(frozen=True)
class FirstDigit(Reward):  # called in processes of its own
    def __call__(self, prompt, completion):
        return float(completion[:1] == prompt.answer[:1])


@dataclass(frozen=True)
class Easier(SortDigits):
    reward: Reward = FirstDigit()


@dataclass(frozen=True)
class Mine(P3O):
    pass


VARIANTS = {
    "small": Config(
        task=Easier(length=3),
        objective=Mine(),
        model=TransformerConfig(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32),
        prompts_per_step=4,
        samples_per_prompt=2,
        num_steps=1,
        evaluate_every=0,
        evaluation_prompts=4,
    )
}

if __name__ == "__main__":
    run_experiment("exp", "All in one file.", VARIANTS)
else:
    Path(__file__).with_name("imported").touch()
"""


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def done(*arguments: str, cwd: Path) -> str:
    result = python(*arguments, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def refused(*arguments: str, cwd: Path) -> str:
    result = python(*arguments, cwd=cwd)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    return result.stderr.strip()


def test_a_project_is_begun_in_an_empty_directory_only(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "python experiment.py" in done(*TOOL, "init", "empty", cwd=tmp_path)
    written = {path.name for path in (tmp_path / "empty").iterdir()}
    assert written == {path.name for path in (ROOT / "p3o_jax" / "project_template").iterdir()} - {"__pycache__"}
    (tmp_path / "file").touch()
    for directory in ("empty", "file"):
        wanted = f"error: {directory} is not an empty directory: give another"
        assert refused(*TOOL, "init", directory, cwd=tmp_path) == wanted


@pytest.mark.slow
def test_a_project_that_is_begun_does_all_that_its_readme_says(tmp_path):
    done(*TOOL, "init", "deep/mine", cwd=tmp_path)
    mine = tmp_path / "deep" / "mine"
    assert " passed" in done("-m", "pytest", "-q", cwd=mine)
    flags = ("--num-steps", "2", "--warm-start.num-steps", "4", "--evaluation-prompts", "4", "--run-dir", "runs/a")
    done("experiment.py", "mine", *flags, cwd=mine)
    assert shlex.split((mine / "runs/a/command.txt").read_text()) == [sys.executable, "experiment.py", "mine", *flags]
    assert "2/2" in done(*TOOL, "runs", cwd=mine)
    assert "1 runs in 1 variants" in done(*TOOL, "report", "runs", cwd=mine)
    done(*TOOL, "sample", "random:experiment:p3o", "abc=", "--response-tokens", "3", cwd=mine)
    done(*TOOL, "export", "runs/a", "exported", cwd=mine)
    done(*TOOL, "probe", "runs/a", "--trust", "task", "--precisions", "float32", *FEW, cwd=mine)
    done(*TOOL, "eval", "runs/a", "--trust", "task", *FEW, "--out", "evaluated", cwd=mine)
    assert json.loads((mine / "evaluated" / "reversal.json").read_text())["settings"]["step"] == 2
    assert refused(*TOOL, "eval", "runs/a", cwd=mine).endswith("if you trust that, give --trust task")


@pytest.mark.slow
def test_an_experiment_in_one_file(tmp_path):
    """Its classes are `__main__`'s when it runs, and `exp`'s to everything else, which asks before it imports them."""
    below = tmp_path / "below"
    below.mkdir()
    (below / "exp.py").write_text(IN_ONE_FILE)
    flags = ("small", "--run-dir", "run")
    done("below/exp.py", *flags, cwd=tmp_path)
    done("below/exp.py", *flags, "--resume", "--num-steps", "2", cwd=tmp_path)
    (below / "imported").unlink(missing_ok=True)  # the processes of its reward did
    run = tmp_path / "run"
    starts = [shlex.split(line)[1:] for line in (run / "command.txt").read_text().splitlines()]
    assert starts == [["below/exp.py", *flags], ["below/exp.py", *flags, "--resume", "--num-steps", "2"]]
    config = json.loads((run / "config.json").read_text())
    assert (config["task"]["class"], config["task"]["reward"]["class"]) == ("exp:Easier", "exp:FirstDigit")
    (program,) = {json.dumps(start["program"]) for start in json.loads((run / "environment.json").read_text())}
    recorded = {"module": "exp", "directory": str(below), "working_directory": str(tmp_path)}
    assert json.loads(program) == recorded

    (tmp_path / "prompts.txt").write_text("012=\n345=\n678=\n901=\n")
    done(*TOOL, "sample", "run", "012=", "--response-tokens", "3", cwd=tmp_path)
    done(*TOOL, "probe", "run", "--prompts", "prompts.txt", "--precisions", "float32", *FEW, cwd=tmp_path)
    assert refused(*TOOL, "probe", "run", cwd=tmp_path).endswith("if you trust that, give --trust exp")
    assert not (below / "imported").exists()

    result = python(*TOOL, "eval", "run", "--trust", "exp", *FEW, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"exp: looked for in {below}, as the run did\n" in result.stderr
    assert (below / "imported").exists()
