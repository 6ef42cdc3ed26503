"""A run that is over in seconds, and what it left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax

from p3o_jax.config import Config
from p3o_jax.json_lines import read_json_lines
from p3o_jax.learner.optimizer import OptimizerConfig
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.objectives import P3O
from p3o_jax.tasks import SortDigits
from p3o_jax.train import train
from p3o_jax.writers import read_metrics


@dataclass(frozen=True)
class GradedSort(SortDigits):
    """With credit for every digit in its place, so that an untrained policy has something to learn from."""

    def reward(self, prompt, completion):
        return sum(a == b for a, b in zip(completion, prompt.answer, strict=False)) / len(prompt.answer)


class Interrupted(GradedSort):
    """Interrupted at the rewards of the second step."""

    def reward(self, prompt, completion):
        if prompt.index == 15:  # the second step's last prompt; the evaluation has but 11
            raise KeyboardInterrupt
        return super().reward(prompt, completion)


class Rambling(GradedSort):
    """With room for longer responses than the answer."""

    @property
    def max_response_tokens(self) -> int:
        return 30


MODEL = TransformerConfig(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32)

SMALL = Config(
    task=GradedSort(length=3),
    model=MODEL,
    objective=P3O(),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    prompts_per_step=8,
    samples_per_prompt=4,
    minibatches=2,
    num_steps=4,
    evaluate_every=2,
    evaluation_prompts=11,  # not a multiple of the batch of 8
    save_every=2,
    write_rollouts_every=1,
)


def run(path: Path, config: Config = SMALL, **options) -> list[dict]:
    """The metrics of a run on one device, by step."""
    train(config, path, **{"devices": jax.devices()[:1], **options})
    return read_metrics(path)


def rollouts(path: Path, step: int) -> list[dict]:
    return read_json_lines(path / "rollouts" / f"step_{step}.jsonl")


def without_times(lines: list[dict]) -> list[dict]:
    return [{tag: value for tag, value in line.items() if not tag.startswith("time/")} for line in lines]
