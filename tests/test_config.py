"""Configurations: JSON and back, and refusal of what does not fit, by name, before anything compiles."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import tyro

from p3o_jax.batch.advantages import LeaveOneOut
from p3o_jax.commands.experiment import Run
from p3o_jax.config import Config, from_json, load, to_json, validate
from p3o_jax.devices.precision import Precision
from p3o_jax.devices.sharding import MeshShape
from p3o_jax.learner.optimizer import OptimizerConfig
from p3o_jax.learner.warm_start import WarmStart
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.objectives import P3O, ConstantNormaliser, Grpo, Objective
from p3o_jax.rewards import ExactMatch, Function, NumericMatch, OverlongPenalty, Part, Tags, WeightedSum
from p3o_jax.rewards.pool import Verifiers
from p3o_jax.sampler import Sampling
from p3o_jax.tasks import Dataset, Mixture, ReasoningGym, Share


@dataclass(frozen=True, kw_only=True)
class MyObjective(Grpo):
    """An experiment's own objective."""

    extra: float = 0.5


RICH = Config(
    task=ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 3}),
    objective=MyObjective(clip_high=0.28, aggregation=ConstantNormaliser(tokens=32), extra=0.25),
    advantages=LeaveOneOut(),
    warm_start=WarmStart(optimizer=OptimizerConfig(decay="linear")),
    precision=Precision("bfloat16", "bfloat16", "float32"),
    learner_temperature=0.6,
    evaluation_sampling=Sampling(top_k=20, top_p=0.95),
    mesh=MeshShape(data=2, fsdp=2, tensor=2),
)


@pytest.mark.parametrize("config", [Config(), RICH], ids=["default", "rich"])
def test_json_and_back(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_json(config)))
    assert load(path) == config


def test_every_built_in_objective_reloads():
    todo, seen = [Objective], []
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        if not cls.__abstractmethods__ and cls.__module__.startswith("p3o_jax") and cls.__name__ != "DrGrpo":
            config = Config(objective=cls())
            assert from_json(json.loads(json.dumps(to_json(config)))) == config
            seen.append(cls)
    assert len(seen) > 8


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(learning_rate=1.0), "Extra fields .* Config: learning_rate @ config"),
        (lambda data: data["optimizer"].update(betas=0.9), "betas.*optimizer"),
        (lambda data: data.update(num_steps="many"), "num_steps"),
        (lambda data: data.update(sampler_slots=2.5), "2.5 is not of type int.*sampler_slots"),
        (lambda data: data.update(sampler_slots=True), "True is not of type int.*sampler_slots"),
        (lambda data: data.update(watchdog_ends="no"), "'no' is not of type bool.*watchdog_ends"),
        (lambda data: data["objective"].update({"class": "p3o_jax.objectives:P5O"}), "P5O"),
        (lambda data: data["objective"].update({"class": "os:getcwd"}), "not a dataclass"),
        (lambda data: data["objective"].update(kl="k4"), "k4"),
    ],
)
def test_a_damaged_config_is_refused_by_field(change, message):
    data = json.loads(json.dumps(to_json(Config())))
    change(data)
    with pytest.raises(ValueError, match=message):
        from_json(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"staleness": -1}, "staleness must not be negative, got -1"),
        ({"sampler_devices": -1}, "sampler_devices must not be negative, got -1"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"keep_checkpoints": 0}, "keep_checkpoints must be at least 1"),
        ({"watchdog_seconds": -1.0}, "watchdog_seconds must not be negative"),
        ({"samples_per_prompt": 0}, "samples_per_prompt must be at least 1"),
        ({"sampler_temperature": 0.0}, "sampler_temperature must be positive"),
        ({"learner_temperature": -1.0}, "learner_temperature must be positive"),
        ({"learner_temperature": float("inf")}, "learner_temperature must be positive and finite"),
        ({"seed": 2**32}, r"seed must be at least 0 and below 2\*\*32"),
        ({"objective": P3O(reference_kl_coefficient=0.1)}, "objective.reference_kl_coefficient=0.1: a run keeps no"),
        ({"sampler_slots": 0}, "sampler_slots must be at least 1, got 0"),
        ({"sampler_top_p": 0.0}, "top_p must be above 0"),
        ({"sampler_top_k": 5}, "sampler_top_k=5, .*give allow_truncated_behaviour=True"),
        ({"sampler_top_p": 0.9}, "sampler_top_p=0.9, .*give allow_truncated_behaviour=True"),
        ({"sampler_min_p": 0.1}, "sampler_min_p=0.1: .*give allow_truncated_behaviour=True"),
        (
            {"sampler_top_k": 5, "allow_truncated_behaviour": True, "objective": P3O(kl="exact")},
            "KL to the behaviour distribution is infinite",
        ),
        ({"samples_per_prompt": 1}, "samples_per_prompt=1: with GroupZScore"),
    ],
)
def test_impossible_values_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(Config(), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minibatches": 5}, "prompts_per_step=32 does not divide into minibatches=5"),
        ({"samples_per_prompt": 3, "minibatches": 16}, "= 6 rows does not divide over 8 devices"),
        ({"prompts_per_step": 12, "minibatches": 1, "samples_per_prompt": 8}, "does not divide over 8 devices"),
        ({"micro_batches": 7}, "micro_batches=7"),
        ({"sampler_slots": 12}, "sampler_slots=12 does not divide over 8 devices"),
        ({"warm_start": WarmStart(rows_per_step=12)}, "warm_start.rows_per_step=12 does not divide over 8 devices"),
        ({"model": TransformerConfig(context_tokens=16)}, "exceed model.context_tokens=16"),
        ({"model": TransformerConfig(num_heads=6, num_kv_heads=6), "mesh": MeshShape(tensor=4)}, "model.num_heads=6"),
        ({"model": TransformerConfig(embed_dim=30), "mesh": MeshShape(fsdp=4)}, "model.embed_dim=30"),
    ],
)
def test_what_does_not_fit_the_devices_or_the_task_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        validate(replace(Config(), **change), vocab_size=12, batch_shards=8, num_processes=1)


