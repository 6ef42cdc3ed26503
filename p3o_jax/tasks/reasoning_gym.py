"""Any dataset of reasoning-gym by name and settings (arXiv:2505.24760, github.com/open-thought/reasoning-gym)."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import threading
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from p3o_jax.rewards.answers import REASONING, Marks, without_reasoning
from p3o_jax.rewards.base import Prompt, Reward, prompt_end
from p3o_jax.tasks.base import DrawnPrompts, PromptSource, Split, Task

_RESERVED = ("seed", "size")
_MEASURED_PROMPTS = 16
_MEASURING_SEED = 20_260_512


@dataclass(frozen=True)
class ReasoningGym(Task):
    """A procedural dataset with its own verifier. Needs `pip install 'p3o_jax[tasks]'`.

    The question is the prompt and the completion, stripped, is the answer that the dataset scores.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: an unknown dataset or a setting that it does not have or does not accept.
    """

    dataset: str
    """Name of the dataset, such as chain_sum."""
    settings: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Settings of the dataset, such as min_terms 2 max_terms 3."""
    prompt_tokens: int | None = None
    """Longest prompt; None: as the task's own tokenizer, a token a byte, would need for nearly all of them."""
    response_tokens: int = 32
    """Longest response, its end included."""
    num_prompts: int = 10_000
    """Prompts drawn; then they repeat, in another order."""
    reasoning: Marks = REASONING
    """What begins and ends a block of reasoning, which is no part of the answer."""

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "response_tokens", "num_prompts"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        _create(self.dataset, self.settings, seed=0, size=1)

    @property
    def name(self) -> str:
        """The dataset's."""
        return self.dataset

    @property
    def reward(self) -> Reward:
        """The dataset's own scorer."""
        return ReasoningGymScore(self.dataset, self.settings, self.reasoning)

    @property
    def max_prompt_tokens(self) -> int:
        """`prompt_tokens`."""
        return self._measured if self.prompt_tokens is None else self.prompt_tokens

    @property
    def max_response_tokens(self) -> int:
        """`response_tokens`."""
        return self.response_tokens

    def prompts(self, split: Split, seed: int) -> PromptSource:
        """Questions of the dataset; the metadata is the dataset's own entry."""
        return DrawnPrompts(_Draws(self, seed), split, self.num_prompts)

    @cached_property
    def _measured(self) -> int:
        """A quarter more than the longest of the first questions, in whole 32 bytes."""
        size = min(_MEASURED_PROMPTS, self.num_prompts)
        dataset = _create(self.dataset, self.settings, seed=_MEASURING_SEED, size=size)
        longest = max(len(dataset[i]["question"].encode()) for i in range(size))
        return -(-longest * 5 // (4 * 32)) * 32


@dataclass(frozen=True)
class ReasoningGymScore(Reward):
    """A dataset's own scorer, in a process that can be killed: some evaluate what the model wrote."""

    dataset: str
    """Name of the dataset."""
    settings: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Its settings."""
    reasoning: Marks = REASONING
    """What begins and ends a block of reasoning, which is no part of the answer."""

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """Scores the completion, stripped and without its reasoning."""
        answer = without_reasoning(completion, self.reasoning, prompt_end(completion)).strip()
        return float(self._scorer.score_answer(answer, prompt.metadata))

    def warm_up(self) -> None:
        """Makes the dataset."""
        _ = self._scorer

    @cached_property
    def _scorer(self) -> Any:
        return _create(self.dataset, self.settings, seed=0, size=1)


class _Draws:
    """`draw` of a `DrawnPrompts`: attempt a is item `index` of a dataset seeded for (seed, a).

    A dataset of its own for every attempt, because many datasets seed item i with `seed + i`, which makes
    neighbouring seeds share their items, and some cannot be indexed beyond their size.
    """

    def __init__(self, task: ReasoningGym, seed: int):
        self._task = task
        self._seed = seed
        self._datasets: dict[int, Any] = {}
        self._lock = threading.Lock()  # datasets keep state between items

    def __call__(self, index: int, attempt: int) -> Prompt:
        task = self._task
        with self._lock:
            if attempt not in self._datasets:
                digest = hashlib.blake2b(f"{self._seed} {attempt}".encode(), digest_size=8).digest()
                seed = int.from_bytes(digest, "big") % 2**31
                self._datasets[attempt] = _create(task.dataset, task.settings, seed=seed, size=task.num_prompts)
            entry = self._datasets[attempt][index]
        answer = entry["answer"]
        return Prompt(index, entry["question"], "" if answer is None else str(answer), entry)


def _create(name: str, settings: dict[str, Any], *, seed: int, size: int) -> Any:
    """A dataset, or one line that says what is wrong with its name or settings."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError(f"{error}: tasks of reasoning-gym need: pip install 'p3o_jax[tasks]'") from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(sorted(DATASETS))}"
        raise ValueError(f"unknown reasoning-gym dataset {name!r}: {hint}")
    dataset_type, config_type = DATASETS[name]
    known = [f.name for f in dataclasses.fields(config_type) if f.name not in _RESERVED]
    for setting in settings:
        if setting in _RESERVED:
            raise ValueError(f"{name}: setting {setting!r} is not free: seeds come from the run, size is num_prompts")
        if setting not in known:
            near = difflib.get_close_matches(setting, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{name}: no setting {setting!r}; {hint}it has {', '.join(known)}")
    try:
        return dataset_type(config=config_type(**settings, seed=seed, size=size))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: settings {settings} are not accepted: {error}") from error
