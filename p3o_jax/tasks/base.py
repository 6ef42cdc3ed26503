"""What a task is: a source of prompts, and the reward of a completion.

Prompts of the two splits differ in content, not only in seed: which split a prompt can be
in is decided by a hash of its text, and a source draws again until it has one of its own.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from p3o_jax.models.tokenizer import Tokenizer

Split = Literal["train", "evaluation"]

_MAX_DRAWS = 2000  # with a tenth of the prompts, a miss of this length has probability 1e-91


class Prompt(NamedTuple):
    """A prompt and what its completions are judged by."""

    index: int  # type: ignore[assignment]  # unique within a run's split: the sampling key is derived from it
    text: str  # what the model sees
    answer: str  # a correct completion; empty if the task knows none
    metadata: dict[str, Any]  # what else the reward needs


class PromptSource(Protocol):
    """Prompts by position: a pure function of it, safe to call from several threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...


class Task(ABC):
    """A task. Implementations are frozen dataclasses: their fields are what a configuration can set."""

    @property
    @abstractmethod
    def name(self) -> str:
        """A short name, for tags and paths."""

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer, for models trained from scratch on it."""

    @property
    @abstractmethod
    def max_prompt_tokens(self) -> int:
        """Longer prompts are an error."""

    @property
    @abstractmethod
    def max_response_tokens(self) -> int:
        """Responses are cut here; the end-of-sequence token is counted."""

    @abstractmethod
    def prompts(self, split: Split, seed: int) -> PromptSource:
        """The prompts of a split; no text is in both splits, whatever the seeds."""

    @abstractmethod
    def reward(self, prompt: Prompt, completion: str) -> float:
        """How good a completion is (decoded, without the token that ended it). An error is raised, never a 0."""

    @abstractmethod
    def demonstration(self, prompt: Prompt, noise: float, rng: np.random.Generator) -> str:
        """A correct completion, each of its characters replaced by a random one with probability `noise`."""


def split_of(text: str) -> Split:
    """Which split a text can be in: a tenth of all texts are for evaluation. Case and spacing do not count."""
    normalised = " ".join(text.casefold().split())
    digest = hashlib.blake2b(normalised.encode(), digest_size=8).digest()
    return "evaluation" if int.from_bytes(digest, "big") % 10 == 0 else "train"


@dataclass(frozen=True)
class DrawnPrompts:
    """A source of procedural prompts: `draw(index, attempt)` until the text is of the split."""

    draw: Callable[[int, int], Prompt]
    split: Split
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.length:
            raise IndexError(f"prompt {index} of {self.length}")
        for attempt in range(_MAX_DRAWS):
            prompt = self.draw(index, attempt)
            if split_of(prompt.text) == self.split:
                return prompt
        raise ValueError(
            f"{_MAX_DRAWS} draws gave no prompt of the {self.split} split (last: {prompt.text!r}): the task has too "
            "few different prompts"
        )


def noisy(text: str, alphabet: str, noise: float, rng: np.random.Generator) -> str:
    """Each character of `text`, with probability `noise` a uniform draw from `alphabet` instead."""
    replaced = rng.random(len(text)) < noise
    drawn = rng.integers(len(alphabet), size=len(text))
    return "".join(
        alphabet[i] if replace else character for character, replace, i in zip(text, replaced, drawn, strict=True)
    )
