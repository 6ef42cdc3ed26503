from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from p3o_jax.experience.prompts import encoded_batches, evaluation_prompts, prompt_batches
from p3o_jax.tasks import SortDigits
from p3o_jax.tasks.base import Prompt
from p3o_jax.tokenizers.text import CharTokenizer


@dataclass(frozen=True)
class FewPrompts(SortDigits):
    """A task of seven prompts, so that a stream soon repeats them."""

    count: int = 7

    def prompts(self, split, seed):
        return [Prompt(i, f"{split} {seed} {i}", "", {}) for i in range(self.count)]


def first(iterator, count):
    return list(itertools.islice(iterator, count))


def test_batches_have_the_size_asked_for_across_passes():
    # 12 batches of 4 are 48 prompts: almost seven passes over 7, and 4 does not divide 7.
    batches = first(prompt_batches(FewPrompts(), 0, 4), 12)
    assert [len(batch) for batch in batches] == [4] * 12


def test_each_pass_has_every_prompt_once_in_an_order_of_its_own():
    texts = [prompt.text for batch in first(prompt_batches(FewPrompts(), 0, 7), 6) for prompt in batch]
    passes = [texts[i : i + 7] for i in range(0, 42, 7)]
    assert all(sorted(one) == sorted(passes[0]) and len(set(one)) == 7 for one in passes)
    # Six passes in one order have probability (1 / 5040) ** 5.
    assert len({tuple(one) for one in passes}) > 1


def test_index_is_the_position_in_the_stream_and_unique_across_passes():
    batches = first(prompt_batches(FewPrompts(), 0, 4), 12)
    assert [prompt.index for batch in batches for prompt in batch] == list(range(48))


@pytest.mark.parametrize("step", range(12))
def test_resumed_stream_equals_the_uninterrupted_one(step):
    whole = first(prompt_batches(FewPrompts(), 3, 4), 16)
    assert first(prompt_batches(FewPrompts(), 3, 4, position=4 * step), 4) == whole[step : step + 4]


def test_resumed_stream_of_a_procedural_task_far_into_its_second_pass():
    task = SortDigits()
    length = len(task.prompts("train", 0))
    step = (length + 1000) // 32
    resumed = next(prompt_batches(task, 0, 32, position=32 * step))
    previous, again = first(prompt_batches(task, 0, 32, position=32 * (step - 1)), 2)
    assert resumed == again
    assert [prompt.index for prompt in resumed] == list(range(32 * step, 32 * step + 32))
    assert {prompt.text for prompt in previous}.isdisjoint(prompt.text for prompt in resumed)


def test_the_order_depends_on_the_seed():
    class SeedBlind(FewPrompts):
        def prompts(self, split, seed):
            return [Prompt(i, str(i), "", {}) for i in range(100)]

    texts = [[prompt.text for prompt in next(prompt_batches(SeedBlind(), seed, 100))] for seed in (0, 1)]
    assert sorted(texts[0]) == sorted(texts[1])
    assert texts[0] != texts[1]


def test_another_process_makes_the_same_batches():
    task = SortDigits()
    program = (
        "from p3o_jax.experience.prompts import *; from p3o_jax.tasks import SortDigits;"
        "print([p.text for p in next(prompt_batches(SortDigits(), 11, 8, position=40))])"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert eval(output) == [prompt.text for prompt in next(prompt_batches(task, 11, 8, position=40))]


def test_evaluation_set_is_fixed_distinct_from_training_and_complete():
    task = SortDigits(length=4)
    evaluation = evaluation_prompts(task, 300)
    assert len({prompt.text for prompt in evaluation}) == len({prompt.index for prompt in evaluation}) == 300
    assert evaluation == evaluation_prompts(task, 300)
    assert evaluation[:10] == evaluation_prompts(task, 10)
    training = {p.text for seed in (0, 1) for batch in first(prompt_batches(task, seed, 100), 30) for p in batch}
    assert not training & {prompt.text for prompt in evaluation}


def test_prompts_that_are_too_long_are_passed_over_and_the_position_says_so():
    """A resumed stream goes on as the uninterrupted one; what was passed over is the difference in position."""

    class Long(FewPrompts):
        max_prompt_tokens = 10

        def prompts(self, split, seed):
            return [Prompt(i, "x" * (8 + i), "", {}) for i in range(7)]  # 8, 9, 10 fit; 11 to 14 do not

    task = Long()
    batches = first(encoded_batches(task, CharTokenizer(), 0, 4), 6)
    assert all(len(batch) == 4 for batch in batches)
    assert all(ids == CharTokenizer().encode(prompt.text) for batch in batches for prompt, ids in batch)
    taken = [prompt.index for batch in batches for prompt, _ in batch]
    assert taken == sorted(set(taken))
    whole = [prompt.text for batch in first(prompt_batches(task, 0, 7), 8) for prompt in batch]
    assert [prompt.text for batch in batches for prompt, _ in batch] == [text for text in whole if len(text) <= 10][:24]
    position = batches[2][-1].prompt.index + 1
    assert first(encoded_batches(task, CharTokenizer(), 0, 4, position=position), 3) == batches[3:]


def test_a_limit_that_no_prompt_meets_is_an_error_and_not_a_hang():
    class Long(FewPrompts):
        max_prompt_tokens = 5

    with pytest.raises(ValueError, match=r"1000 prompts in a row are longer than .* limit of 5 tokens, .* by 4"):
        next(encoded_batches(Long(), CharTokenizer(), 0, 4))


def test_no_prompt_is_evaluated_twice(caplog):
    """Of two digits there are 100 different prompts, ten or so of them for evaluation."""
    found = [prompt.text for prompt in evaluation_prompts(SortDigits(length=2), 32)]
    assert 3 < len(found) == len(set(found)) < 30
    assert f"only {len(found)} different evaluation prompts, not 32" in caplog.text


@pytest.mark.parametrize("count", [0, 8])
def test_evaluation_set_is_not_larger_than_the_task(count):
    with pytest.raises(ValueError, match=f"{count} evaluation prompts .* ask for 1 to 7"):
        evaluation_prompts(replace(FewPrompts(), count=7), count)


@pytest.mark.parametrize(("size", "step"), [(0, 0), (4, -1)])
def test_sizes_are_checked(size, step):
    with pytest.raises(ValueError, match="prompts_per_step must be at least 1 and position at least 0"):
        prompt_batches(FewPrompts(), 0, size, position=step)


def test_an_error_in_a_task_reaches_the_loop():
    class Broken(FewPrompts):
        def prompts(self, split, seed):
            class Source(list):
                def __getitem__(self, index):
                    raise RuntimeError("this source is broken")

            return Source([None] * 7)

    with pytest.raises(RuntimeError, match="this source is broken"):
        next(prompt_batches(Broken(), 0, 4))
