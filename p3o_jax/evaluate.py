"""Evaluation on every prompt of a fixed set: sampled pass@1 and greedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from p3o_jax import sharding
from p3o_jax.models.tokenizer import Tokenizer
from p3o_jax.processes import row_part
from p3o_jax.sampler import AS_THEY_ARE, Sampler, Sampling
from p3o_jax.scoring import Scorer
from p3o_jax.tasks.base import Prompt
from p3o_jax.types import FinishReason


class Evaluation(NamedTuple):
    """Means over all prompts of the set, on all hosts."""

    pass_at_1: float  # over all samples
    greedy: float
    response_tokens_mean: float
    truncated_fraction: float
    num_prompts: int


def evaluate(
    sampler: Sampler,
    weights: Any,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    *,
    key: Array,
    num_samples: int,
    sampling: Sampling = AS_THEY_ARE,
    prompts_per_batch: int,
) -> Evaluation:
    """Evaluates sampler weights; called by all processes alike.

    Prompts go through the sampler `prompts_per_batch` at a time (over all devices); the last batch is filled up
    with copies, whose rows are not counted.
    """
    part, num_parts = row_part(sampler.mesh)
    local_size = prompts_per_batch // num_parts
    totals = np.zeros(6)
    for start in range(0, len(prompts), prompts_per_batch):
        real = prompts[start : start + prompts_per_batch]
        filled = [*real, *[real[-1]] * (prompts_per_batch - len(real))]
        mine = slice(part * local_size, (part + 1) * local_size)
        num_real = len(real[mine])
        for greedy in (False, True):
            samples = 1 if greedy else num_samples
            rollout = sampler(
                weights,
                [tokenizer.encode(prompt.text) for prompt in filled[mine]],
                [prompt.index for prompt in filled[mine]],
                key=key,
                num_samples=samples,
                sampling=sampling,
                greedy=greedy,
            )
            rollout = jax.tree.map(lambda rows, n=num_real * samples: rows[:n], sharding.to_local(rollout))
            rewards = scorer(real[mine], rollout).rewards
            if greedy:
                totals += (0, 0, 0, 0, rewards.sum(), num_real)
            else:
                truncated = rollout.finish_reason == FinishReason.LENGTH
                totals += (rewards.sum(), rollout.response_length.sum(), truncated.sum(), len(rewards), 0, 0)
    rewards, tokens, truncated, rows, greedy_rewards, num_prompts = sharding.sum_over_processes(totals)
    return Evaluation(
        float(rewards / rows),
        float(greedy_rewards / num_prompts),
        float(tokens / rows),
        float(truncated / rows),
        len(prompts),
    )
