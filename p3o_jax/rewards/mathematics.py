"""Mathematical equality of final answers, by math-verify (github.com/huggingface/Math-Verify)."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from typing import Any

from p3o_jax.rewards.answers import canonical, final_answer, plain_number, same_number
from p3o_jax.rewards.base import Graded, Prompt, Reward

_MAX_ANSWER_CHARACTERS = 2000


@dataclass(frozen=True)
class MathVerify(Reward):
    """1 if the final answer equals the prompt's as a number, expression, set, interval, matrix or word; else 0.

    An answer is what `answers.final_answer` finds, or else what math-verify finds last in the text. math-verify's own
    time-outs are off, since they use a signal, swallow it, and give 0: the process it runs in is killed instead.
    Needs `pip install 'p3o_jax[tasks]'`.

    Raises:
        ImportError: math-verify is not installed.
    """

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("the reward MathVerify needs math-verify: pip install 'p3o_jax[tasks]'")

    def warm_up(self) -> None:
        """Imports sympy and builds the parsers."""
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # that its time-outs are off, at every start
        self.grade(Prompt(0, "", "\\frac{1}{2}", {}), "The answer is $0.5$.")

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """1 or 0."""
        return self.grade(prompt, completion).reward

    def gold_completions(self, prompt: Prompt) -> tuple[str, ...]:
        """The answer as it is, and in a box."""
        return (prompt.answer, f"\\boxed{{{final_answer(prompt.answer) or prompt.answer}}}")

    def grade(self, prompt: Prompt, completion: str) -> Graded:
        """With the answer that was found.

        Raises:
            ValueError: the prompt's answer cannot be parsed, or the completion's is absurdly long.
        """
        from math_verify import verify

        number, stated = (plain_number(final_answer(text) or text) for text in (completion, prompt.answer))
        if number is not None and stated is not None:  # most of them, and with forms that math-verify lacks, as 1e3
            correct = same_number(number, stated)
            return Graded(float(correct), correct, canonical(number))
        gold = _parse(prompt.answer)
        if not gold or (all(isinstance(form, str) for form in gold) and not _is_words(gold[0])):
            raise ValueError(f"the answer of prompt {prompt.index} cannot be parsed: {prompt.answer[:80]!r}")
        found = _parse(completion)
        if not found:
            return Graded(0.0, False, "")
        # All forms of the gold, but of a completion only the one it means: else "2, or 3" would be both.
        equal = any(verify(form, found, timeout_seconds=None, raise_on_error=True) for form in gold)
        return Graded(float(equal), equal, str(found[0])[:_MAX_ANSWER_CHARACTERS])


def _parse(text: str) -> list[Any]:
    """The final answer as sympy expressions and, last, as text; nothing if there is none."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    answer = final_answer(text)
    if answer is not None and len(answer) > _MAX_ANSWER_CHARACTERS:
        raise ValueError(f"a final answer of {len(answer)} characters")
    short = text.strip()
    if answer is None and len(short) <= 40 and "\n" not in short:  # an answer and nothing else
        forms = [short, f"\\boxed{{{short}}}"]
        if set(short) & set("\\^({["):
            forms.reverse()
    else:
        forms = [text] if answer is None else [f"\\boxed{{{answer}}}", answer]
    for form in forms:
        config = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
        found = parse(form, config, parsing_timeout=None, raise_on_error=True)
        if any(not isinstance(one, str) for one in found):
            return found
    return found


def _is_words(text: str) -> bool:
    return "\\" not in text and any(character.isalnum() for character in text)
