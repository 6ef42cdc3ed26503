"""P3O and GRPO on rollouts sampled at temperature 1.2, with true behaviour log-probabilities."""

from __future__ import annotations

from dataclasses import replace

from p3o_jax.cli import run_experiment
from p3o_jax.config import Config
from p3o_jax.objectives import P3O, Grpo
from p3o_jax.optimizer import OptimizerConfig
from p3o_jax.tasks import SortDigits
from p3o_jax.warm_start import WarmStart


def p3o() -> Config:
    """The policy of the learner's temperature 1 learns from a behaviour policy at 1.2."""
    return Config(
        task=SortDigits(),
        warm_start=WarmStart(
            num_steps=400,
            rows_per_step=64,
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_updates=20, decay="cosine"),
        ),
        objective=P3O(),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_updates=20),
        prompts_per_step=32,
        samples_per_prompt=8,
        minibatches=4,
        num_steps=60,
        sampler_temperature=1.2,
        learner_temperature=1.0,
        evaluation_samples=8,
    )


def grpo(clip: float = 0.2) -> Config:
    """The same run with a clipped objective."""
    return replace(p3o(), objective=Grpo(clip_low=clip, clip_high=clip))


VARIANTS = {"p3o": p3o(), "grpo": grpo()}

if __name__ == "__main__":
    run_experiment("quickstart", __doc__.splitlines()[0], VARIANTS)
