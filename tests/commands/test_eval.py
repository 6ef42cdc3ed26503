"""`p3o eval`, on a run and on files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from p3o_jax.commands import eval as command
from p3o_jax.config import Config
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.tasks import SortDigits
from p3o_jax.tasks.specification import task_of
from p3o_jax.train import train

LAYOUTS = Path(__file__).parent.parent / "data" / "layouts"


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("eval") / "run"
    config = Config(
        task=SortDigits(length=3),
        model=TransformerConfig(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32),
        prompts_per_step=8,
        samples_per_prompt=2,
        num_steps=1,
        evaluate_every=0,
        evaluation_prompts=8,
    )
    train(config, path)
    return path


def test_a_run_on_its_own_task(a_run, tmp_path, capsys):
    flags = [
        "--num-prompts",
        "11",
        "--samples-per-prompt",
        "2",
        "--greedy",
        "--temperature",
        "0.7",
        "--out",
        str(tmp_path),
    ]
    command.run([str(a_run), "--prompts-per-batch", "4", *flags])
    results = json.loads((tmp_path / "sort_digits.json").read_text())
    assert results["results"]["num_prompts"] == 11
    assert {"pass@1", "pass@2", "majority@2", "greedy", "verifier_errors"} <= results["results"].keys()
    assert results["settings"]["temperature"] == 0.7
    assert results["settings"]["step"] == 1
    assert len((tmp_path / "sort_digits.jsonl").read_text().splitlines()) == 11 * 3
    assert results["results"].keys() >= {"pass@1_standard_error", "majority@2_standard_error"}
    said = capsys.readouterr().out
    assert "sort_digits\n  num_prompts            11\n" in said
    assert re.search(r"\n  pass@1  +[0-9.]+ ± [0-9.]+\n", said)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--samples-per-prompt", "0"], "samples_per_prompt=0: give at least 1, or 0 with --greedy"),
        (["--temperature", "0"], "temperature must be positive"),
        (["--task", "gsm9k:x"], "cannot import gsm9k"),
        (["--task", "gsm8k"], r"give LAYOUT:FILE \(aime, amc, .*gsm8k"),
        (["--task", "json:loads"], "'json:loads' cannot be called without arguments"),
        (["--num-prompts", "0"], "must be at least 1"),
        (["--seed", "-1"], "seed must be at least 0"),
    ],
)
def test_what_is_asked_is_checked_before_anything_is_loaded(tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        command.run([str(tmp_path / "nothing"), *flags])


def test_tasks_by_name():
    assert task_of(f"gsm8k:{LAYOUTS / 'gsm8k.jsonl'}").name == "gsm8k"
    assert task_of("p3o_jax.tasks:SortDigits") == SortDigits()
    with pytest.raises(ValueError, match="it returns a dict, not a task"):
        task_of("builtins:dict")


def test_results_are_not_written_over(tmp_path):
    (tmp_path / "sort.json").touch()
    with pytest.raises(FileExistsError, match="has results: give another --out"):
        command.run([str(tmp_path / "nothing"), "--out", str(tmp_path)])
