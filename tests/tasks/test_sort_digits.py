from __future__ import annotations

import re

import numpy as np
import pytest

from p3o_jax.tasks import SortDigits


def test_the_example():
    prompt = SortDigits().prompts("train", 0)[0]
    assert re.fullmatch(r"\d{10}=", prompt.text)
    assert prompt.answer == "".join(sorted(prompt.text[:-1]))


def test_prompt_and_response_have_the_declared_lengths():
    task = SortDigits(length=10)
    prompt = task.prompts("train", 0)[3]
    assert len(task.tokenizer.encode(prompt.text)) == task.max_prompt_tokens == 11
    # The end of the sequence is the eleventh token.
    assert len(task.tokenizer.encode(prompt.answer)) + 1 == task.max_response_tokens == 11


def test_reward_is_exact_match():
    task = SortDigits(length=4)
    prompt = task.prompts("train", 0)[0]._replace(text="3120=", answer="0123")
    completions = ("0123", "0132", "012", "01233", "0123=", " 0123", "")
    assert [task.reward(prompt, c) for c in completions] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_training_and_evaluation_prompts_are_disjoint_even_where_prompts_are_few():
    # 10,000 different prompts and 5,000 draws of each split: without a split by content most of them would be shared.
    task = SortDigits(length=4)
    train = [task.prompts("train", seed)[i].text for seed in (0, 1) for i in range(2500)]
    evaluation = [task.prompts("evaluation", seed)[i].text for seed in (0, 1) for i in range(2500)]
    assert len(set(train)) > 2500
    assert len(set(evaluation)) > 500
    assert not set(train) & set(evaluation)


def test_prompts_are_a_function_of_seed_and_position():
    task = SortDigits()
    first, again, other = (task.prompts("train", seed) for seed in (5, 5, 6))
    assert [first[i] for i in range(20)] == [again[i] for i in reversed(range(20))][::-1]
    assert not {first[i].text for i in range(200)} & {other[i].text for i in range(200)}


def test_demonstrations_are_answers_with_noise():
    task = SortDigits()
    source = task.prompts("train", 0)
    rng = np.random.default_rng(0)
    assert task.demonstration(source[0], 0.0, rng) == source[0].answer
    pairs = [(source[i].answer, task.demonstration(source[i], 0.15, rng)) for i in range(1000)]
    assert all(re.fullmatch(r"\d{10}", noisy) for _, noisy in pairs)
    changed = np.mean([a != b for answer, noisy in pairs for a, b in zip(answer, noisy, strict=True)])
    # A replacement is the digit itself one time in ten: 0.15 * 0.9 = 0.135, standard deviation 0.0034.
    assert abs(changed - 0.135) < 0.017


def test_length_is_checked():
    with pytest.raises(ValueError, match="length must be at least 2, got 1"):
        SortDigits(length=1)
