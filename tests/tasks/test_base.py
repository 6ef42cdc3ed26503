from __future__ import annotations

import numpy as np
import pytest

from p3o_jax.tasks.base import DrawnPrompts, Prompt, noisy, split_of


def words(index, attempt):
    return Prompt(index, f"word {index} {attempt}", "", {})


def test_a_tenth_of_all_texts_is_for_evaluation():
    share = np.mean([split_of(f"text {i}") == "evaluation" for i in range(10_000)])
    # 10 % of 10,000 with a standard deviation of 0.3 %.
    assert 0.088 < share < 0.112


def test_the_split_of_a_text_never_changes():
    # Recorded values: another hash would move prompts that a model was trained on into the evaluation set.
    assert [i for i in range(60) if split_of(str(i)) == "evaluation"] == [1, 2, 7, 30, 48, 52]


def test_case_and_spacing_do_not_move_a_text_to_the_other_split():
    for i in range(200):
        assert split_of(f"What is  {i}+1?\n") == split_of(f"what IS {i}+1?")


def test_every_prompt_of_a_source_is_of_its_split():
    for split in ("train", "evaluation"):
        source = DrawnPrompts(words, split, 500)
        assert {split_of(source[i].text) for i in range(500)} == {split}


def test_the_first_draw_of_the_split_is_taken():
    source = DrawnPrompts(words, "evaluation", 50)
    for i in range(50):
        attempts = [a for a in range(300) if split_of(words(i, a).text) == "evaluation"]
        assert source[i] == words(i, attempts[0])


def test_a_task_without_prompts_of_a_split_is_an_error_and_not_a_hang():
    text = next(str(i) for i in range(100) if split_of(str(i)) == "train")
    source = DrawnPrompts(lambda index, attempt: Prompt(index, text, "", {}), "evaluation", 5)
    with pytest.raises(ValueError, match="too few different prompts"):
        source[0]


@pytest.mark.parametrize("index", [-1, 5])
def test_positions_outside_the_source(index):
    with pytest.raises(IndexError):
        DrawnPrompts(words, "train", 5)[index]


def test_noise_replaces_the_share_of_characters_asked_for():
    text = "x" * 20_000
    result = noisy(text, "ab", 0.15, np.random.default_rng(0))
    replaced = sum(character != "x" for character in result)
    # Binomial(20,000, 0.15): mean 3000, standard deviation 50; five of them.
    assert abs(replaced - 3000) < 250
    # Uniform over the alphabet: Binomial(about 3000, 1/2), standard deviation 27.
    assert abs(result.count("a") - result.count("b")) < 275
    assert noisy(text, "ab", 0.0, np.random.default_rng(0)) == text
