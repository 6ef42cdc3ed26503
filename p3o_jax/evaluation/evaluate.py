"""Evaluation on every prompt of a fixed set: pass@k, majority vote, the most likely completion, failures."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt8
from numpy.typing import ArrayLike

from p3o_jax.batch.types import FinishReason, Rollout, responses
from p3o_jax.devices import sharding
from p3o_jax.devices.processes import all_rows, fail_together, row_part
from p3o_jax.experience.batches import check_log_probs
from p3o_jax.experience.prompts import EncodedPrompt
from p3o_jax.experience.scoring import Scorer
from p3o_jax.sampler import Engine, Requests, Sampling
from p3o_jax.tasks.base import Prompt

STANDARD_ERROR = "_standard_error"
"""What the name of a metric's standard error ends with."""
_DIGEST_BYTES, _TEXT_BYTES = 16, 112


class Evaluation(NamedTuple):
    """What was found, on all hosts alike."""

    metrics: dict[str, float]
    """Over all prompts: what is logged as eval/TASK/NAME."""
    completions: list[dict[str, Any]]
    """Every completion as a person reads it, on process 0 if they are kept."""


class _Judged(NamedTuple):
    """The completions of a batch of P prompts, n each, of all hosts."""

    rewards: Float[np.ndarray, "P n"]
    correct: Bool[np.ndarray, "P n"]
    errors: Bool[np.ndarray, "P n"]
    timeouts: Bool[np.ndarray, "P n"]
    unreadable: Bool[np.ndarray, "P n"]
    response_length: Int[np.ndarray, "P n"]
    truncated: Bool[np.ndarray, "P n"]
    answers: UInt8[np.ndarray, "P n A"]  # a digest, all zero where there is no answer, and the start of the text


def evaluate(
    engine: Engine,
    weights: Any,
    scorer: Scorer,
    prompts: Sequence[EncodedPrompt],
    *,
    key: Key[Array, ""],
    num_samples: int,
    sampling: Sampling,
    greedy: bool,
    prompts_per_batch: int,
    keep_completions: bool = False,
) -> Evaluation:
    """Evaluates what an engine published; called by all processes alike.

    Prompts go through the engine `prompts_per_batch` at a time (over all devices); the last batch is filled up
    with copies, which are not judged. A completion whose verifier fails counts as not correct, and as a failure.

    Args:
        num_samples: completions of each prompt, drawn as `sampling` says; 0: none.
        greedy: whether to judge the most likely completion of each prompt too.
        keep_completions: whether to return them.
    """
    part, num_parts = row_part(engine.mesh)
    share = prompts_per_batch // num_parts
    passes = [(False, num_samples)] * (num_samples > 0) + [(True, 1)] * greedy
    judged: dict[bool, list[_Judged]] = {False: [], True: []}
    completions: list[dict[str, Any]] = []
    for start in range(0, len(prompts), prompts_per_batch):
        real = prompts[start : start + prompts_per_batch]
        filled = [*real, *[real[-1]] * (prompts_per_batch - len(real))]
        mine = slice(part * share, (part + 1) * share)
        for is_greedy, samples in passes:
            requests = Requests(
                [ids for _, ids in filled[mine]],
                [prompt.index for prompt, _ in filled[mine]],
                key,
                samples,
                sampling,
                greedy=is_greedy,
            )
            rollout = sharding.to_local(engine.generate(weights, requests))._replace(support=None)
            with fail_together():
                found = _judge(scorer, [prompt for prompt, _ in real[mine]], rollout, samples)
            found, tokens = all_rows((found, rollout if keep_completions else ()), engine.mesh)
            found = _by_prompt(found, samples, len(real))
            judged[is_greedy].append(found)
            if keep_completions and jax.process_index() == 0:
                completions += _readable(scorer, [prompt for prompt, _ in real], tokens, found, is_greedy)
    metrics: dict[str, float] = {"num_prompts": len(prompts)}
    if num_samples:
        metrics |= _summary(_joined(judged[False]))
    if greedy:
        most_likely = _joined(judged[True])
        metrics |= _over_prompts("greedy", most_likely.correct[:, 0])
        if not num_samples:
            metrics |= {name: value for name, value in _summary(most_likely).items() if "@" not in name}
    return Evaluation(metrics, completions)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), the unbiased estimate of the probability that one of k samples is correct from c of n
    that are (Chen et al. 2021, arXiv:2107.03374, Eq. 1)."""
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod((num_samples - num_correct - i) / (num_samples - i) for i in range(k))


def majority(answers: Sequence[Any], correct: Sequence[bool]) -> float:
    """Whether the most frequent answer is correct (self-consistency, Wang et al. 2022, arXiv:2203.11171).

    Completions without an answer (None) do not vote; of answers that tie, the share that is correct, as if one were
    drawn.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    right = {answer for answer, is_correct in zip(answers, correct, strict=True) if is_correct}
    return sum(answer in right for answer in winners) / len(winners) if winners else 0.0


