"""Compares final answers as mathematics, read by the parser of math-verify (github.com/huggingface/Math-Verify)."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass

from p3o_jax.rewards.answers import REASONING, Marks, before_open_box, final_answer, without_reasoning
from p3o_jax.rewards.base import Graded, Prompt, Reward, prompt_end
from p3o_jax.rewards.equality import same
from p3o_jax.rewards.expressions import Node, Scalar, Unreadable, Words, read
from p3o_jax.rewards.numbers import canonical, last_number, plain_number, same_number

_MAX_VOTE_CHARACTERS = 2000
_FORMULA = r"(?:\$\$(?:[^$]|\\\$)+\$\$|\$(?:[^$\n]|\\\$)+(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\])"
_FORMULAS = re.compile(rf"{_FORMULA}(?:\s*(?:,?\s*(?:and|or)|,)\s*{_FORMULA})*", re.DOTALL)


@dataclass(frozen=True)
class MathVerify(Reward):
    """1 if the final answer is the prompt's: a number, expression, list, set, interval, equation, time, word; else 0.

    Both are read whole, in a box or not alike. What cannot be read entirely is not correct, and counted as unreadable.
    An answer that is not marked is the last line, if it is nothing else, or else the last formula or number. Exact
    where both are exact; a decimal with at least six digits stands for what it is rounded from. docs/tasks.md has the
    rules and the known mistakes. It runs in processes that can be killed, since some expressions take for ever.
    Needs `pip install 'p3o_jax[tasks]'`.

    Raises:
        ImportError: math-verify is not installed.
    """

    reasoning: Marks = REASONING
    """What begins and ends a block of reasoning, in which no answer is looked for."""

    def __post_init__(self) -> None:
        if importlib.util.find_spec("latex2sympy2_extended") is None:
            raise ImportError("the reward MathVerify needs math-verify: pip install 'p3o_jax[tasks]'")

    def warm_up(self) -> None:
        """Imports sympy and builds the parser."""
        self.grade(Prompt(0, "", "\\frac{x}{2}", {}), "The answer is $0.5x$.")

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """1 or 0."""
        return self.grade(prompt, completion).reward

    def gold_completions(self, prompt: Prompt) -> tuple[str, ...]:
        """The answer as it is, and in a box."""
        return (prompt.answer, f"\\boxed{{{final_answer(prompt.answer) or prompt.answer}}}")

    def grade(self, prompt: Prompt, completion: str) -> Graded:
        """Judges the answer that it finds.

        Raises:
            ValueError: the prompt's answer cannot be read.
        """
        gold = final_answer(prompt.answer) or prompt.answer.strip()
        text = without_reasoning(completion, self.reasoning, prompt_end(completion))
        answer = gold if text.split() == gold.split() else _answer(text)
        number, stated = plain_number(answer), plain_number(gold)
        if number is not None and stated is not None:  # most of them, and quick
            correct = same_number(number, stated)
            if correct or ("." in answer) == ("." in gold):
                return Graded(float(correct), correct, canonical(number))
        try:
            expected = read(gold)
        except (Unreadable, RecursionError) as error:
            raise ValueError(f"the answer of prompt {prompt.index} cannot be read: {error}") from error
        if not answer:
            return Graded(0.0, False, "")
        try:
            found = read(answer)
        except (Unreadable, RecursionError):
            return Graded(0.0, False, answer[:_MAX_VOTE_CHARACTERS], readable=False)
        correct = same(expected, found)
        return Graded(float(correct), correct, _vote(found))


def _answer(text: str) -> str:
    """The answer of a text: marked, or the last line if it is one, or the last formula or number, or else words."""
    marked = final_answer(text)
    if marked is not None:
        return marked
    text = before_open_box(text)
    line = text.strip().split("\n")[-1].strip()
    if not line:
        return ""
    try:
        whole = read(line)
    except (Unreadable, RecursionError):
        whole = None
    prose = len(re.findall(r"(?<!\\)\b[a-zA-Z]{2,}\b", re.sub(r"\\text\w*\s?\{[^{}]*\}|\\[a-zA-Z]+", "", line))) > 2
    if whole is not None and not isinstance(whole, Words) and not prose:
        return line
    formulas = list(_FORMULAS.finditer(text))
    last = formulas[-1] if formulas else None
    if last is not None and not re.search(r"\d", text[last.end() :]):
        return last.group()
    number = last_number(text)
    if number is not None:
        return canonical(number)
    return line if isinstance(whole, Words) or not prose else ""


def _vote(node: Node) -> str:
    """The same text for answers that are written alike but for spaces and units."""
    return str(node.value if isinstance(node, Scalar) else node)[:_MAX_VOTE_CHARACTERS]
