"""Sorting digits: `3141592653=` -> `1123345569`. Small enough to learn in seconds, and exact."""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from p3o_jax.tasks.base import DrawnPrompts, Prompt, PromptSource, Split, Task, noisy
from p3o_jax.tokenizers.text import CharTokenizer

_TOKENIZER = CharTokenizer(string.digits + "=")
_NUM_PROMPTS = 2**20  # then the stream repeats, in another order


@dataclass(frozen=True)
class SortDigits(Task):
    """Sort the digits of a number; reward 1 for the exact answer, else 0."""

    length: int = 10
    """Digits in a prompt."""

    name: ClassVar[str] = "sort_digits"

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ValueError(f"length must be at least 2, got {self.length}")

    @property
    def tokenizer(self) -> CharTokenizer:
        """Ten digits, `=` and the end of a sequence."""
        return _TOKENIZER

    @property
    def max_prompt_tokens(self) -> int:
        """The digits and `=`."""
        return self.length + 1

    @property
    def max_response_tokens(self) -> int:
        """The digits and the end of the sequence."""
        return self.length + 1

    def prompts(self, split: Split, seed: int) -> PromptSource:
        """Uniformly random digits."""
        return DrawnPrompts(partial(self._draw, seed), split, _NUM_PROMPTS)

    def _draw(self, seed: int, index: int, attempt: int) -> Prompt:
        rng = np.random.default_rng((seed, index, attempt))
        digits = "".join(map(str, rng.integers(10, size=self.length)))
        return Prompt(index, f"{digits}=", "".join(sorted(digits)), {})

    def reward(self, prompt: Prompt, completion: str) -> float:
        """1 for the exact answer, else 0."""
        return float(completion == prompt.answer)

    def demonstration(self, prompt: Prompt, noise: float, rng: np.random.Generator) -> str:
        """The answer, each digit replaced by a uniformly random one with probability `noise`."""
        return noisy(prompt.answer, string.digits, noise, rng)
