"""Final answers: the golden set, and where in a text an answer is looked for."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest

from p3o_jax.rewards import ExactMatch, MathVerify, NumericMatch, Prompt
from p3o_jax.rewards.answers import final_answer, last_boxed, number_of

GOLDEN = [
    json.loads(line) for line in (Path(__file__).parent.parent / "data" / "answers.jsonl").read_text().splitlines()
]


def mistakes(name, reward):
    rows = [row for row in GOLDEN if row["reward"] == name]
    assert len(rows) >= 12
    found = [(row, reward.grade(Prompt(0, "", row["gold"], {}), row["answer"])) for row in rows]
    return [(row, one) for row, one in found if one.reward != row["expected"] or one.correct != row["expected"]]


def test_the_golden_set_is_large_and_has_answers_of_both_kinds():
    assert len(GOLDEN) >= 60
    assert len({(row["reward"], row["gold"], row["answer"]) for row in GOLDEN}) == len(GOLDEN)
    assert sum(row["expected"] for row in GOLDEN) > 40 < len(GOLDEN) - 15


def test_golden_answers_as_numbers():
    assert mistakes("numeric", NumericMatch()) == []


def test_golden_answers_as_text():
    assert mistakes("exact", ExactMatch()) == []


def test_golden_answers_as_mathematics():
    pytest.importorskip("math_verify", reason="needs the extra 'tasks'")
    assert mistakes("math", MathVerify()) == []


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{2}", "2"),
        ("\\boxed{1} and \\boxed{2", "1"),  # cut in the middle of the second
        ("\\boxed{ {3} }", "{3}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("}}} \\boxed {4}", "4"),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_the_last_box_whose_braces_close(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 42", "42"),
        ("#### 42\n", "42"),
        ("#### 1\n#### 2\nmore", "2"),
        ("The answer is 3.5 cm. It is short.", "3.5 cm"),
        ("**Answer:** x = 2", "x = 2"),
        ("Answer: 1\nThe answer is: 2", "2"),
        ("the answer is \\boxed{7}.", "7"),
        ("Answer:", None),
        ("answers are wrong", None),
    ],
)
def test_where_a_marked_answer_is(text, answer):
    assert final_answer(text) == answer


def test_numbers_are_exact():
    assert number_of("0.1", marked=True) == Fraction(1, 10)
    assert number_of("1/3", marked=True) == Fraction(1, 3)
    assert number_of("1/0", marked=True) is None
    third = NumericMatch(relative_tolerance=0.01)
    assert third(Prompt(0, "", "1/3", {}), "0.333") == 1
    assert NumericMatch()(Prompt(0, "", "1/3", {}), "0.333") == 0


def test_equal_answers_vote_together():
    grade = NumericMatch().grade
    prompt = Prompt(0, "", "1234", {})
    assert {grade(prompt, text).answer for text in ("1,234", "1234.00", "$1234", "1.234e3")} == {"1234"}
    assert grade(prompt, "none").answer == ""


@pytest.mark.parametrize(
    "text", ["1" * 100_000, "answer is " * 20_000, "\\boxed{" * 20_000, "1," * 50_000, "-" * 100_000]
)
def test_time_is_linear_in_the_text(text):
    started = time.perf_counter()
    NumericMatch()(Prompt(0, "", "42", {}), text)
    ExactMatch()(Prompt(0, "", "42", {}), text)
    assert time.perf_counter() - started < 5


def test_a_gold_that_cannot_be_compared_is_an_error():
    with pytest.raises(ValueError, match="answer of prompt 3 is no number: 'Tuesday'"):
        NumericMatch()(Prompt(3, "", "Tuesday", {}), "42")
    with pytest.raises(ValueError, match="prompt 3 has no answer"):
        ExactMatch()(Prompt(3, "", "", {}), "42")
