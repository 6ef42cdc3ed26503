"""The evaluations of a run: every task's held-out prompts, the same at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Key

from p3o_jax.devices.processes import fail_together
from p3o_jax.evaluation.evaluate import evaluate
from p3o_jax.evaluation.files import write_evaluation
from p3o_jax.experience.prompts import EncodedPrompt
from p3o_jax.experience.scoring import Scorer
from p3o_jax.sampler import Engine, Sampling


class Evaluated(NamedTuple):
    """What an evaluation of all tasks found."""

    metrics: dict[str, float]  # eval/TASK/NAME
    score: float  # mean pass@1 over tasks, by which checkpoints are compared; NaN: nothing was evaluated


NOT_EVALUATED = Evaluated({}, float("nan"))


@dataclass(frozen=True)
class HeldOut:
    """Evaluates policies on the held-out prompts of a run. Every process must make each call."""

    engine: Engine
    scorer: Scorer
    sets: Mapping[str, Sequence[EncodedPrompt]]
    """Prompts by the name of their task."""
    key: Key[Array, ""]
    num_samples: int
    sampling: Sampling
    prompts_per_batch: int
    settings: Mapping[str, Any]
    """What is written beside the results: how they were sampled."""

    def __call__(self, weights: Any, directory: Path) -> Evaluated:
        """Evaluates what the engine published, and writes completions and results into a directory."""
        metrics: dict[str, float] = {}
        scores = []
        for name, prompts in self.sets.items():
            result = evaluate(
                self.engine,
                weights,
                self.scorer,
                prompts,
                key=self.key,
                num_samples=self.num_samples,
                sampling=self.sampling,
                greedy=True,
                prompts_per_batch=self.prompts_per_batch,
                keep_completions=True,
            )
            metrics |= {f"eval/{name}/{tag}": value for tag, value in result.metrics.items()}
            scores.append(result.metrics["pass@1"])
            with fail_together():  # only process 0 writes
                if jax.process_index() == 0:
                    write_evaluation(directory, name, result.metrics, result.completions, self.settings)
        return Evaluated(metrics, float(np.mean(scores)))
