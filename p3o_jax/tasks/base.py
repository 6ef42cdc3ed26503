"""What a task is: a source of prompts, and the reward of a completion.

Prompts of the two splits differ in content, not only in seed: which split a prompt can be
in is decided by a hash of its text, and a source draws again until it has one of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from p3o_jax.rewards.base import Prompt
from p3o_jax.tasks.questions import Questions, digest_of
from p3o_jax.tokenizers.text import PRINTABLE_ASCII, ByteTokenizer, Tokenizer

__all__ = [
    "EVALUATION_SEED",
    "DrawnPrompts",
    "Prompt",
    "PromptSource",
    "Split",
    "Task",
    "digest_of",
    "noisy",
    "split_of",
]

Split = Literal["train", "evaluation"]

EVALUATION_SEED = 20_260_512  # a constant: all runs are evaluated on the same prompts

_MAX_DRAWS = 2000  # with a tenth of the prompts, a miss of this length has probability 1e-91
_BYTES = ByteTokenizer()


@runtime_checkable
class PromptSource(Protocol):
    """Prompts by position: a pure function of it, safe to call from several threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...


class Task(ABC):
    """A task. Implementations are frozen dataclasses: their fields are what a configuration can set.

    What a completion is worth is the task's `reward`, either a method `reward(prompt, completion) -> float`, which is
    called in the training process, or a field or property that holds a `Reward`. An error is raised, never a 0.
    """

    @property
    @abstractmethod
    def reward(self) -> Callable[[Prompt, str], float]:
        """What a completion (decoded, without the token that ended it) is worth."""

    @property
    @abstractmethod
    def name(self) -> str:
        """A short name, for tags and paths."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer, for models trained from scratch on it; unless overridden, one token a byte."""
        return _BYTES

    @property
    @abstractmethod
    def max_prompt_tokens(self) -> int:
        """Longer prompts are left out of training, and counted; in an evaluation they are an error."""

    @property
    @abstractmethod
    def max_response_tokens(self) -> int:
        """Responses are cut here; the end-of-sequence token is counted."""

    @property
    def components(self) -> tuple[Task, ...]:
        """What `Prompt.task` counts, each evaluated on its own; only a mixture has more than one."""
        return (self,)

    @abstractmethod
    def prompts(self, split: Split, seed: int) -> PromptSource:
        """The prompts of a split; no text is in both splits, whatever the seeds."""

    def sources(self, split: Split, seed: int) -> tuple[PromptSource, ...]:
        """The prompts of a split of each of `components`; no question is in both splits of any two of them."""
        return (self.prompts(split, seed),)

    def question(self, prompt: Prompt) -> str:
        """What a prompt asks, without the instructions around it: a question is in one split only, however it is put.

        Unless overridden: its text.
        """
        return prompt.text

    def demonstration(self, prompt: Prompt, noise: float, rng: np.random.Generator) -> str:
        """A correct completion, each of its characters replaced by a random one with probability `noise`.

        Unless overridden: the prompt's answer, a digit replaced by a digit, a letter by a letter of its case, another
        character by another.

        Raises:
            ValueError: the prompt has no answer, only a reward.
        """
        if not prompt.answer:
            raise ValueError(f"{self.name}: no answer to demonstrate for prompt {prompt.index}, {prompt.text!r}")
        replaced = rng.random(len(prompt.answer)) < noise
        return "".join(
            rng.choice(_alike(character)) if replace else character
            for character, replace in zip(prompt.answer, replaced, strict=True)
        )


def split_of(text: str) -> Split:
    """Which split a text can be in: a tenth of all texts are for evaluation. Case and spacing do not count."""
    return "evaluation" if int.from_bytes(digest_of(text), "big") % 10 == 0 else "train"


@dataclass(frozen=True)
class DrawnPrompts:
    """A source of procedural prompts: `draw(index, attempt)` until the text is of the split."""

    draw: Callable[[int, int], Prompt]
    split: Split
    length: int
    excluded: Questions = field(default_factory=Questions)
    """What other tasks of a mixture have in their other split."""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self.length:
            raise IndexError(f"prompt {index} of {self.length}")
        for attempt in range(_MAX_DRAWS):
            prompt = self.draw(index, attempt)
            if split_of(prompt.text) == self.split and prompt.text not in self.excluded:
                return prompt
        others = f", other than {len(self.excluded)} that are in another split of the mixture" * bool(self.excluded)
        raise ValueError(
            f"{_MAX_DRAWS} draws gave no prompt of the {self.split} split{others} (last: {prompt.text!r}): the task "
            "has too few different prompts"
        )


def noisy(text: str, alphabet: str, noise: float, rng: np.random.Generator) -> str:
    """Each character of `text`, with probability `noise` a uniform draw from `alphabet` instead."""
    replaced = rng.random(len(text)) < noise
    drawn = rng.integers(len(alphabet), size=len(text))
    return "".join(
        alphabet[i] if replace else character for character, replace, i in zip(text, replaced, drawn, strict=True)
    )


def _alike(character: str) -> list[str]:
    """The printable ASCII characters of the same kind: digits, lower case, upper case, the rest."""

    def kind(c: str) -> tuple[bool, bool, bool]:
        return c.isdigit(), c.islower(), c.isupper()

    return [c for c in PRINTABLE_ASCII if kind(c) == kind(character)]
