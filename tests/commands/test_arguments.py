"""Arguments that verbs share: the same names, meanings and places."""

from __future__ import annotations

import json
import sys

import pytest
import tyro

from p3o_jax.commands import eval as eval_command
from p3o_jax.commands import export, main, probe, report, runs, sample
from p3o_jax.devices import sharding
from p3o_jax.policies import load_policy

MODEL_VERBS = {"eval": eval_command, "export": export, "probe": probe, "sample": sample}


def helped(verb: str, monkeypatch, capsys) -> str:
    monkeypatch.setattr(sys, "argv", ["p3o", verb, "--help"])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", main.VERBS)
def test_a_usage_names_what_is_wanted(verb, monkeypatch, capsys):
    text = helped(verb, monkeypatch, capsys)
    assert "STR" not in text.replace("STRONG", "")
    usage = text.splitlines()[0]
    assert ("MODEL" in usage) == (verb in MODEL_VERBS)


def test_what_verbs_have_in_common_is_called_and_read_alike(monkeypatch, capsys):
    for flag, metavar, verbs in (
        ("--samples-per-prompt", "INT", ("eval", "probe", "sample")),
        ("--prompts-per-batch", "INT", ("eval", "probe")),
        ("--out", "DIR", ("eval", "probe")),
        ("--task", "TASK", ("eval", "probe")),
        ("--trust", "MODULE", tuple(MODEL_VERBS)),
        ("--system-prompt", "TEXT", tuple(MODEL_VERBS)),
        ("--precision", "WEIGHTS[/...]", ("eval", "sample")),
    ):
        for verb in verbs:
            assert f"{flag} {metavar}" in helped(verb, monkeypatch, capsys), (flag, verb)


@pytest.mark.parametrize(
    ("of", "arguments"),
    [
        (probe, ["--precisions", "int8/int8,float32", "--staleness", "0,1", "--temperatures", "1,1.5", "RUN"]),
        (probe, ["RUN", "--temperatures", "1,1.5", "--precisions", "int8/int8,float32", "--staleness", "0,1"]),
    ],
)
def test_an_option_of_several_values_leaves_the_model_alone(of, arguments):
    asked = tyro.cli(of.Arguments, args=arguments)
    assert asked.model == "RUN"
    assert (asked.precisions, asked.staleness, asked.temperatures) == (("int8/int8", "float32"), (0, 1), (1.0, 1.5))


def test_options_before_the_model():
    asked = tyro.cli(eval_command.Arguments, args=["--task", "a:b", "--trust", "m", "--task", "c:d", "--greedy", "RUN"])
    assert (asked.model, asked.task, asked.trust) == ("RUN", ("a:b", "c:d"), ("m",))
    asked = tyro.cli(sample.Arguments, args=["--stop-ids", "1,2", "RUN", "a prompt"])
    assert (asked.model, asked.prompt, asked.stop_ids) == ("RUN", "a prompt", (1, 2))
    assert tyro.cli(report.Arguments, args=["--out", "x.html", "A", "B"]).runs[-1].name == "B"
    assert tyro.cli(runs.Arguments, args=["here"]).directory.name == "here"


@pytest.mark.parametrize(
    ("of", "arguments"),
    [
        (probe, ["--staleness", "0", "1", "RUN"]),  # the values would end who knows where
        (probe, ["RUN", "--precisions", "int8", "int4"]),
        (probe, ["RUN", "--staleness", ""]),
        (probe, ["RUN", "--staleness", "1,x"]),
        (eval_command, ["RUN", "--samples", "3"]),
    ],
)
def test_what_cannot_be_read_is_refused(of, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        tyro.cli(of.Arguments, args=arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Unrecognized options" in said or "Error parsing --staleness" in said


def test_a_random_model_is_a_model_everywhere(tmp_path, capsys):
    """Its own task, another experiment's, and a written model; what is sampled from it is not asked for by name."""
    flags = ["--num-prompts", "8", "--samples-per-prompt", "2", "--prompts-per-batch", "8", "--response-tokens", "2"]
    for out, task in (("own", []), ("other", ["--task", "quickstart:grpo", "--task", "p3o_jax.tasks:SortDigits"])):
        eval_command.run([*flags, *task, "random:quickstart", "--out", str(tmp_path / out)])
        settings = json.loads((tmp_path / out / "sort_digits.json").read_text())["settings"]
        assert (settings["policy"], settings["samples"]) == ("random:quickstart", 2)
    probe.run([*flags, "--task", "quickstart", "--precisions", "float32", "random:quickstart", "--out", str(tmp_path)])
    sample.run(["--response-tokens", "2", "random:quickstart", "012="])
    export.run(["random:quickstart", str(tmp_path / "exported")])
    model = load_policy(str(tmp_path / "exported"), sharding.make_mesh())
    assert model.model.num_layers == 2 and model.tokenizer.decode(model.tokenizer.encode("012=")) == "012="
