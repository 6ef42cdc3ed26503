"""What a run's config.json names is not imported, unless it is trusted by name."""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
import pytest

from p3o_jax.commands import eval as eval_command
from p3o_jax.commands import probe, sample
from p3o_jax.config import Config, from_json, load, load_architecture, load_task, to_json
from p3o_jax.config_json import UntrustedError
from p3o_jax.devices import sharding
from p3o_jax.learner.nonfinite import read_dump
from p3o_jax.policies import load_policy
from p3o_jax.tasks import Dataset, SortDigits
from p3o_jax.tokenizers.small import tokenizer_from_json, tokenizer_to_json
from p3o_jax.tokenizers.text import ByteTokenizer, CharTokenizer
from tests.small_run import SMALL, run

MODULE = """
from dataclasses import dataclass
from pathlib import Path
from p3o_jax.tasks import SortDigits
from p3o_jax.objectives import P3O
Path({mark!r}).touch()

@dataclass(frozen=True)
class Mine(SortDigits):
    pass

@dataclass(frozen=True)
class MyObjective(P3O):
    pass

def make_mark(prompt, completion):
    Path({mark!r}).touch()
    return 1.0
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A module that leaves a mark when it is imported, and the mark."""
    mark, name = tmp_path / "mark", f"hostile_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(mark=str(mark)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name, mark
    sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("trust") / "run"
    run(path, SMALL, devices=jax.devices()[:1])
    return path


def with_task(path, task: dict) -> dict:
    config = json.loads((path / "config.json").read_text())
    return config | {"task": task}


def changed(path, to, **fields):
    """A copy of a run whose configuration says something else."""
    import shutil

    shutil.copytree(path, to)
    config = json.loads((to / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps(config))
    return to


def dataset(reward: dict) -> dict:
    return to_json(Config(task=Dataset("d.jsonl")))["task"] | {"reward": reward}


def cases(module: str) -> dict[str, dict]:
    function = {"class": "p3o_jax.rewards.base:Function", "path": f"{module}:make_mark", "arguments": {}}
    part = {"name": "a", "reward": function, "weight": 1.0}
    return {
        "task": {"task": {"class": f"{module}:Mine", "length": 3}},
        "objective": {"objective": {"class": f"{module}:MyObjective"}},
        "function": {"task": dataset(function)},
        "within a sum": {"task": dataset({"class": "p3o_jax.rewards.base:WeightedSum", "parts": [part]})},
        "re-exported": {"task": dataset(function | {"class": "p3o_jax.rewards:Function"})},
    }


@pytest.mark.parametrize("case", cases("x"))
def test_nothing_is_imported_that_is_not_trusted(tmp_path, hostile, case):
    name, mark = hostile
    data = json.loads(json.dumps(to_json(SMALL))) | cases(name)[case]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UntrustedError, match=rf"config\.json: .*give --trust {name}\b") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(f"if you trust that, give --trust {name}")
    with pytest.raises(UntrustedError):
        load(path, trusted=[name[:-1], f"{name}.sub"])
    assert not mark.exists() and name not in sys.modules
    assert load_architecture(path).model == SMALL.model
    assert not mark.exists()
    load(path, trusted=[name])
    assert mark.exists()


