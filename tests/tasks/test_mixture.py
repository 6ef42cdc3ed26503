from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from p3o_jax.experience.prompts import prompt_batches
from p3o_jax.rewards import ExactMatch, Part, Prompt, Reward, Tags, WeightedSum
from p3o_jax.tasks import Mixture, Share, SortDigits
from p3o_jax.tasks.base import Task
from p3o_jax.tokenizers.text import CharTokenizer


@dataclass(frozen=True)
class Listed(Task):
    """A task of a few prompts."""

    name: str = "listed"
    count: int = 7
    reward: Reward = ExactMatch()
    tokenizer = CharTokenizer()
    max_prompt_tokens = 20
    max_response_tokens = 9

    def prompts(self, split, seed):
        return [Prompt(i, f"{self.name} {i}", str(i), {}) for i in range(self.count)]


A, B = Listed("a", 10), Listed("b", 40)


def test_shares_are_kept_in_every_stretch():
    source = Mixture((Share(A, 3), Share(B, 1))).prompts("train", 0)
    for start in range(0, len(source) - 40, 17):
        counts = Counter(source[start + i].source for i in range(40))
        assert abs(counts[0] - 30) <= 2, start


def test_a_pass_has_every_prompt_and_repeats_none_more_than_another():
    # B takes 40 / (1/4) = 160 positions, of which A has 120: each of its ten prompts 12 times.
    mixture = Mixture((Share(A, 3), Share(B, 1)))
    source = mixture.prompts("train", 0)
    counts = Counter(source[i].text for i in range(len(source)))
    assert {counts[f"b {i}"] for i in range(40)} == {1}
    assert {counts[f"a {i}"] for i in range(10)} == {12}
    taken = [prompt for batch, _ in zip(prompt_batches(mixture, 0, 16), range(10), strict=False) for prompt in batch]
    assert Counter(prompt.text for prompt in taken) == counts
    assert [prompt.index for prompt in taken] == list(range(160))
    with pytest.raises(IndexError):
        source[160]


def test_each_prompt_is_judged_by_its_own_task():
    both = WeightedSum((Part("answer", ExactMatch()), Part("form", Tags(("x",)))))
    mixture = Mixture((Share(A), Share(replace(B, reward=both))))
    first = mixture.reward.grade(Prompt(0, "a 3", "3", {}, source=0), "3")
    second = mixture.reward.grade(Prompt(0, "b 3", "3", {}, source=1), "<x>3</x>")
    assert mixture.reward.part_names == ("answer", "form")
    assert first.reward == 1 and all(math.isnan(part) for part in first.parts)
    assert second.parts == (0, 1)
    assert mixture.reward.quick
    digits = Mixture((Share(SortDigits(length=2)),))  # whose reward is a method
    assert digits.reward(Prompt(0, "21=", "12", {}), "12") == 1


def test_limits_are_the_longest():
    mixture = Mixture((Share(SortDigits(length=30)),))
    assert (mixture.max_prompt_tokens, mixture.max_response_tokens) == (31, 31)
    assert mixture.components == (SortDigits(length=30),)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((), "at least one task"),
        ((Share(A), Share(A)), "need different names, got a, a"),
        ((Share(A, 0),), "weight of a must be positive, got 0"),
        ((Share(A), Share(SortDigits())), "a and sort_digits have different tokenizers"),
        ((Share(Mixture((Share(A),))),), "not of mixtures"),
    ],
)
def test_what_cannot_be_mixed(shares, message):
    with pytest.raises(ValueError, match=message):
        Mixture(shares)
