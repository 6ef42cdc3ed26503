"""Comparing final answers as text and as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from p3o_jax.rewards.answers import canonical, final_answer, number_of, same_number
from p3o_jax.rewards.base import Graded, Prompt, Reward


@dataclass(frozen=True)
class ExactMatch(Reward):
    """1 if the final answer is the prompt's, else 0; an answer that is not marked is the last line.

    Spacing, a final full stop and dollar signs around it do not count: "42." is 42.
    """

    ignore_case: bool = False
    """Whether upper and lower case are the same."""

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
        """With the answer that was found.

        Raises:
            ValueError: the prompt has no answer.
        """
        gold, answer = self._normalised(prompt.answer), self._normalised(completion)
        if not gold:
            raise ValueError(f"prompt {prompt.index} has no answer to compare with")
        return Graded(float(answer == gold), answer == gold, answer)

    def _normalised(self, text: str) -> str:
        answer = final_answer(text)
        if answer is None:
            lines = text.strip().splitlines()
            answer = lines[-1] if lines else ""
        answer = " ".join(answer.split()).removesuffix(".").strip()
        if len(answer) > 1 and answer[0] == answer[-1] == "$":
            answer = answer.strip("$").strip()
        return answer.casefold() if self.ignore_case else answer


@dataclass(frozen=True)
class NumericMatch(Reward):
    """1 if the final answer is the prompt's number, else 0; if no answer is marked, the last number counts.

    Thousands separators, units, currencies and a final full stop do not: "$1,234.00 each." is 1234. Fractions and
    powers of ten are compared exactly.
    """

    relative_tolerance: float = 0.0
    """Largest error, relative to the prompt's number."""

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
        """With the number that was found.

        Raises:
            ValueError: there is no number in the prompt's answer.
        """
        gold = _number(prompt.answer)
        if gold is None:
            raise ValueError(f"the answer of prompt {prompt.index} is no number: {prompt.answer[:80]!r}")
        value = _number(completion)
        correct = value is not None and same_number(value, gold, self.relative_tolerance)
        return Graded(float(correct), correct, "" if value is None else canonical(value))


def _number(text: str) -> Fraction | Decimal | None:
    answer = final_answer(text)
    return number_of(text, marked=False) if answer is None else number_of(answer, marked=True)