def test_a_trusted_module_that_is_not_there(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_json(SMALL) | {"task": {"class": "not_there:Mine"}}))
    with pytest.raises(
        ValueError, match=r"cannot import 'not_there', for not_there:Mine: .*; run p3o where it can be "
    ):
        load(path, trusted=["not_there"])
    path.write_text(json.dumps(to_json(SMALL) | {"task": {"class": "__main__:Mine"}}))
    with pytest.raises(ValueError, match="'__main__:Mine' was defined where nothing has a name, as in a notebook"):
        load(path)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"class": "os:system"}, "not a dataclass of the kind Task"),
        ({"class": "p3o_jax.config:Config"}, "not a dataclass of the kind Task"),
        ({"class": "p3o_jax.rewards:NumericMatch"}, "not a dataclass of the kind Task"),
        ({"class": "p3o_jax.tasks.base:Task"}, "not a dataclass of the kind Task"),
        ({"class": "p3o_jax.none:Task"}, "cannot import 'p3o_jax.none'"),
        ({"class": "p3o_jax..tasks:Task"}, "cannot import"),
        ({"class": ""}, "there can be no module ''"),
        ({"class": "x; rm -rf ~:Task"}, "there can be no module 'x; rm -rf ~'"),
        ({"class": "a\nb:Task"}, r"there can be no module 'a.nb'"),
        ({"class": 7}, "an object with the name of a Task"),
        ("os:system", "an object with the name of a Task"),
        (None, "an object with the name of a Task"),
        (dataset({"class": "p3o_jax.rewards:Function", "path": "os:system", "arguments": {}}), "give --trust os"),
        (
            dataset({"class": "p3o_jax.rewards:Function", "path": "p3o_jax.config:load", "arguments": {}}),
            "give --trust p3o_jax.config",
        ),
    ],
)
def test_only_what_is_wanted_is_made(task, message):
    with pytest.raises(ValueError, match=message):
        from_json(json.loads(json.dumps(to_json(SMALL))) | {"task": task})


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "1", "{", ""])
def test_a_file_that_is_no_configuration(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    for read in (load, load_architecture, load_task):
        with pytest.raises(ValueError, match=r"config\.json"):
            read(tmp_path / "config.json")


def test_a_policy_needs_no_task(a_run, tmp_path, hostile, capsys):
    name, mark = hostile
    copy = changed(a_run, tmp_path / "copy", task={"class": f"{name}:Mine"}, objective={"class": f"{name}:MyObjective"})
    policy = load_policy(str(copy), sharding.make_mesh(devices=jax.devices()[:1]))
    assert policy.tokenizer == SortDigits().tokenizer and policy.step == 4
    for ask in (lambda: policy.config, lambda: policy.task):
        with pytest.raises(UntrustedError, match=f"give --trust {name}"):
            ask()
    sample.run([str(copy), "012=", "--response-tokens", "4"])
    (tmp_path / "prompts.txt").write_text("012=\n345=\n")
    flags = ["--precisions", "float32", "--samples-per-prompt", "2", "--mesh.data", "1", "--prompts-per-batch", "8"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"{i:03}=\n" for i in range(8)))
    flags = ["--precisions", "float32", "--samples-per-prompt", "2", "--prompts-per-batch", "8"]
    probe.run([str(copy), "--prompts", str(prompts), "--out", str(tmp_path / "probe"), *flags])
    assert not mark.exists()
    for command, of_task in ((eval_command, []), (probe, flags)):
        with pytest.raises(UntrustedError, match=f"{name}:Mine' is not .* give --trust {name}"):
            command.run([str(copy), *of_task])
    assert not mark.exists()
    wanted = [
        "--num-prompts",
        "8",
        "--samples-per-prompt",
        "1",
        "--prompts-per-batch",
        "8",
        "--out",
        str(tmp_path / "out"),
    ]
    eval_command.run([str(copy), "--trust", "another.module", "--trust", name, *wanted])
    assert mark.exists() and (tmp_path / "out" / "sort_digits.json").exists()


def test_an_objective_of_ones_own_does_not_matter_to_an_evaluation(a_run, tmp_path, hostile):
    name, mark = hostile
    copy = changed(a_run, tmp_path / "copy", objective={"class": f"{name}:MyObjective"})
    flags = ["--num-prompts", "8", "--samples-per-prompt", "1", "--prompts-per-batch", "8"]
    eval_command.run([str(copy), *flags, "--out", str(tmp_path / "out")])
    assert not mark.exists()


def test_a_run_of_an_earlier_version_has_its_tasks_tokenizer(a_run, tmp_path, hostile):
    name, mark = hostile
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    copy = changed(a_run, tmp_path / "copy")
    (copy / "tokenizer.json").unlink()
    assert load_policy(str(copy), mesh).tokenizer == SortDigits().tokenizer
    hostile_copy = changed(copy, tmp_path / "hostile", task={"class": f"{name}:Mine", "length": 3})
    with pytest.raises(UntrustedError, match=f"give --trust {name}"):
        load_policy(str(hostile_copy), mesh)
    assert not mark.exists()
    assert load_policy(str(hostile_copy), mesh, trusted=[name]).tokenizer == SortDigits().tokenizer
    (copy / "tokenizer.json").write_text('{"tokens": "bytes of something"')
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        load_policy(str(copy), mesh)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("abc\n")])
def test_small_tokenizers_are_data(tokenizer):
    assert tokenizer_from_json(json.loads(json.dumps(tokenizer_to_json(tokenizer)))) == tokenizer


def test_names_that_are_no_modules_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--trust a/b: give the name of a module"):
        sample.run([str(tmp_path), "x", "--trust", "a/b"])


def test_a_dump_is_no_program(tmp_path):
    np.savez(tmp_path / "step_1.npz", group=np.array([print], dtype=object))
    with pytest.raises(ValueError, match=r"step_1\.npz is damaged: Object arrays cannot be loaded"):
        read_dump(tmp_path / "step_1.npz")