def test_truncated_rollouts_are_accepted_by_name_and_truncated_evaluation_always():
    cut = {"sampler_top_k": 5, "sampler_top_p": 0.9, "sampler_min_p": 0.1, "sampler_temperature": 0.8}
    assert Config(**cut, allow_truncated_behaviour=True).sampling == Sampling(0.8, 5, 0.9, 0.1)
    assert not Config(evaluation_sampling=Sampling(top_p=0.9)).sampling.is_truncated


def test_the_default_fits():
    validate(Config(), vocab_size=12, batch_shards=8, num_processes=2)


def test_a_class_of_the_program_itself_is_stored_by_its_module(monkeypatch):
    """`python -m experiments.mine` calls its module __main__, which nobody else can import."""
    monkeypatch.setattr(MyObjective, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="experiments.mine"))
    assert to_json(RICH)["objective"]["class"] == "experiments.mine:MyObjective"


def test_objective_names_are_classes():
    assert to_json(Config())["objective"]["class"] == f"{P3O.__module__}:P3O"


TASKS = [
    Mixture((Share(Dataset("a.jsonl", reward=ExactMatch()), 2.0), Share(Dataset("b.jsonl")))),
    Dataset(
        "train.jsonl", reward=WeightedSum((Part("answer", NumericMatch(0.1)), Part("length", OverlongPenalty(9, 3))))
    ),
    Dataset("d.jsonl", reward=Function("tests.rewards.verifiers:obedient", {"weight": 2.0})),
    Dataset("d.jsonl", reward=Tags(("a", "b"))),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_tasks_and_their_rewards_reload(task):
    config = Config(task=task, verifiers=Verifiers(timeout_seconds=3, failed_reward=-1.0))
    stored = json.loads(json.dumps(to_json(config)))
    assert from_json(stored, trusted=["tests.rewards"]) == config


def test_parts_of_a_task_are_flags():
    default = Run(Config(task=TASKS[1]))
    flags = ["--task.path", "x.jsonl", "--verifiers.timeout-seconds", "2"]
    config = tyro.cli(Run, default=default, args=flags, config=(tyro.conf.AvoidSubcommands,)).config
    assert (config.task.path, config.verifiers.timeout_seconds) == ("x.jsonl", 2)
    assert config.task.reward == TASKS[1].reward
