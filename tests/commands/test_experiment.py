"""The command line: what it says when it is wrong, and what it starts when it is right."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.quickstart import VARIANTS
from p3o_jax.commands.experiment import parse, run_experiment, summary
from p3o_jax.devices.sharding import MeshShape
from p3o_jax.models.lora import Lora
from p3o_jax.models.stored.pretrained import Pretrained
from p3o_jax.objectives import P3O


def parsed(*arguments):
    return parse("quickstart", "Description.", VARIANTS, arguments)


def test_without_a_variant_all_of_them_run():
    runs = parsed("--num-steps", "3")
    assert list(runs) == list(VARIANTS)
    assert {run.config.num_steps for run in runs.values()} == {3}


def test_fields_are_flags():
    (run,) = parsed(
        "grpo", "--objective.clip-low", "0.1", "--task.length", "5", "--optimizer.learning-rate", "0.5",
        "--learner-temperature", "None", "--precision.weights", "bfloat16",
    ).values()  # fmt: skip
    assert run.config.objective.clip_low == 0.1
    assert run.config.task.length == 5
    assert run.config.optimizer.learning_rate == 0.5
    assert run.config.learner_temperature is None
    assert run.config.precision.weights == "bfloat16"
    assert parsed("p3o")["p3o"].config.objective == P3O()


@pytest.mark.usefixtures("unchecked")
def test_a_flag_of_a_part_that_is_not_there_makes_it():
    def config(*flags):
        return parse("name", "Description.", {"p3o": replace(VARIANTS["p3o"], warm_start=None)}, flags)["p3o"].config

    found = config("--sampler-mesh.tensor", "2", "--model.lora.rank", "3", "--pretrained.path", "x")
    assert found.sampler_mesh == MeshShape(tensor=2)
    assert found.model.lora == Lora(rank=3)
    assert found.pretrained == Pretrained("x")
    assert (config().sampler_mesh, config().model.lora, config().pretrained) == (None, None, None)
    with pytest.raises(SystemExit):  # its path is missing
        config("--pretrained.system_prompt", "sort")
    with pytest.raises(ValueError, match="warm_start is for a randomly initialised model"):
        parsed("p3o", "--pretrained.path", "x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ppo"], "unknown variant 'ppo'; choose from p3o, grpo"),
        (["--resume"], "need --run-dir"),
        (["--run-dir", "x"], "--run-dir needs a variant"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        parsed(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ppo"], "error: unknown variant 'ppo'"),
        (["p3o", "--minibatches", "5"], "does not divide into minibatches=5"),
        (["p3o", "--model.context-tokens", "8"], "exceed model.context_tokens=8"),
        (["p3o", "--objective.clip", "1"], "--objective.clip"),
        (["p3o", "--task.length", "1"], "length must be at least 2"),
    ],
)
def test_mistakes_end_with_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["quickstart", *arguments, "--run-dir", str(run_dir)])
    with pytest.raises(SystemExit) as ended:
        run_experiment("quickstart", "Description.", VARIANTS)
    # A text is printed by Python, which then exits with 1; a number comes with what the parser has printed.
    said, status = capsys.readouterr().err, ended.value.code
    assert message in (status if isinstance(status, str) else said)
    assert status not in (0, None)
    assert not run_dir.exists()


def test_a_program_that_is_wrongly_called_shows_no_traceback(tmp_path):
    command = [sys.executable, "-m", "experiments.quickstart", "p3o", "--staleness", "-1"]
    result = subprocess.run([*command, "--run-dir", str(tmp_path / "run")], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert result.stderr == "error: staleness must not be negative, got -1\n"


@pytest.mark.parametrize("started", ["-m experiments.quickstart", "experiments/quickstart.py"])
def test_a_command_is_shown_as_it_is_typed(started):
    root = Path(__file__).parents[2]
    command, environment = [sys.executable, *started.split(), "--help"], os.environ | {"PYTHONPATH": str(root)}
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root, env=environment).stdout
    assert f"usage: python {started} [VARIANT] [--flags]" in said
    assert f"flags: python {started} p3o --help" in said


@pytest.mark.usefixtures("unchecked")
def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit):
        parsed("p3o", "--help")
    text = capsys.readouterr().out
    for flag in (
        "--staleness",
        "--objective.kl",
        "--task.length",
        "--run-dir",
        "--optimizer.clip-norm",
        "--sampler-mesh.tensor",
    ):
        assert flag in text
    assert "Rollouts are sampled by the policy of this many rollout steps ago." in " ".join(
        text.replace("│", " ").split()
    )


def test_the_table_reads_what_the_runs_wrote(tmp_path):
    tmp_path.joinpath("metrics.jsonl").write_text(
        '{"step": 0, "eval/t/pass@1": 0.25, "eval/t/greedy": 0.5}\n'
        '{"step": 1, "policy/ess": 0.9, "policy/ess_min": 0.8}\n'
        '{"step": 2, "policy/ess": 0.7, "policy/ess_min": 0.6, "eval/t/pass@1": 0.75, "eval/t/greedy": 1.0}\n'
    )
    header, row = summary({"p3o": tmp_path}, {"p3o": 90.0}).splitlines()
    assert header.split() == ["variant", "pass@1", "before", "after", "greedy", "ESS", "mean", "ESS", "min", "minutes"]
    assert row.split() == ["p3o", "0.250", "0.750", "1.000", "0.800", "0.600", "1.5"]


@pytest.mark.parametrize("module", ["experiments.quickstart", "p3o_jax.commands.main"])
def test_output_that_nobody_reads_ends_quietly(module):
    """As by `| head`, which closes the pipe."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", module, "--help"]
    process = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write)
    assert process.returncode == 141
    assert process.stderr == ""
