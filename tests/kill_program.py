"""What test_killed.py starts and kills: `run(arguments, log, devices)`, the command line of a tiny experiment.

It says on its output when it is in the moments worth being killed in: `now: restoring`, `now: saving`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import jax

import tests.annotations  # noqa: F401  # isort: skip  # before the package
from p3o_jax.commands.experiment import run_experiment
from p3o_jax.config import Config
from p3o_jax.learner.optimizer import OptimizerConfig
from p3o_jax.models.lora import Lora
from p3o_jax.objectives import P3OSnapshot
from p3o_jax.runs import checkpoint
from p3o_jax.runs.lifecycle import Lifecycle
from tests.small_run import MODEL, GradedSort

# All that a checkpoint can hold: adapters, moments, past policies, and snapshots of what sampled.
CONFIG = Config(
    task=GradedSort(length=3),
    model=replace(MODEL, lora=Lora(rank=2)),
    objective=P3OSnapshot(kl="top_k"),
    support_tokens=3,
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_updates=4),
    prompts_per_step=4,
    samples_per_prompt=4,
    staleness=1,
    num_steps=120,
    evaluate_every=0,
    save_every=1,
    write_rollouts_every=1,
)


def _announced(cls: type, name: str, moment: str) -> None:
    method = getattr(cls, name)

    def announcing(self, *arguments, **options):
        print(f"now: {moment}", flush=True)
        return method(self, *arguments, **options)

    setattr(cls, name, announcing)


def run(arguments: list[str], log: str, devices: int) -> None:
    """The entry of a process."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    _announced(Lifecycle, "__enter__", "entered")
    _announced(checkpoint.Checkpoints, "restore", "restoring")
    _announced(checkpoint.Checkpoints, "save", "saving")
    sys.argv = ["kill_program", *arguments]
    run_experiment("kill_program", "A run that is killed.", {"tiny": CONFIG})
