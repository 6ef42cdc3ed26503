"""What test_distributed.py runs, in one process or in several: `distributed_program.py DIRECTORY [--distributed]`.

Of several, each prints one line of JSON: what happened.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import jax
import numpy as np

import tests.annotations  # noqa: F401  # isort: skip  # before the package
from p3o_jax.devices import processes
from p3o_jax.devices.cache import enable_compilation_cache
from p3o_jax.devices.sharding import MeshShape
from p3o_jax.experience.batches import make_batch
from p3o_jax.parts import build
from p3o_jax.runs.stopwatch import Stopwatch
from p3o_jax.train import train
from tests.small_run import SMALL, GradedSort


class Broken(GradedSort):
    """A reward that fails on the last process."""

    def reward(self, prompt, completion):
        if jax.process_index() == jax.process_count() - 1:
            raise ValueError("the verifier is broken")
        return super().reward(prompt, completion)


CONFIG = replace(
    SMALL,
    mesh=MeshShape(data=2, fsdp=2, tensor=2),
    sampler_temperature=1.5,  # off-policy from the first update, so that no ratio is at the cap by rounding
    learner_temperature=1.0,
    evaluation_samples=4,  # as many as in training, so that one program serves both
)


def failure(function, *arguments, **options) -> str:
    """How a call fails."""
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "did not fail"


def skipped_for_one_row() -> dict[str, bool]:
    """An update on a batch in which one row of the last process has a log-ratio that is not finite."""
    parts = build(CONFIG)
    _, state, ring, _ = parts.start()
    with parts.scorer:
        experience = parts.source(0).next(1, ring.behaviour.weights, Stopwatch(1, "sample"), lambda: None)
    rollout = experience.rollout
    batch = make_batch(rollout, np.ones(len(rollout.tokens), np.float32), learner_temperature=1.0, step=0)
    if jax.process_index() == jax.process_count() - 1:
        bad = batch.behaviour_log_probs.copy()
        bad[0] = np.nan
        batch = batch._replace(behaviour_log_probs=bad)
    before = [np.asarray(shard.data) for leaf in jax.tree.leaves(state.params) for shard in leaf.addressable_shards]
    state, _ = parts.learner.update(state, parts.updates.minibatches(batch)[0])
    after = [np.asarray(shard.data) for leaf in jax.tree.leaves(state.params) for shard in leaf.addressable_shards]
    return {
        "skipped": int(state.num_skipped) == 1 and int(state.num_updates) == 0,
        "unchanged": all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)),
    }


def main() -> None:
    """In one process the run; in several the run in two parts, and what must fail."""
    directory = Path(sys.argv[1])
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    enable_compilation_cache()
    if "--distributed" not in sys.argv:
        train(CONFIG, directory / "run")
        return
    processes.initialize()
    train(replace(CONFIG, num_steps=2), directory / "run")
    last = train(CONFIG, directory / "run", resume=True)
    report = {
        "process": jax.process_index(),
        "loss": last["loss/total"],
        "occupied": failure(train, CONFIG, directory / "run"),
        "broken": failure(train, replace(CONFIG, task=Broken(length=3), evaluate_every=0), directory / "broken"),
        "impossible": failure(train, replace(CONFIG, mesh=MeshShape(tensor=3)), directory / "never"),
        **skipped_for_one_row(),
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
