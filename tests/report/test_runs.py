from __future__ import annotations

from dataclasses import replace

import pytest

from p3o_jax.config import Config
from p3o_jax.objectives import P3O, Grpo
from p3o_jax.report.runs import differences, find, group, load
from tests.made_runs import make_run

P3O_RUN = Config(objective=P3O(), num_steps=10)
CLIPPED = replace(P3O_RUN, objective=Grpo(clip_low=0.2, clip_high=0.2))


def groups_of(tmp_path, *configs):
    paths = [make_run(tmp_path / str(i), config, steps=1, off_policy=0.1) for i, config in enumerate(configs)]
    return group([load(path) for path in paths])


def test_runs_that_differ_in_the_seed_are_one(tmp_path):
    groups = groups_of(tmp_path, replace(P3O_RUN, seed=1), CLIPPED, P3O_RUN, replace(P3O_RUN, seed=2, save_every=3))
    assert [(each.label, [run.seed for run in each.runs]) for each in groups] == [("P3O", [0, 1, 2]), ("Grpo", [0])]


def test_labels_say_in_what_variants_differ(tmp_path):
    def labels(*configs):
        return [each.label for each in groups_of(tmp_path / str(len(list(tmp_path.iterdir()))), *configs)]

    wide = replace(CLIPPED, objective=Grpo(clip_low=0.2, clip_high=0.28))
    assert labels(P3O_RUN, CLIPPED, wide) == ["P3O", "Grpo, clip_high 0.2", "Grpo, clip_high 0.28"]
    stale = replace(P3O_RUN, staleness=2)
    assert labels(P3O_RUN, stale) == ["P3O, staleness 0", "P3O, staleness 2"]
    hot = replace(stale, sampler_temperature=1.2)
    assert labels(P3O_RUN, stale, hot) == [
        "P3O, staleness 0",
        "P3O, staleness 2, sampler_temperature 1",
        "P3O, staleness 2, sampler_temperature 1.2",
    ]


def test_differences_are_of_variants_not_of_seeds(tmp_path):
    groups = groups_of(tmp_path, P3O_RUN, replace(P3O_RUN, seed=1), CLIPPED)
    found = differences(groups)
    assert found["objective"] == ["P3O", "Grpo"]
    assert found["objective.clip_low"] == ["–", "0.2"]
    assert all(name.startswith("objective") for name in found)


def test_runs_are_found_below_a_directory(tmp_path):
    one = make_run(tmp_path / "p3o" / "first", P3O_RUN, steps=1, off_policy=0.1)
    two = make_run(tmp_path / "p3o" / "second", P3O_RUN, steps=1, off_policy=0.1)
    assert find([two, tmp_path]) == [two, one]
    with pytest.raises(FileNotFoundError, match="elsewhere is not a directory"):
        find([tmp_path / "elsewhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no run in .*empty"):
        find([tmp_path / "empty"])


def test_damage_is_named(tmp_path):
    path = make_run(tmp_path / "run", P3O_RUN, steps=1, off_policy=0.1)
    (path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load(path)
