"""Final answers: the golden set, and where in a text an answer is looked for."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest

from p3o_jax.rewards import Completion, ExactMatch, MathVerify, NumericMatch, Prompt
from p3o_jax.rewards.answers import final_answer, last_boxed, without_reasoning
from p3o_jax.rewards.numbers import one_number

GOLDEN = [
    json.loads(line)
    for line in (Path(__file__).parent.parent / "data" / "answers.jsonl").open(encoding="utf-8", newline="\n")
]


def mistakes(name, reward):
    rows = [row for row in GOLDEN if row["reward"] == name]
    assert len(rows) >= 12
    found = [(row, reward.grade(Prompt(0, "", row["gold"], {}), row["answer"])) for row in rows]
    return [(row, one) for row, one in found if one.reward != row["expected"] or one.correct != row["expected"]]


def test_the_golden_set_is_large_and_has_answers_of_both_kinds():
    assert len(GOLDEN) >= 500
    assert len({(row["reward"], row["gold"], row["answer"]) for row in GOLDEN}) == len(GOLDEN)
    assert 200 < sum(row["expected"] for row in GOLDEN) < len(GOLDEN) - 200


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
        ("\\boxed{\\boxed{6}}", "6"),
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
        ("\\boxed{1} and \\boxed{2}", "1, 2"),  # one answer of two
        ("$\\boxed{1}$, $\\boxed{2}$ or $\\boxed{3}$", "1, 2, 3"),
        ("\\boxed{1} is wrong, and \\boxed{2} is right", "2"),
        ("<answer> 5 </answer>", "5"),
        ("<answer>The answer is 5.</answer> I am sure.", "5"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("Answer: 3\u2028 4", "3\u2028 4"),  # a line ends at \n and nowhere else
        ("Answer:", None),
        ("answers are wrong", None),
    ],
)
def test_where_a_marked_answer_is(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "outside"),
    [
        ("<think>a</think>b", "b"),
        ("x<think>a</think>y<think>b</think>z", "xyz"),
        ("x<think>a", "x"),  # it never ends
        ("a</think>b", "b"),  # the template began it
        ("<think>a<think>b</think>c</think>d", "d"),
        ("no block", "no block"),
        ("<think></think>", ""),
        ("<THINK>a</THINK>b", "<THINK>a</THINK>b"),
    ],
)
def test_what_stands_outside_of_reasoning(text, outside):
    assert without_reasoning(text) == outside


def test_a_block_that_the_prompt_began_and_the_response_does_not_end():
    assert without_reasoning("still thinking of 7", prompt_end="<|assistant|>\n<think>\n") == ""
    assert without_reasoning("7", prompt_end="<|assistant|>\n") == "7"
    assert without_reasoning("<think>6</think>7", prompt_end="<think>") == "7"


@pytest.mark.parametrize(
    "marks", [(("[THINK]", "[/THINK]"),), (("<reasoning>", "</reasoning>"), ("[THINK]", "[/THINK]"))]
)
def test_which_tags_hold_reasoning_is_a_setting(marks):
    prompt = Prompt(0, "", "5", {})
    for reward in (NumericMatch(reasoning=marks), ExactMatch(reasoning=marks)):
        assert reward(prompt, "[THINK]The answer is 6.[/THINK]\n5") == 1
        assert reward(prompt, "[THINK]5") == 0
        assert reward(prompt, "<think>Answer: 6</think>\nAnswer: 5") == 1


@pytest.mark.parametrize("reward", [NumericMatch(), ExactMatch(), "math"])
def test_reasoning_is_never_the_answer(reward):
    if reward == "math":
        pytest.importorskip("math_verify", reason="needs the extra 'tasks'")
        reward = MathVerify()
    prompt = Prompt(0, "", "5", {})
    opened = "<|im_start|>assistant\n<think>\n"
    assert reward(prompt, "<think>6?</think>\n5") == 1
    assert reward(prompt, "6?</think>5") == 1
    assert reward(prompt, Completion("\\boxed{5}", prompt_end=opened)) == 0  # it has not ended
    assert reward(prompt, Completion("\\boxed{6}</think>\\boxed{5}", prompt_end=opened)) == 1
    assert reward(prompt, Completion("5", prompt_end="assistant\n")) == 1
    assert reward.grade(prompt, "<think>5").answer == ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", Fraction(1, 10)),
        ("1/3", Fraction(1, 3)),
        ("1\\frac{1}{2}", Fraction(3, 2)),
        ("-1 1/2", Fraction(-3, 2)),
        ("2^{10}", 1024),
        ("2^{-3}", Fraction(1, 8)),
        ("1.5 \\times 10^{-3}", Fraction(3, 2000)),
        ("$1,234.50 each", Fraction(2469, 2)),
        ("about 12 cm", 12),
        ("12\\text{ cm}^2", 12),
        ("a = 3 = 1 + 2 = 3", 3),
        ("7 (that is, 3 + 4)", 7),
        *((text, None) for text in ("1/0", "2 + 3", "2 or 3", "3x", "2\\sqrt{3}", "10:30", "1, 2", "2e", "2 million",
                                    "0^{-1}", "9^{99999}", "x > 2", "a = 1, b = 2", "3 feet 4 inches", "2 3", "")),
    ],
)  # fmt: skip
def test_an_answer_is_one_number_or_none(text, value):
    number = one_number(text)
    assert (None if number is None else Fraction(number)) == value


def test_numbers_are_exact():
    third = NumericMatch(relative_tolerance=0.01)
    assert third(Prompt(0, "", "1/3", {}), "0.333") == 1
    assert NumericMatch()(Prompt(0, "", "1/3", {}), "0.333") == 0


@pytest.mark.parametrize("answer", ["2 + 3", "2\\sqrt{3}", "3x", "2, 3"])
def test_what_is_no_number_is_unreadable_and_not_missing(answer):
    graded = NumericMatch().grade(Prompt(0, "", "2", {}), f"\\boxed{{{answer}}}")
    assert graded == (0.0, False, answer, (), False)
    assert NumericMatch().grade(Prompt(0, "", "2", {}), "no idea") == (0.0, False, "", (), True)


@pytest.mark.parametrize("answer", ["6\\foo{2}", "6 6", "(6", "6\\operatorname{foo}(x)", "6 +", "\\frac{6}{"])
def test_what_cannot_be_parsed_is_unreadable_and_not_the_number_in_it(answer):
    pytest.importorskip("math_verify", reason="needs the extra 'tasks'")
    graded = MathVerify().grade(Prompt(0, "", "6", {}), f"\\boxed{{{answer}}}")
    assert not graded.correct and (not graded.readable or graded.answer == "")


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
