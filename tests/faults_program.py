"""What test_faults.py starts, as one process or as one of two: a tiny run on the command line.

    faults_program.py [--distributed] --run-dir DIRECTORY [--flags]

It says `now: learning` when it begins to learn from a step.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax

from p3o_jax.cli import run_experiment
from p3o_jax.config import Config
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.optimizer import OptimizerConfig
from p3o_jax.tasks import SortDigits
from p3o_jax.updates import Updates


@dataclass(frozen=True)
class GradedSort(SortDigits):
    """With credit for every digit in its place, so that an untrained policy has something to learn from."""

    def reward(self, prompt, completion):
        time.sleep(SECONDS_OF_A_REWARD)
        return sum(a == b for a, b in zip(completion, prompt.answer, strict=False)) / len(prompt.answer)


SECONDS_OF_A_REWARD = 0.01  # slow enough to be caught in the middle of it

CONFIG = Config(
    task=GradedSort(length=3),
    model=TransformerConfig(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    prompts_per_step=8,
    samples_per_prompt=4,
    num_steps=400,
    evaluate_every=0,
    save_every=1,
    write_rollouts_every=0,
)


def main() -> None:
    """Announces every step, and runs."""
    update = Updates.__call__

    def announcing(self, state, batch, *rest):
        print("now: learning", flush=True)
        return update(self, state, batch, *rest)

    Updates.__call__ = announcing
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    run_experiment("faults_program", "A run to which things happen.", {"tiny": CONFIG})


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
