"""What a step's responses are worth: rewards, in processes that can be killed where a verifier could hang."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from p3o_jax.batch.types import AnyArray, FinishReason, Rollout, responses
from p3o_jax.devices import sharding
from p3o_jax.devices.processes import of_first_process, row_share
from p3o_jax.rewards.base import Completion, Graded, Prompt, Reward, graded, judge
from p3o_jax.rewards.pool import Failed, TimedOut, VerifierPool, Verifiers
from p3o_jax.tasks.base import Task
from p3o_jax.tokenizers.text import Tokenizer

_logger = logging.getLogger(__name__)


_PROMPT_END = 16
"""Tokens of a prompt that its completions know of: enough for a tag that the chat template opens."""


class Scores(NamedTuple):
    """What each of this process's rows is worth.

    A row whose verifier failed is `known` only if the configuration gives such rows a reward; where it is not known,
    the other arrays hold zeros that must not be read.
    """

    completions: list[Completion]
    rewards: Float[np.ndarray, " B"]
    known: Bool[np.ndarray, " B"]
    correct: Bool[np.ndarray, " B"]
    answers: list[str]  # empty: none was found, or the verifier failed
    parts: dict[str, Float[np.ndarray, " B"]]  # NaN where a row has no such part
    failures: list[str]  # why there is no judgement; empty: there is
    errors: Bool[np.ndarray, " B"]
    timeouts: Bool[np.ndarray, " B"]
    unreadable: Bool[np.ndarray, " B"]  # there is an answer, and it is not correct because it cannot be read

    def rows(self, chosen: Int[np.ndarray, " C"]) -> Scores:
        """Returns the scores of some rows, in this order."""

        def pick(values: Any) -> Any:
            if isinstance(values, dict):
                return {name: value[chosen] for name, value in values.items()}
            return [values[row] for row in chosen] if isinstance(values, list) else values[chosen]

        return Scores(*map(pick, self))

    @staticmethod
    def joined(parts: Sequence[Scores]) -> Scores:
        """Concatenates the scores of several batches."""

        def join(values: list[Any]) -> Any:
            if isinstance(values[0], dict):
                return {name: np.concatenate([value[name] for value in values]) for name in values[0]}
            return list(chain.from_iterable(values)) if isinstance(values[0], list) else np.concatenate(values)

        return Scores(*(join([getattr(part, name) for part in parts]) for name in Scores._fields))


class Scorer:
    """Scores rollouts of a task, within `with`, which starts and ends the processes of rewards that are not quick."""

    def __init__(self, task: Task, tokenizer: Tokenizer, settings: Verifiers):
        self._task, self.tokenizer, self._settings = task, tokenizer, settings
        self._reward = task.reward if isinstance(task.reward, Reward) else None
        self._pool: VerifierPool | None = None

    def __call__(self, prompts: Sequence[Prompt], rollout: Rollout) -> Scores:
        """Scores this process's rows.

        Raises:
            Exception: whatever a reward in this process raises, with a note that names the row; one that is not a
                finite number is an error.
        """
        by_index = {prompt.index: prompt for prompt in prompts}
        asked = [by_index[int(group)] for group in rollout.group]
        truncated = rollout.finish_reason == FinishReason.LENGTH
        ends = self._prompt_ends(rollout)
        completions = [
            Completion(self.tokenizer.decode(ids), int(length), bool(cut), ends[int(group)])
            for ids, length, cut, group in zip(
                responses(rollout), rollout.response_length, truncated, rollout.group, strict=True
            )
        ]
        rows = list(zip(asked, completions, strict=True))
        judged: Sequence[Graded | TimedOut | Failed]
        judged = [self._grade(*row) for row in rows] if self._in_process else self._processes()(rows)
        failures = ["" if isinstance(one, Graded) else str(one) for one in judged]
        failed = np.asarray([bool(failure) for failure in failures])
        if failed.any():
            first = int(np.flatnonzero(failed)[0])
            message = f"{asked[first].text[:200]!r} -> {completions[first][-200:]!r}: {failures[first]}"
            _logger.warning(
                "the verifier failed on %d of %d completions, first on %s", failed.sum(), len(rows), message
            )
        substitute = self._settings.failed_reward
        empty = Graded(substitute or 0.0, False, "", (float("nan"),) * len(self.part_names))
        seen = [one if isinstance(one, Graded) else empty for one in judged]
        parts = np.asarray([one.parts for one in seen], np.float32).reshape(len(rows), len(self.part_names))
        return Scores(
            completions=completions,
            rewards=np.asarray([one.reward for one in seen], np.float32),
            known=~failed | (substitute is not None),
            correct=np.asarray([one.correct for one in seen]),
            answers=[one.answer for one in seen],
            parts={name: parts[:, i] for i, name in enumerate(self.part_names)},
            failures=failures,
            errors=np.asarray([isinstance(one, Failed) for one in judged]),
            timeouts=np.asarray([isinstance(one, TimedOut) for one in judged]),
            unreadable=np.asarray([not one.readable for one in seen]),
        )

    def _prompt_ends(self, rollout: Rollout) -> dict[int, str]:
        """The last characters of each group's prompt, as the model saw it."""
        rows = {int(group): row for row, group in enumerate(rollout.group)}
        lengths = rollout.prompt_length
        return {
            group: self.tokenizer.decode(
                rollout.tokens[row, max(lengths[row] - _PROMPT_END, 0) : lengths[row]].tolist()
            )
            for group, row in rows.items()
        }

    @property
    def _in_process(self) -> bool:
        return self._reward is None or self._reward.quick

    def _processes(self) -> VerifierPool:
        if self._pool is None:
            assert self._reward is not None  # a task's own function is called in this process
            self._pool = VerifierPool(self._reward, self._settings)
        return self._pool

    @property
    def part_names(self) -> tuple[str, ...]:
        """The parts of the reward that are logged."""
        return self._reward.part_names if self._reward is not None else ()

    def _grade(self, prompt: Prompt, completion: Completion) -> Graded:
        try:
            if self._reward is not None:
                return judge(self._reward, prompt, completion)
            return graded(self._task.reward(prompt, completion), completion)
        except Exception as error:
            error.add_note(
                f"{self._task.name}: while scoring {completion!r} for prompt {prompt.index}, {prompt.text!r}"
            )
            raise

    def close(self) -> None:
        """Ends the verifiers' processes."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Scorer:
        if not self._in_process:
            self._processes()  # they import while others compile
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def agreed(scores: Scores, mesh: Mesh) -> Scores:
    """The same scores on all processes that feed the same rows, whose verifiers may time out differently."""
    names = ("rewards", "known", "correct", "errors", "timeouts", "unreadable", "parts")
    arrays = of_first_process(tuple(getattr(scores, name) for name in names), mesh)
    return scores._replace(**dict(zip(names, arrays, strict=True)))


def score_metrics(
    scores: Scores, group: Int[AnyArray, " B"], component: Int[AnyArray, " B"], task: Task, mesh: Mesh
) -> dict[str, float]:
    """What is logged of a step's rewards, over all processes; of rows whose reward is known, but for the counts."""
    known = scores.known
    flat, groups = without_variance(scores, group)
    rewards = scores.rewards[known].astype(np.float64)
    sums = [
        known.sum(),
        rewards.sum(),
        np.square(rewards).sum(),
        (scores.correct & known).sum(),
        sum(not answer for answer, is_known in zip(scores.answers, known, strict=True) if is_known),
        len(groups),
        len(np.intersect1d(group[flat], groups)),
        scores.errors.sum(),
        scores.timeouts.sum(),
        (scores.unreadable & known).sum(),
    ]
    for values in scores.parts.values():
        has = known & ~np.isnan(values)
        sums += [has.sum(), values[has].sum(dtype=np.float64)]
    tasks = task.components if len(task.components) > 1 else ()
    for i in range(len(tasks)):
        of_task = known & (component == i)
        sums += [of_task.sum(), scores.rewards[of_task].sum(dtype=np.float64)]
    totals = sharding.sum_over_processes(np.asarray(sums, np.float64)).tolist()
    rows, reward, square, correct, unanswered, num_groups, num_flat, errors, timeouts, unreadable = totals[:10]
    rest = iter(totals[10:])
    metrics = {
        "reward/mean": _ratio(reward, rows),
        "reward/std": max(_ratio(square, rows) - _ratio(reward, rows) ** 2, 0.0) ** 0.5,
        "reward/correct": _ratio(correct, rows),
        "reward/no_answer_fraction": _ratio(unanswered, rows),
        "reward/zero_variance_group_fraction": _ratio(num_flat, num_groups),
        # Processes that feed the same rows have each counted them.
        "reward/verifier_errors": errors * row_share(mesh),
        "reward/verifier_timeouts": timeouts * row_share(mesh),
        "reward/unreadable_answers": unreadable * row_share(mesh),
    }
    for name in scores.parts:
        count, total = next(rest), next(rest)
        metrics[f"reward/{name}"] = _ratio(total, count)
    for one in tasks:
        count, total = next(rest), next(rest)
        metrics[f"reward/mean/task={one.name}"] = _ratio(total, count)
    return metrics


def without_variance(scores: Scores, group: Int[AnyArray, " B"]) -> tuple[Bool[np.ndarray, " B"], np.ndarray]:
    """Rows whose group has one and the same reward wherever it is known, and the groups in which any is known.

    A group of which nothing is known has nothing to learn from either.
    """
    groups, of_row = np.unique(group, return_inverse=True)
    lowest, highest = np.full(len(groups), np.inf, np.float32), np.full(len(groups), -np.inf, np.float32)
    np.minimum.at(lowest, of_row[scores.known], scores.rewards[scores.known])
    np.maximum.at(highest, of_row[scores.known], scores.rewards[scores.known])
    known = np.isfinite(lowest)
    spread = np.where(known, highest, 0) - np.where(known, lowest, 0)
    return (spread <= 1e-6 * np.abs(np.where(known, lowest, 0)))[of_row], groups[known]  # as advantages round


def _ratio(total: float, count: float) -> float:
    return total / count if count else float("nan")
