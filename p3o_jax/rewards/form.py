"""The form of a completion: a pattern, tags, its length."""

from __future__ import annotations

import re
from dataclasses import dataclass

from p3o_jax.rewards.answers import opened
from p3o_jax.rewards.base import Completion, Prompt, Reward


@dataclass(frozen=True)
class Matches(Reward):
    """1 if the whole completion matches a regular expression, else 0.

    Raises:
        ValueError: it is not one.
    """

    pattern: str
    """A Python regular expression, in which `.` also matches a line's end."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"{self.pattern!r} is not a regular expression: {error}") from error

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """1 or 0."""
        return float(re.fullmatch(self.pattern, completion, re.DOTALL) is not None)


@dataclass(frozen=True)
class Tags(Reward):
    """1 if the completion is `<a>...</a> <b>...</b>`: each tag once, in order, and nothing around them; else 0.

    Where the prompt ends with the first opening tag, as some chat templates have it, the completion goes on from there.
    Of a text that does not know its prompt's end, either form is right.
    """

    names: tuple[str, ...] = ("think", "answer")
    """The tags, in order."""

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"tags need different names, got {self.names}")

    @property
    def quick(self) -> bool:
        """Always: it takes time linear in the completion."""
        return True

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """1 or 0."""
        first = f"<{self.names[0]}>"
        end = getattr(completion, "prompt_end", None)
        if opened(end, first) if end is not None else first not in completion:
            completion = first + completion
        rest = completion.strip()
        for name in self.names:
            opening, closing = f"<{name}>", f"</{name}>"
            if completion.count(opening) != 1 or completion.count(closing) != 1 or not rest.startswith(opening):
                return 0.0
            rest = rest.partition(closing)[2].lstrip()
        return float(not rest)


@dataclass(frozen=True)
class OverlongPenalty(Reward):
    """DAPO's soft over-long punishment (arXiv:2503.14476, Eq. 13), of a response of n tokens:

        0                           n <= L - C
        ((L - C) - n) / C           L - C < n <= L
        -1                          L < n, or cut at the limit

    A part of a weighted sum, added to what the answer is worth.
    """

    max_tokens: int
    """L: at most the task's limit on responses."""
    buffer_tokens: int
    """C: the last tokens before it, over which the penalty grows."""

    def __post_init__(self) -> None:
        if not 0 < self.buffer_tokens <= self.max_tokens:
            raise ValueError(
                f"over-long penalty: buffer_tokens must be in 1 .. max_tokens={self.max_tokens}, got "
                f"{self.buffer_tokens}"
            )

    @property
    def quick(self) -> bool:
        """Always."""
        return True

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """In [-1, 0].

        Raises:
            TypeError: the completion does not know its length in tokens.
        """
        if not isinstance(completion, Completion):
            raise TypeError("the over-long penalty needs a Completion, which knows its number of tokens, not a str")
        free = self.max_tokens - self.buffer_tokens
        if completion.truncated or completion.num_tokens > self.max_tokens:
            return -1.0
        return min(0.0, (free - completion.num_tokens) / self.buffer_tokens)
