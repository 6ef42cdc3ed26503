"""Scores of a step: whose they are, what failed, and what is logged."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from p3o_jax.batch.types import Rollout
from p3o_jax.devices.sharding import MeshShape, make_mesh
from p3o_jax.experience.scoring import Scorer, Scores, score_metrics, without_variance
from p3o_jax.rewards import ExactMatch, Function, NumericMatch, Part, Prompt, Reward, Tags, WeightedSum
from p3o_jax.rewards.pool import Verifiers
from p3o_jax.tasks import SortDigits
from p3o_jax.tokenizers.text import CharTokenizer
from tests.made_rollouts import one_turn

TASK = SortDigits(length=2)
MESH = make_mesh(MeshShape(), jax.devices()[:1])


@dataclass(frozen=True)
class Judged(SortDigits):
    """With a reward that is an object."""

    reward: Reward = Function("tests.rewards.verifiers:sorted_or_else")


def make_rollout(*completions, truncated=()) -> Rollout:
    """Two responses a prompt, to prompts 7 and 9; garbage at padding."""
    encode = CharTokenizer().encode
    tokens = np.full((len(completions), 20), 5, np.int32)
    for i, text in enumerate(completions):
        tokens[i, 3 : 3 + len(text)] = encode(text)
    cut = np.isin(np.arange(len(completions)), truncated)
    rows = len(completions)
    lengths = np.asarray([len(text) for text in completions], np.int32) + ~cut
    group = np.repeat([7, 9], rows // 2).astype(np.int32)
    return one_turn(tokens, 3, lengths, finish_reason=cut.astype(np.int32), group=group)


PROMPTS = [Prompt(9, "21=", "12", {}), Prompt(7, "43=", "34", {})]


def score(task, rollout, settings=Verifiers(processes=1, timeout_seconds=1)):  # noqa: B008
    with Scorer(task, CharTokenizer(), settings) as scorer:
        return scorer(PROMPTS, rollout)


def metrics_of(scores, rollout, task=TASK):
    return score_metrics(scores, rollout.group, rollout.task, task, MESH)


def test_scores_are_of_the_rows_own_prompts():
    scores = score(TASK, make_rollout("34", "12", "12", "1"))  # the order of prompts does not matter
    assert scores.completions == ["34", "12", "12", "1"]
    assert scores.rewards.tolist() == [1, 0, 1, 0]
    assert scores.correct.tolist() == [True, False, True, False]
    assert scores.known.all()


def test_completions_know_how_long_they_are():
    scores = score(TASK, make_rollout("34", "1", "12", "1234", truncated=[3]))
    assert [one.num_tokens for one in scores.completions] == [3, 2, 3, 4]
    assert [one.truncated for one in scores.completions] == [False, False, False, True]


def test_completions_know_the_end_of_their_own_prompt():
    scores = score(TASK, make_rollout("34", "1", "12", "1"))
    assert {one.prompt_end for one in scores.completions} == {CharTokenizer().decode([5, 5, 5])}


def test_answers_that_cannot_be_read_are_counted():
    rollout = make_rollout("34", "3+4", "2 or 3", "")
    scores = score(replace(Judged(length=2), reward=NumericMatch()), rollout)
    assert scores.unreadable.tolist() == [False, False, False, False]  # nothing is marked: there is no answer
    rollout = make_rollout("34", "Answer: 3+4", "Answer: 2x", "Answer: 12")
    scores = score(replace(Judged(length=2), reward=NumericMatch()), rollout)
    assert scores.unreadable.tolist() == [False, True, True, False]
    metrics = metrics_of(scores, rollout)
    assert metrics["reward/unreadable_answers"] == 2
    assert metrics["reward/no_answer_fraction"] == 0
    assert metrics["reward/mean"] == 0.5


def test_a_reward_in_this_process_that_fails_ends_the_run_and_names_the_row():
    class Broken(SortDigits):
        def reward(self, prompt, completion):
            return float("nan")

    with pytest.raises(ValueError, match="the reward is nan") as caught:
        score(Broken(length=2), make_rollout("34", "12", "12", "1"))
    assert "while scoring '34' for prompt 7, '43='" in caught.value.__notes__[0]


def test_a_verifier_that_fails_is_counted_and_its_row_has_no_reward(caplog):
    rollout = make_rollout("34", "9", "0", "11")
    scores = score(Judged(length=2), rollout)
    assert scores.known.tolist() == [True, False, False, True]
    assert scores.timeouts.tolist() == [False, True, False, False]
    assert scores.errors.tolist() == [False, False, True, False]
    assert scores.failures[1:3] == ["killed after 1 s", "RuntimeError: a zero is no reward"]
    assert "the verifier failed on 2 of 4 completions, first on '43=' -> '9': killed after 1 s" in caplog.text
    metrics = metrics_of(scores, rollout)
    assert metrics["reward/mean"] == 0.75  # of 1 and 0.5, not of four rows
    assert metrics["reward/verifier_errors"] == metrics["reward/verifier_timeouts"] == 1
    given = score(Judged(length=2), rollout, Verifiers(processes=1, timeout_seconds=1, failed_reward=-1.0))
    assert given.rewards.tolist() == [1, -1, -1, 0.5]
    assert given.known.all()
    assert metrics_of(given, rollout)["reward/verifier_errors"] == 1


def test_parts_are_logged():
    reward = WeightedSum((Part("answer", ExactMatch()), Part("form", Tags(("a",)), 0.5)))
    rollout = make_rollout("34", "<a>34</a>", "12", "")
    scores = score(replace(Judged(length=2), reward=reward), rollout)
    metrics = metrics_of(scores, rollout)
    assert scores.rewards.tolist() == [1, 0.5, 1, 0]
    assert metrics["reward/answer"] == 0.5
    assert metrics["reward/form"] == 0.25
    assert metrics["reward/correct"] == 0.5
    assert metrics["reward/no_answer_fraction"] == 0.25
    assert metrics["reward/mean"] == 2.5 / 4
    assert metrics["reward/std"] == pytest.approx(np.std([1, 0.5, 1, 0]))


def make_scores(rewards, known) -> Scores:
    rewards, known = np.asarray(rewards, np.float32), np.asarray(known)
    no = np.zeros(len(rewards), bool)
    return Scores([], rewards, known, no, [""] * len(rewards), {}, [""] * len(rewards), no, no, no)


def test_groups_without_variance_are_those_of_the_rewards_that_are_known():
    group = np.asarray([5, 5, 3, 3, 8, 8, 1, 1])
    scores = make_scores([1, 1, 0, 1, 0, 7, 7, 7], [True] * 5 + [False] * 3)
    flat, groups = without_variance(scores, group)
    # Group 8 has one known reward; group 1 has none, and is no group that could have had variance.
    assert flat.tolist() == [True, True, False, False, True, True, True, True]
    assert groups.tolist() == [3, 5, 8]
    metrics = score_metrics(scores, group, np.zeros(8, np.int32), TASK, MESH)
    assert metrics["reward/zero_variance_group_fraction"] == 2 / 3
