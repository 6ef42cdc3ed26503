"""What rewards are made of: parts, functions of one's own, form and length."""

from __future__ import annotations

import math
import pickle

import pytest

from p3o_jax.rewards import (
    Completion,
    ExactMatch,
    Function,
    Matches,
    NumericMatch,
    OverlongPenalty,
    Part,
    Prompt,
    Tags,
    WeightedSum,
)

PROMPT = Prompt(0, "", "42", {})


def test_a_completion_is_its_text_and_how_it_was_sampled():
    completion = Completion("42", num_tokens=3, truncated=True, prompt_end="<think>")
    assert completion == "42"
    again = pickle.loads(pickle.dumps(completion))
    assert (again, again.num_tokens, again.truncated, again.prompt_end) == ("42", 3, True, "<think>")


def test_a_weighted_sum_and_its_parts():
    reward = WeightedSum(
        (
            Part("answer", NumericMatch()),
            Part("form", Tags(("answer",)), 0.5),
            Part("length", OverlongPenalty(10, 4), 2.0),
        )
    )
    found = reward.grade(PROMPT, Completion("<answer>42</answer>", num_tokens=8))
    # 1 + 0.5 * 1 + 2 * ((10 - 4) - 8) / 4
    assert found.reward == 0.5
    assert found.parts == (1.0, 1.0, -0.5)
    assert found.correct and found.answer == "42"  # as the first part says, whatever the sum
    wrong = reward.grade(PROMPT, Completion("<answer>41</answer>", num_tokens=1))
    assert (wrong.reward, wrong.correct) == (0.5, False)
    assert reward.part_names == ("answer", "form", "length")
    assert reward.quick
    assert not WeightedSum((Part("answer", NumericMatch()), Part("form", Matches(".*")))).quick


def test_tags_that_the_prompt_has_opened():
    good = "<think>seven</think><answer>odd</answer>"
    rest = good.removeprefix("<think>")
    assert Tags()(PROMPT, Completion(rest, prompt_end="assistant\n<think>\n")) == 1
    assert Tags()(PROMPT, Completion(rest, prompt_end="assistant\n")) == 0  # it should have opened the tag itself
    assert Tags()(PROMPT, Completion(good, prompt_end="assistant\n")) == 1
    assert Tags()(PROMPT, Completion(good, prompt_end="<think>")) == 0  # twice
    assert Tags()(PROMPT, rest) == Tags()(PROMPT, good) == 1  # a text that does not know its prompt
    assert Tags()(PROMPT, "seven<answer>odd</answer>") == 0


@pytest.mark.parametrize("name", ["mean", "verifier_errors", "a/b", ""])
def test_parts_have_names_of_their_own(name):
    with pytest.raises(ValueError, match="different names"):
        WeightedSum((Part(name, ExactMatch()),))
    with pytest.raises(ValueError, match="different names"):
        WeightedSum((Part("a", ExactMatch()), Part("a", Tags())))


@pytest.mark.parametrize(
    ("tokens", "truncated", "penalty"),
    [
        (0, False, 0),
        (12, False, 0),
        (13, False, -0.25),
        (14, False, -0.5),
        (16, False, -1),
        (17, False, -1),
        (16, True, -1),
    ],
)
def test_the_soft_penalty_of_dapo(tokens, truncated, penalty):
    # L = 16, C = 4: free up to 12, then a quarter a token.
    assert OverlongPenalty(16, 4)(PROMPT, Completion("", tokens, truncated)) == penalty


def test_the_penalty_needs_lengths_that_make_sense():
    with pytest.raises(ValueError, match=r"buffer_tokens must be in 1 .. max_tokens=4, got 5"):
        OverlongPenalty(4, 5)
    with pytest.raises(TypeError, match="needs a Completion"):
        OverlongPenalty(4, 2)(PROMPT, "text")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" <think>a\nb</think>\n\n<answer></answer>\n", 1),
        ("<think>a</think><answer>b</answer> and more", 0),
        ("so <think>a</think><answer>b</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a<answer>b</answer></think>", 0),
        ("<think><think>a</think><answer>b</answer>", 0),
        ("<think>a</think>", 0),
        ("", 0),
    ],
)
def test_tags(text, expected):
    assert Tags()(PROMPT, text) == expected


def test_patterns():
    reward = Matches(r"\d+\n?")
    assert [reward(PROMPT, text) for text in ("12", "12\n", "x12", "")] == [1, 1, 0, 0]
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression: "):
        Matches("(")


def test_a_function_of_ones_own():
    reward = Function("tests.rewards.verifiers:obedient", {"weight": 3.0})
    assert reward(PROMPT, "say 2") == 6
    assert reward.grade(PROMPT, "say 0.5").correct
    assert not reward.grade(PROMPT, "say 0.1").correct
    with pytest.raises(ValueError, match="the reward is nan"):
        reward.grade(PROMPT, f"say {math.nan}")
    assert pickle.loads(pickle.dumps(reward))(PROMPT, "say 2") == 6


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("obedient", "not of the form module:function"),
        ("no_such_module:f", "cannot import no_such_module"),
        ("tests.rewards.verifiers:g", "tests.rewards.verifiers has no function 'g'"),
    ],
)
def test_a_function_that_is_not_there_is_refused_at_once(path, message):
    with pytest.raises(ValueError, match=message):
        Function(path)
