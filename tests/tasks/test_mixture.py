from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from p3o_jax.experience.prompts import prompt_batches
from p3o_jax.rewards import ExactMatch, Part, Prompt, Reward, Tags, WeightedSum
from p3o_jax.tasks import Dataset, Mixture, Share, SortDigits
from p3o_jax.tasks.base import Task
from p3o_jax.tasks.mixture import _MixedPrompts
from p3o_jax.tasks.questions import digest_of
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
        counts = Counter(source[start + i].task for i in range(40))
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
    first = mixture.reward.grade(Prompt(0, "a 3", "3", {}, task=0), "3")
    second = mixture.reward.grade(Prompt(0, "b 3", "3", {}, task=1), "<x>3</x>")
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


def write(path, questions):
    path.write_text("".join(json.dumps({"prompt": one, "answer": "1"}) + "\n" for one in questions))
    return str(path)


def asked(mixture, split, seed=0):
    """The questions of a split, as digests."""
    source = mixture.prompts(split, seed)
    return {digest_of(mixture.question(source[i])) for i in range(len(source))}


def test_what_one_task_is_evaluated_on_no_other_trains_on(tmp_path, caplog):
    held_out = [f"question {i}" for i in range(20)]
    first = Dataset(write(tmp_path / "a.jsonl", [f"a {i}" for i in range(40)]), write(tmp_path / "e.jsonl", held_out))
    rows = [text.upper() + " " for text in held_out] + [f"b {i}" for i in range(40)]
    second = Dataset(write(tmp_path / "b.jsonl", rows), label="second", before="Solve: ", after="\nThink.")
    mixture = Mixture((Share(first), Share(second)))
    assert not asked(mixture, "train") & asked(mixture, "evaluation")
    alone = len(second.prompts("train", 0))
    left = sum(digest_of(text) in asked(mixture, "train") for text in held_out)
    assert left == 0
    assert f"of {alone} prompts are not trained on: another task of the mixture is evaluated" in caplog.text


def test_the_same_file_under_two_instructions(tmp_path):
    path = write(tmp_path / "d.jsonl", [f"{i} + {i}" for i in range(300)])
    plain, wordy = Dataset(path, label="plain"), Dataset(path, label="wordy", before="Q: ", after="\nIn words.")
    mixture = Mixture((Share(plain), Share(wordy, 2)))
    train, evaluation = asked(mixture, "train"), asked(mixture, "evaluation")
    assert not train & evaluation
    assert len(train | evaluation) == 300  # a question is left out of training only where it is evaluated on
    for source, one in zip(mixture.sources("evaluation", 0), (plain, wordy), strict=True):
        alone = one.prompts("evaluation", 0)
        assert [source[i] for i in range(len(source))] == [alone[i] for i in range(len(alone))]


@pytest.mark.parametrize("seed", range(3))
def test_what_a_list_has_is_not_drawn_for_the_other_split(tmp_path, seed):
    """Of two digits there are 100 prompts: a list of 50, of which 20 are evaluated on."""
    texts = [f"{i:02}=" for i in range(0, 100, 2)]
    listed = Dataset(write(tmp_path / "t.jsonl", texts[20:]), write(tmp_path / "e.jsonl", texts[:20]), label="listed")

    @dataclass(frozen=True)
    class TwoDigits(SortDigits):
        tokenizer = listed.tokenizer

    drawn = TwoDigits(length=2)
    mixture = Mixture((Share(listed), Share(drawn)))
    train, evaluation = (mixture.sources(split, seed)[1] for split in ("train", "evaluation"))
    of_train, of_evaluation = ({source[i].text for i in range(400)} for source in (train, evaluation))
    assert not of_train & {*texts[:20]} and not of_evaluation & {*texts[20:]} and not of_train & of_evaluation
    assert of_train & {*texts[20:]}
    beside_another = Mixture((Share(Dataset(write(tmp_path / "x.jsonl", "abc"))), Share(drawn))).sources("train", seed)[
        1
    ]
    alone = drawn.prompts("train", seed)
    assert [beside_another[i] for i in range(50)] == [alone[i] for i in range(50)]


def test_nothing_changes_where_nothing_is_shared(tmp_path):
    first, second = (Dataset(write(tmp_path / f"{n}.jsonl", [f"{n} {i}" for i in range(99)])) for n in "ab")
    source = Mixture((Share(first), Share(second))).prompts("train", 0)
    as_before = _MixedPrompts((first.prompts("train", 0), second.prompts("train", 0)), (1.0, 1.0))
    assert [source[i] for i in range(len(source))] == [as_before[i] for i in range(len(as_before))]


def test_a_task_of_which_nothing_is_left_to_train_on(tmp_path):
    held_out = [f"question {i}" for i in range(20)]
    first = Dataset(write(tmp_path / "a.jsonl", ["a", "b"]), write(tmp_path / "e.jsonl", held_out))
    second = Dataset(write(tmp_path / "b.jsonl", held_out), label="second")
    with pytest.raises(ValueError, match="second: another task of the mixture is evaluated on all its prompts"):
        Mixture((Share(first), Share(second))).prompts("train", 0)
