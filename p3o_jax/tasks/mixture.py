"""Several tasks at once, each with its share of the prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from p3o_jax.rewards.base import Graded, Prompt, Reward, graded
from p3o_jax.tasks.base import PromptSource, Split, Task
from p3o_jax.tasks.separation import Elsewhere, elsewhere, separated
from p3o_jax.tokenizers.text import Tokenizer


@dataclass(frozen=True)
class Share:
    """A task of a mixture."""

    task: Task
    """What it is."""
    weight: float = 1.0
    """Its share of the prompts, relative to the others'."""


@dataclass(frozen=True)
class Mixture(Task):
    """Tasks mixed in given proportions; each is rewarded and evaluated as it would be alone.

    A pass over the mixture is a pass over the task that takes longest; the prompts of the others repeat in it, each
    equally often to within one.

    Raises:
        ValueError: no tasks, a weight that is not positive, or two tasks of one name or of different tokenizers.
    """

    shares: tuple[Share, ...]
    """The tasks."""

    def __post_init__(self) -> None:
        tasks = [share.task for share in self.shares]
        names = [task.name for task in tasks]
        if not names:
            raise ValueError("a mixture needs at least one task")
        if len(set(names)) < len(names):
            raise ValueError(f"the tasks of a mixture need different names, got {', '.join(names)}")
        if any(isinstance(task, Mixture) for task in tasks):
            raise ValueError("a mixture is of tasks, not of mixtures: give their tasks and the products of weights")
        for share in self.shares:
            if not 0 < share.weight < math.inf:
                raise ValueError(f"the weight of {share.task.name} must be positive, got {share.weight}")
        for task in tasks[1:]:
            if task.tokenizer != tasks[0].tokenizer:
                raise ValueError(f"{names[0]} and {task.name} have different tokenizers: train each on its own")

    @property
    def name(self) -> str:
        """Those of the tasks."""
        return "+".join(share.task.name for share in self.shares)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tasks'."""
        return self.shares[0].task.tokenizer

    @property
    def max_prompt_tokens(self) -> int:
        """The longest of the tasks'."""
        return max(share.task.max_prompt_tokens for share in self.shares)

    @property
    def max_response_tokens(self) -> int:
        """The longest of the tasks'."""
        return max(share.task.max_response_tokens for share in self.shares)

    @property
    def components(self) -> tuple[Task, ...]:
        """The tasks."""
        return tuple(share.task for share in self.shares)

    @property
    def reward(self) -> Reward:
        """Each prompt's own task's."""
        return _OfSource(self.components)

    def prompts(self, split: Split, seed: int) -> PromptSource:
        """The tasks' prompts, in proportion in every stretch of the source."""
        return _MixedPrompts(self.sources(split, seed), tuple(share.weight for share in self.shares))

    def sources(self, split: Split, seed: int) -> tuple[PromptSource, ...]:
        """Each task's prompts, without what another task has in its other split.

        Where two lists of prompts have a question in common, it is left out of training. Where a task draws its
        prompts, it draws again: for training, what a list evaluates on; for evaluation, what a list trains on.

        Raises:
            ValueError: nothing is left for the training of a task.
        """
        parts = zip(self.components, self._elsewhere, strict=True)
        return tuple(separated(task, split, seed, others) for task, others in parts)

    def question(self, prompt: Prompt) -> str:
        """Its task's."""
        return self.components[prompt.task].question(prompt)

    @cached_property
    def _elsewhere(self) -> list[Elsewhere]:
        """What each task must leave to the others; found out once."""
        return elsewhere(self.components)

    def demonstration(self, prompt: Prompt, noise: float, rng: np.random.Generator) -> str:
        """Its task's."""
        return self.components[prompt.task].demonstration(prompt, noise, rng)


@dataclass(frozen=True)
class _OfSource(Reward):
    """The reward of the task that a prompt is from."""

    tasks: tuple[Task, ...]

    @cached_property
    def _rewards(self) -> list[Reward | None]:
        return [task.reward if isinstance(task.reward, Reward) else None for task in self.tasks]

    @property
    def quick(self) -> bool:
        """If all are."""
        return all(reward is None or reward.quick for reward in self._rewards)

    def gold_completions(self, prompt: Prompt) -> tuple[str, ...]:
        """Those of the task's reward."""
        reward = self._rewards[prompt.task]
        return () if reward is None else reward.gold_completions(prompt)

    def decides(self, prompt: Prompt) -> Reward:
        """What decides in the task's reward."""
        reward = self._rewards[prompt.task]
        return self if reward is None else reward.decides(prompt)

    @property
    def part_names(self) -> tuple[str, ...]:
        """Those of all."""
        return tuple(dict.fromkeys(name for reward in self._rewards if reward for name in reward.part_names))

    def warm_up(self) -> None:
        """All of them."""
        for reward in self._rewards:
            if reward is not None:
                reward.warm_up()

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """The task's reward."""
        return self.grade(prompt, completion).reward

    def grade(self, prompt: Prompt, completion: str) -> Graded:
        """As the task grades; a part that it does not have is NaN."""
        reward = self._rewards[prompt.task]
        if reward is None:
            one = graded(self.tasks[prompt.task].reward(prompt, completion), completion)
        else:
            one = reward.grade(prompt, completion)
        parts = dict(zip(reward.part_names if reward else (), one.parts, strict=True))
        return one._replace(parts=tuple(parts.get(name, math.nan) for name in self.part_names))

    def __getstate__(self) -> dict[str, object]:
        """The tasks alone."""
        return {"tasks": self.tasks}


class _MixedPrompts:
    """Position i is in the source that owns the point i m mod n of [0, n); m is near n / golden ratio and prime to n,
    so that every stretch of positions has points all over, in proportion to the sources' shares."""

    def __init__(self, sources: tuple[PromptSource, ...], weights: tuple[float, ...]):
        self._sources = sources
        share = np.asarray(weights) / sum(weights)
        self._length = max(math.ceil(len(source) / part) for source, part in zip(sources, share, strict=True))
        self._ends = [round(end * self._length) for end in np.cumsum(share)]
        self._stride = round(self._length * (math.sqrt(5) - 1) / 2)
        while math.gcd(self._stride, self._length) != 1:
            self._stride += 1

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self._length:
            raise IndexError(f"prompt {index} of {self._length}")
        point = index * self._stride % self._length
        source = int(np.searchsorted(self._ends, point, side="right"))
        start = self._ends[source - 1] if source else 0
        prompt = self._sources[source][(point - start) % len(self._sources[source])]
        return prompt._replace(index=index, task=source)
