"""Compares final answers as text and as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from p3o_jax.rewards.answers import REASONING, Marks, before_open_box, final_answer, last_lines, without_reasoning
from p3o_jax.rewards.base import Graded, Prompt, Reward, prompt_end
from p3o_jax.rewards.numbers import Number, canonical, last_number, one_number, same_number


@dataclass(frozen=True)
class ExactMatch(Reward):
    r"""1 if the final answer is the whole of the prompt's, else 0.

    An answer that is not marked is the last line, or as many as the prompt's answer has. Lines end at `\n` only.
    Spacing, a final full stop and dollar signs around it do not count: "42." is 42.
    """

    ignore_case: bool = False
    """Whether upper and lower case are the same."""
    reasoning: Marks = REASONING
    """What begins and ends a block of reasoning, in which no answer is looked for."""

    @property
    def quick(self) -> bool:
        """Always."""
        return True

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """1 or 0."""
        return self.grade(prompt, completion).reward

    def gold_completions(self, prompt: Prompt) -> tuple[str, ...]:
        """The answer as it is."""
        return (prompt.answer,)

    def grade(self, prompt: Prompt, completion: str) -> Graded:
        """Judges the answer that it finds.

        Raises:
            ValueError: the prompt has no answer.
        """
        gold = (final_answer(prompt.answer) or prompt.answer).strip()
        if not self._normalised(gold):
            raise ValueError(f"prompt {prompt.index} has no answer to compare with")
        text = without_reasoning(completion, self.reasoning, prompt_end(completion))
        answer = final_answer(text)
        if answer is None:
            answer = last_lines(text, gold.count("\n") + 1)
        answer = self._normalised(answer)
        correct = answer == self._normalised(gold)
        return Graded(float(correct), correct, answer)

    def _normalised(self, answer: str) -> str:
        answer = " ".join(answer.split()).removesuffix(".").strip()
        if len(answer) > 1 and answer[0] == answer[-1] == "$":
            answer = answer.strip("$").strip()
        return answer.casefold() if self.ignore_case else answer


@dataclass(frozen=True)
class NumericMatch(Reward):
    r"""1 if the final answer is the prompt's number, else 0; if no answer is marked, the last number counts.

    Thousands separators, units, currencies and a final full stop do not: "$1,234.00 each." is 1234. Fractions, powers
    and powers of ten are compared exactly. What is not one number, such as 2 + 3, 2 or 3, 3x or 2\sqrt{3}, is none: it
    is not correct, and not readable.
    """

    relative_tolerance: float = 0.0
    """Largest error, relative to the prompt's number."""
    reasoning: Marks = REASONING
    """What begins and ends a block of reasoning, in which no answer is looked for."""

    def __post_init__(self) -> None:
        if not 0 <= self.relative_tolerance < 1:
            raise ValueError(f"relative_tolerance must be in [0, 1), got {self.relative_tolerance}")

    @property
    def quick(self) -> bool:
        """Always."""
        return True

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """1 or 0."""
        return self.grade(prompt, completion).reward

    def gold_completions(self, prompt: Prompt) -> tuple[str, ...]:
        """The answer as it is, and in a box."""
        return (prompt.answer, f"\\boxed{{{final_answer(prompt.answer) or prompt.answer}}}")

    def grade(self, prompt: Prompt, completion: str) -> Graded:
        """Judges the number that it finds.

        Raises:
            ValueError: the prompt's answer is not one number.
        """
        gold = _number(prompt.answer)[0]
        if gold is None:
            raise ValueError(f"the answer of prompt {prompt.index} is no number: {prompt.answer[:80]!r}")
        value, answer = _number(without_reasoning(completion, self.reasoning, prompt_end(completion)))
        if value is None:
            return Graded(0.0, False, answer, readable=not answer)
        correct = same_number(value, gold, self.relative_tolerance)
        return Graded(float(correct), correct, canonical(value))


def _number(text: str) -> tuple[Number | None, str]:
    """The number, and the marked answer that it is read from; empty: none is marked."""
    answer = final_answer(text)
    return (last_number(before_open_box(text)), "") if answer is None else (one_number(answer), answer)