def _judge(scorer: Scorer, prompts: Sequence[Prompt], rollout: Rollout, samples: int) -> _Judged:
    """This process's rows, of which the first are those of `prompts` and the others copies, left at zero."""
    check_log_probs(rollout, rollout.action_mask)
    rows, count = len(rollout.group), len(prompts) * samples
    scores = scorer(prompts, jax.tree.map(lambda leaf: leaf[:count], rollout)) if count else None

    def all_of(values: np.ndarray | None) -> np.ndarray:
        if values is None:
            return np.zeros(rows, bool)
        return np.concatenate([values, np.zeros((rows - count, *values.shape[1:]), values.dtype)])

    answers = np.zeros((rows, _DIGEST_BYTES + _TEXT_BYTES), np.uint8)
    for row, answer in enumerate(scores.answers if scores else []):
        if answer:
            digest = hashlib.blake2b(answer.encode(errors="replace"), digest_size=_DIGEST_BYTES).digest()
            text = digest + answer.encode(errors="replace")[:_TEXT_BYTES]
            answers[row, : len(text)] = np.frombuffer(text, np.uint8)
    return _Judged(
        rewards=all_of(scores.rewards if scores else None).astype(np.float32),
        correct=all_of(scores.correct if scores else None),
        errors=all_of(scores.errors if scores else None),
        timeouts=all_of(scores.timeouts if scores else None),
        unreadable=all_of(scores.unreadable if scores else None),
        response_length=np.asarray(rollout.response_length),
        truncated=np.asarray(rollout.finish_reason == FinishReason.LENGTH),
        answers=answers,
    )


def _by_prompt(judged: _Judged, samples: int, num_prompts: int) -> _Judged:
    """[rows, ...] as [P, n, ...], without the copies that fill up a batch."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, samples, *leaf.shape[1:])[:num_prompts], judged)


def _joined(batches: Sequence[_Judged]) -> _Judged:
    return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)


def _summary(judged: _Judged) -> dict[str, float]:
    """Means over prompts, of which each has n completions, with their standard errors; failures are counted."""
    samples = judged.correct.shape[1]
    num_correct = judged.correct.sum(axis=1).tolist()
    answered = judged.answers.any(axis=2)
    ballots = [
        [bytes(answer[:_DIGEST_BYTES]) if answer.any() else None for answer in answers] for answers in judged.answers
    ]
    votes = [majority(ballot, right) for ballot, right in zip(ballots, judged.correct.tolist(), strict=True)]
    ks = sorted({samples, *(2**i for i in range(samples.bit_length()))})
    metrics: dict[str, float] = {}
    for k in ks:
        metrics |= _over_prompts(f"pass@{k}", [pass_at_k(samples, c, k) for c in num_correct])
    if samples > 1:
        metrics |= _over_prompts(f"majority@{samples}", votes)
    metrics |= _over_prompts("reward", judged.rewards.mean(axis=1, dtype=np.float64))
    return metrics | {
        "no_answer_fraction": float(1 - answered.mean()),
        "unreadable_answers": float(judged.unreadable.sum()),
        "response_tokens_mean": float(judged.response_length.mean()),
        "truncated_fraction": float(judged.truncated.mean()),
        "verifier_errors": float(judged.errors.sum()),
        "verifier_timeouts": float(judged.timeouts.sum()),
    }


def _over_prompts(name: str, of_prompt: ArrayLike) -> dict[str, float]:
    """The mean of what was found of each prompt, and its standard error: s / sqrt(P), s over P - 1; none of one prompt.

    Prompts are what is drawn independently: completions of one prompt are not further prompts (Miller 2024,
    arXiv:2411.00640).
    """
    values = np.asarray(of_prompt, np.float64)
    found = {name: float(values.mean())}
    if len(values) > 1:
        found[name + STANDARD_ERROR] = float(values.std(ddof=1) / math.sqrt(len(values)))
    return found


def _readable(
    scorer: Scorer, prompts: Sequence[Prompt], rollout: Rollout, judged: _Judged, greedy: bool
) -> list[dict[str, Any]]:
    texts = [scorer.tokenizer.decode(ids) for ids in responses(rollout)]
    samples = judged.correct.shape[1]
    rows = []
    for p, prompt in enumerate(prompts):
        for s in range(samples):
            failure = "error" if judged.errors[p, s] else "timeout" if judged.timeouts[p, s] else ""
            answer = bytes(judged.answers[p, s, _DIGEST_BYTES:]).rstrip(b"\0").decode(errors="ignore")
            rows.append(
                {
                    "prompt_index": prompt.index,
                    "sample": "greedy" if greedy else s,
                    "prompt": prompt.text,
                    "completion": texts[p * samples + s],
                    "answer": answer,
                    "expected": prompt.answer,
                    "reward": None if failure else float(judged.rewards[p, s]),
                    "correct": bool(judged.correct[p, s]),
                    "verifier_failure": failure,
                    "response_tokens": int(judged.response_length[p, s]),
                    "truncated": bool(judged.truncated[p, s]),
                }
            )
    return rows
