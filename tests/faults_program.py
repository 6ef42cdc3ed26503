"""What test_faults.py starts, as one process or as one of two: a tiny run on the command line.

    faults_program.py [--distributed] --run-dir DIRECTORY [--flags]

It says `now: learning` when it begins to learn from a step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax

import tests.annotations  # noqa: F401  # isort: skip  # before the package
from p3o_jax.commands.experiment import run_experiment
from p3o_jax.config import Config
from p3o_jax.learner.optimizer import OptimizerConfig
from p3o_jax.learner.updates import Updates
from tests.small_run import MODEL, GradedSort


class Slow(GradedSort):
    """Slow enough to be caught in the middle of it."""

    def reward(self, prompt, completion):
        time.sleep(0.01)
        return super().reward(prompt, completion)


CONFIG = Config(
    task=Slow(length=3),
    model=MODEL,
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
