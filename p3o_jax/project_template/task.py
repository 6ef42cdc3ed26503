"""Reversing words: `stone=` -> `enots`."""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from p3o_jax.tasks.base import DrawnPrompts, Prompt, PromptSource, Split, Task
from p3o_jax.tokenizers.text import CharTokenizer

_TOKENIZER = CharTokenizer(string.ascii_lowercase + "=")


@dataclass(frozen=True)
class Reversal(Task):
    """Write a word backwards. A task is a frozen dataclass: its fields are flags (`--task.length 6`)."""

    length: int = 5
    """Letters of a word."""

    name: ClassVar[str] = "reversal"

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ValueError(f"length must be at least 2, got {self.length}")

    @property
    def tokenizer(self) -> CharTokenizer:
        """Letters, `=` and the end of a sequence; of use only to a model that is trained from scratch."""
        return _TOKENIZER

    @property
    def max_prompt_tokens(self) -> int:
        """The letters and `=`."""
        return self.length + 1

    @property
    def max_response_tokens(self) -> int:
        """The letters and the end of the sequence."""
        return self.length + 1

    def prompts(self, split: Split, seed: int) -> PromptSource:
        """Random words; those of the two splits differ."""
        return DrawnPrompts(partial(self._draw, seed), split, length=2**20)

    def _draw(self, seed: int, index: int, attempt: int) -> Prompt:
        rng = np.random.default_rng((seed, index, attempt))
        word = "".join(rng.choice(list(string.ascii_lowercase), size=self.length))
        return Prompt(index, f"{word}=", answer=word[::-1], metadata={})

    def reward(self, prompt: Prompt, completion: str) -> float:
        """The share of letters in their places; 1 for the answer alone. An error is raised, never a 0."""
        if len(completion) > len(prompt.answer):
            return 0.0
        return sum(a == b for a, b in zip(completion, prompt.answer, strict=False)) / len(prompt.answer)
