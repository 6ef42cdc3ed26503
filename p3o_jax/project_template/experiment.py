"""Reversing words, with an objective of our own and with P3O.

    python experiment.py [mine | p3o] [--flags]

A quarter of a minute a variant on two cores. pass@1 of 128 samples to 64 held-out words, seed 0: 0.40 before, 0.95
after with ours, 0.96 with P3O. Keep such a table here, with every seed that was run.
"""

from __future__ import annotations

from dataclasses import replace

from objective import LearnFromSuccess
from task import Reversal

from p3o_jax.commands.experiment import run_experiment
from p3o_jax.config import Config
from p3o_jax.learner.optimizer import OptimizerConfig
from p3o_jax.learner.warm_start import WarmStart
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.objectives import P3O


def p3o() -> Config:
    """A model that has seen the task, in demonstrations full of mistakes, learns it from its rewards."""
    return Config(
        task=Reversal(length=3),
        model=TransformerConfig(num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=128),
        warm_start=WarmStart(
            num_steps=400,
            rows_per_step=64,
            noise=0.3,
            optimizer=OptimizerConfig(learning_rate=5e-3, warmup_updates=20, decay="cosine"),
        ),
        objective=P3O(),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_updates=10),
        prompts_per_step=16,
        samples_per_prompt=8,
        minibatches=2,
        num_steps=30,
        evaluate_every=10,
        evaluation_prompts=64,
    )


def mine() -> Config:
    """The same run with another objective: a variant is a difference."""
    return replace(p3o(), objective=LearnFromSuccess())


VARIANTS = {"mine": mine(), "p3o": p3o()}

if __name__ == "__main__":
    run_experiment("reversal", __doc__.splitlines()[0], VARIANTS)
