"""What a reward is: (prompt, completion) -> a number, what was judged, and the parts it is made of."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from p3o_jax.rewards.answers import without_reasoning


class Prompt(NamedTuple):
    """A prompt and what its completions are judged by."""

    index: int  # type: ignore[assignment]  # unique within a run's split: the sampling key is derived from it
    text: str  # what the model sees
    answer: str  # a correct completion or its final answer; empty if the task knows none
    metadata: dict[str, Any]  # what else the reward needs
    task: int = 0  # which task of a mixture it is from


class Completion(str):
    """The text of a response, without the token that ended it, which also knows how it was sampled."""

    num_tokens: int
    """Tokens of the response, the one that ended it included."""
    truncated: bool
    """Whether it was cut at the limit."""
    prompt_end: str | None
    """The last characters of the prompt as the model saw it, template included; None: they are not known."""

    def __new__(
        cls, text: str, num_tokens: int = 0, truncated: bool = False, prompt_end: str | None = None
    ) -> Completion:
        """Makes a text that knows how it was sampled."""
        completion = super().__new__(cls, text)
        completion.num_tokens, completion.truncated, completion.prompt_end = num_tokens, truncated, prompt_end
        return completion


class Graded(NamedTuple):
    """A judged completion."""

    reward: float
    correct: bool  # what pass@k counts
    answer: str  # what was compared, in a form equal for equal answers: it votes in majority@k; empty: none was found
    parts: tuple[float, ...] = ()  # one a name in the reward's `part_names`, before weighting
    readable: bool = True  # False: there is an answer, but it cannot be read, so that it is not correct


class Reward(ABC):
    """A reward. Implementations are frozen dataclasses: their fields are what a configuration can set.

    Rewards are called in processes of their own that are killed at a time-out, unless they are `quick`. Whatever
    they raise is counted as an error, never as a zero reward.
    """

    @property
    def quick(self) -> bool:
        """Whether it takes microseconds whatever it is given, so that it can run in the training process."""
        return False

    @abstractmethod
    def __call__(self, prompt: Prompt, completion: str) -> float:
        """How good a completion is. `completion` is a `Completion` where it was sampled by a run."""

    def grade(self, prompt: Prompt, completion: str) -> Graded:
        """The reward with what was judged. Unless overridden: correct is a reward of at least 1."""
        return graded(self(prompt, completion), completion)

    def gold_completions(self, prompt: Prompt) -> tuple[str, ...]:
        """Completions that must be correct if the prompt's answer can be judged at all: the answer itself, as a model
        would give it. Empty where there is no answer to judge by."""
        return ()

    def decides(self, prompt: Prompt) -> Reward:
        """The reward that says what is correct: itself, unless it is made of others."""
        return self

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of `Graded.parts`."""
        return ()

    def warm_up(self) -> None:  # noqa: B027  # most load nothing
        """Loads what the first call would, before any time-out runs."""


def graded(reward: float, completion: str) -> Graded:
    """What a number says of a completion as a whole.

    Raises:
        ValueError: the number is not finite.
    """
    reward = float(reward)
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    return Graded(reward, reward >= 1, without_reasoning(completion, prompt_end=prompt_end(completion)).strip())


def prompt_end(completion: str) -> str:
    """Returns the last characters of the prompt of a `Completion` that knows them; of any other text, none."""
    return getattr(completion, "prompt_end", None) or ""


def judge(reward: Reward, prompt: Prompt, completion: str) -> Graded:
    """What a reward says of a completion.

    Raises:
        ValueError: it is not a finite number.
        Exception: whatever the reward raises.
    """
    found = reward.grade(prompt, completion)
    if not math.isfinite(found.reward):
        raise ValueError(f"the reward is {found.reward}")
    return found


def gold_fault(reward: Reward, prompt: Prompt) -> str | None:
    """Why a prompt's answer cannot be judged by; None if it equals itself, or the reward looks at no answer.

    It takes as long as judging does: where that can be long, call it in a process that can be killed.
    """
    reward = reward.decides(prompt)
    for completion in reward.gold_completions(prompt):
        try:
            found = judge(reward, prompt, Completion(completion))
        except Exception as error:
            return f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if not found.correct:
            how = f"it is read as {found.answer[:80]!r}" if found.readable else "it cannot be read"
            return f"the answer of prompt {prompt.index} is not equal to itself: of {completion[:80]!r} {how}"
    return None


@dataclass(frozen=True)
class Part:
    """One part of a weighted sum."""

    name: str
    """Its mean is logged as reward/NAME, before weighting."""
    reward: Reward
    """What it is."""
    weight: float = 1.0
    """What it is multiplied by."""


_LOGGED = (
    "mean", "std", "correct", "no_answer_fraction", "zero_variance_group_fraction", "verifier_errors",
    "verifier_timeouts", "unreadable_answers",
)  # fmt: skip


@dataclass(frozen=True)
class WeightedSum(Reward):
    """sum_i weight_i reward_i; whether a completion is correct, and its answer, are as the first part says.

    Raises:
        ValueError: no parts, two of one name, or a name that is logged already.
    """

    parts: tuple[Part, ...]
    """What is summed; each is logged."""

    def __post_init__(self) -> None:
        names = self.part_names
        if not names:
            raise ValueError("a weighted sum needs at least one part")
        for name in names:
            if names.count(name) > 1 or name in _LOGGED or not name.isidentifier():
                raise ValueError(f"parts of a reward need different names, identifiers other than {_LOGGED}: {name!r}")

    @property
    def quick(self) -> bool:
        """If every part is."""
        return all(part.reward.quick for part in self.parts)

    def gold_completions(self, prompt: Prompt) -> tuple[str, ...]:
        """The first part's."""
        return self.parts[0].reward.gold_completions(prompt)

    def decides(self, prompt: Prompt) -> Reward:
        """The first part."""
        return self.parts[0].reward.decides(prompt)

    @property
    def part_names(self) -> tuple[str, ...]:
        """Those given."""
        return tuple(part.name for part in self.parts)

    def warm_up(self) -> None:
        """Every part's."""
        for part in self.parts:
            part.reward.warm_up()

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """The sum."""
        return self.grade(prompt, completion).reward

    def grade(self, prompt: Prompt, completion: str) -> Graded:
        """The sum and its parts."""
        all_graded = [part.reward.grade(prompt, completion) for part in self.parts]
        values = tuple(one.reward for one in all_graded)
        total = sum(part.weight * value for part, value in zip(self.parts, values, strict=True))
        return all_graded[0]._replace(reward=total, parts=values)


@dataclass(frozen=True)
class Function(Reward):
    """A function of your own by import path: `function(prompt, completion, **arguments) -> float`.

    It runs in a process of its own, where `completion` is a `Completion` and `prompt.metadata` the whole row of a
    dataset.

    Raises:
        ValueError: there is no such module or function.
    """

    path: str
    """module:function, importable from where the run is started."""
    arguments: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Further keyword arguments."""

    def __post_init__(self) -> None:
        _ = self._function

    @cached_property
    def _function(self) -> Callable[..., float]:
        return import_function(self.path)

    def warm_up(self) -> None:
        """Imports it."""
        _ = self._function

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """What the function returns."""
        return self._function(prompt, completion, **self.arguments)

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: the function is imported where it is called."""
        return {"path": self.path, "arguments": self.arguments}


def import_function(path: str) -> Callable[..., Any]:
    """What `module:function` names.

    Raises:
        ValueError: nothing, with what is missing.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"{path!r} is not of the form module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{path}: cannot import {module_name} ({error}); run from where it can be imported") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path}: {module_name} has no function {name!r}")
    return function
