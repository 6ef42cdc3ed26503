"""From rollouts to what the learner consumes: batches and minibatches, and to what a person reads.

Everything here is on the host, on this process's rows: numpy in, numpy out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Bool, Float

from p3o_jax.batch.metrics import Histogram
from p3o_jax.batch.types import AnyArray, Batch, FinishReason, Inputs, Rollout, Support, responses
from p3o_jax.devices import sharding
from p3o_jax.tasks.base import Prompt
from p3o_jax.tokenizers.text import Tokenizer

_LENGTH_BINS = 30
T = TypeVar("T")


def local_prompts(prompts: Sequence[T], num_processes: int = 1, process: int = 0) -> Sequence[T]:
    """The prompts this process samples for: its block of the step's prompts."""
    share = len(prompts) // num_processes
    return prompts[process * share : (process + 1) * share]


def check_log_probs(rollout: Rollout, mask: Bool[AnyArray, "B S"]) -> None:
    """Refuses tokens that were drawn from no distribution, as those of weights that are not finite.

    Raises:
        ValueError: a log-prob under the mask is not finite or above 0.
    """
    log_probs = rollout.behaviour_log_probs
    with np.errstate(invalid="ignore"):
        bad = mask & ~((log_probs <= 0) & np.isfinite(log_probs))
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"sampler: {bad.sum()} behaviour log-probs are missing or positive; first in row {row} (prompt "
            f"{rollout.group[row]}) at token {column}: {log_probs[row, column]}; are the weights finite?"
        )


def make_batch(
    rollout: Rollout,
    advantages: Float[np.ndarray, " B"],
    *,
    learner_temperature: float | None,
    step: int,
    kept: Bool[np.ndarray, " B"] | None = None,
) -> Batch:
    """Rollouts [B, S] as a batch [B, S - 1] aligned with predictions.

    Args:
        learner_temperature: None: each row's own sampling temperature.
        step: rollout steps that the learner has been trained for.
        kept: rows that count; the others are masked out of every sum and every denominator. None: all.

    Raises:
        ValueError: a behaviour log-prob of an action is missing (not finite) or not a log-probability, or a policy
            version is newer than the learner.
    """
    rows, slots = rollout.tokens.shape
    if rollout.behaviour_log_probs.shape != (rows, slots) or advantages.shape != (rows,):
        raise ValueError(
            f"batch: tokens {rollout.tokens.shape}, behaviour_log_probs {rollout.behaviour_log_probs.shape} and "
            f"advantages {advantages.shape} do not belong together"
        )
    mask = rollout.action_mask if kept is None else rollout.action_mask & kept[:, None]
    check_log_probs(rollout, mask)
    newest = int(rollout.policy_version[rollout.action_mask].max(initial=step))
    if newest > step:
        raise ValueError(f"batch: tokens of policy version {newest} for a learner that has made {step} steps")
    mask, behaviour = mask[:, 1:], rollout.behaviour_log_probs[:, 1:]
    staleness = np.where(mask, step - rollout.policy_version[:, 1:], 0).astype(np.int32)

    def per_token(values: Any, dtype: type) -> np.ndarray:
        return np.ascontiguousarray(np.broadcast_to(np.asarray(values, dtype)[:, None], mask.shape))

    support = rollout.support
    temperature = rollout.temperature if learner_temperature is None else np.full(rows, learner_temperature)
    positions = np.broadcast_to(np.arange(slots - 1, dtype=np.int32), mask.shape)
    return Batch(
        mask=mask,
        behaviour_log_probs=behaviour,
        advantages=per_token(advantages, np.float32),
        staleness=staleness,
        source=per_token(rollout.source, np.int32),
        task=per_token(rollout.task, np.int32),
        support=None if support is None else Support(*(None if x is None else x[:, 1:] for x in support)),
        inputs=Inputs(
            tokens=rollout.tokens[:, :-1],
            targets=rollout.tokens[:, 1:],
            positions=np.ascontiguousarray(positions),
            temperature=per_token(temperature, np.float32),
        ),
    )


def minibatches(batch: Batch, count: int, epochs: int, group_size: int) -> Iterator[Batch]:
    """`count` equal parts of the rows, `epochs` times over.

    Sample s of prompt p goes to part (p + s) mod `count`, so that an update sees as many prompts as it can rather than
    whole groups of a few, and the same rows on any number of processes.
    """
    row = np.arange(batch.mask.shape[0])
    part = (row // group_size + row % group_size) % count
    for _ in range(epochs):
        for i in range(count):
            rows = np.flatnonzero(part == i)
            yield jax.tree.map(lambda leaf, rows=rows: leaf[rows], batch)


def rollout_metrics(rollout: Rollout, step: int, longest: int) -> dict[str, Any]:
    """What is logged of a step's rollouts, over all processes.

    Args:
        step: rollout steps the learner has trained for.
        longest: the limit on response tokens.
    """
    truncated, actions = rollout.finish_reason == FinishReason.LENGTH, rollout.action_mask
    sums = (
        len(truncated),
        actions.sum(),
        truncated.sum(),
        (step - rollout.policy_version)[actions].sum(),
    )
    edges = np.unique(np.linspace(1, longest + 1, _LENGTH_BINS + 1).astype(np.int64))
    lengths = np.bincount(np.searchsorted(edges, rollout.response_length, side="right"), minlength=len(edges) + 1)
    totals = sharding.sum_over_processes(np.concatenate([np.asarray(sums, np.float64), lengths]))
    rows, tokens, truncated, staleness = totals[: len(sums)]
    return {
        "rollout/response_tokens_mean": tokens / rows,
        "rollout/response_tokens_histogram": Histogram(edges, totals[len(sums) :]),
        "rollout/truncated_fraction": truncated / rows,
        "rollout/staleness_mean": staleness / tokens,
    }


def readable(
    prompts: Sequence[Prompt],
    rollout: Rollout,
    rewards: Float[np.ndarray, " B"],
    advantages: Float[np.ndarray, " B"],
    log_probs: Float[np.ndarray, "B T"],
    *,
    tokenizer: Tokenizer,
) -> list[dict[str, Any]]:
    """Rollouts as a person reads them: text, reward, and each response token with its behaviour log-prob and log-ratio.

    Args:
        log_probs: the policy's, aligned with predictions: T = S - 1.
    """
    texts = {prompt.index: prompt.text for prompt in prompts}
    rows = []
    for i, response_ids in enumerate(responses(rollout)):
        actions = np.flatnonzero(rollout.action_mask[i])
        behaviour = rollout.behaviour_log_probs[i, actions]
        log_ratios = log_probs[i, actions - 1] - behaviour
        versions = np.unique(rollout.policy_version[i, actions]).tolist()
        rows.append(
            {
                "prompt_index": int(rollout.group[i]),
                "prompt": texts[int(rollout.group[i])],
                "completion": tokenizer.decode(response_ids),
                "reward": float(rewards[i]),
                "advantage": float(advantages[i]),
                "finish_reason": FinishReason(int(rollout.finish_reason[i])).name.lower(),
                "policy_version": versions[0] if len(versions) == 1 else rollout.policy_version[i, actions].tolist(),
                "temperature": float(rollout.temperature[i]),
                "token_ids": rollout.tokens[i, actions].tolist(),
                "tokens": [tokenizer.decode([int(token)]) for token in rollout.tokens[i, actions]],
                "behaviour_log_probs": np.round(behaviour.astype(np.float64), 6).tolist(),
                "log_ratios": np.round(log_ratios.astype(np.float64), 6).tolist(),
            }
        )
    return rows
