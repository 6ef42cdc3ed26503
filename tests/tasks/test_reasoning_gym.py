from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from p3o_jax.rewards.pool import TimedOut, VerifierPool, Verifiers
from p3o_jax.tasks import ReasoningGym
from p3o_jax.tasks.base import split_of

pytest.importorskip("reasoning_gym", reason="needs the extra 'tasks', and that a C compiler")
from reasoning_gym.factory import DATASETS

SMALL = {"min_terms": 2, "max_terms": 2, "max_digits": 1}


def test_the_answer_is_right_and_others_are_not():
    task = ReasoningGym("chain_sum", {"max_terms": 3})
    for i in range(20):
        prompt = task.prompts("train", 0)[i]
        assert eval(prompt.text.split(":")[1].rstrip(" =")) == int(prompt.answer)
        assert task.reward(prompt, f" {prompt.answer}\n") == 1.0
        assert task.reward(prompt, str(int(prompt.answer) + 1)) < 1.0
        assert task.reward(prompt, "") == 0.0


def test_settings_reach_the_dataset():
    task = ReasoningGym("chain_sum", {"min_terms": 4, "max_terms": 4})
    texts = [task.prompts("train", 0)[i].text for i in range(20)]
    assert all(sum(text.count(operator) for operator in ("+ ", "- ")) == 3 for text in texts)


def test_training_and_evaluation_prompts_are_disjoint_even_where_prompts_are_few():
    # 200 different prompts: without a split by content every one would be in both.
    task = ReasoningGym("chain_sum", SMALL)
    train = {task.prompts("train", seed)[i].text for seed in (0, 1) for i in range(1000)}
    evaluation = {task.prompts("evaluation", seed)[i].text for seed in (0, 1) for i in range(200)}
    assert len(train) > 150
    assert len(evaluation) > 10
    assert not train & evaluation


def test_seeds_that_are_neighbours_share_no_run_of_prompts():
    # The datasets seed item i with seed + i: passed on as they are, seeds 0 and 1 would share all but one item.
    task = ReasoningGym("chain_sum", {"min_digits": 4})
    texts = [{task.prompts("train", seed)[i].text for i in range(200)} for seed in (0, 1)]
    assert not texts[0] & texts[1]


def test_prompts_are_a_function_of_seed_and_position_in_any_order():
    task = ReasoningGym("word_sorting", prompt_tokens=1000)
    first, again = task.prompts("train", 3), task.prompts("train", 3)
    assert [first[i] for i in range(32)] == [again[i] for i in reversed(range(32))][::-1]


def test_threads_take_turns_at_a_dataset(monkeypatch):
    # Several datasets keep state while they make an item.
    dataset_type = DATASETS["chain_sum"][0]
    make, busy, overlaps = dataset_type.__getitem__, threading.Lock(), []

    def slow(self, index):
        overlaps.append(not busy.acquire(blocking=False))
        time.sleep(0.001)
        if not overlaps[-1]:
            busy.release()
        return make(self, index)

    monkeypatch.setattr(dataset_type, "__getitem__", slow)
    source = ReasoningGym("chain_sum").prompts("train", 0)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(source.__getitem__, range(64)))
    assert len(overlaps) >= 64
    assert not any(overlaps)


@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"composite"}))
def test_every_dataset_can_be_made_by_its_name(name):
    assert ReasoningGym(name).name == name


@pytest.mark.parametrize("name", ["gcd", "leg_counting", "word_ladder", "gsm_symbolic", "list_functions", "countdown"])
def test_datasets_of_all_kinds(name):
    # Among them some that cannot be indexed beyond their size, and some whose verifier accepts several answers.
    task = ReasoningGym(name, prompt_tokens=2000, response_tokens=200, num_prompts=100)
    for split in ("train", "evaluation"):
        source = task.prompts(split, 0)
        for i in (0, 99):
            prompt = source[i]
            assert split_of(prompt.text) == split
            assert task.reward(prompt, prompt.answer) == 1.0
            assert task.demonstration(prompt, 0.0, np.random.default_rng(0)) == prompt.answer
            assert task.tokenizer.decode(task.tokenizer.encode(prompt.text)) == prompt.text


def test_demonstrations_replace_a_character_by_one_like_it():
    task = ReasoningGym("chain_sum")
    prompt = task.prompts("train", 0)[0]._replace(answer="a1B-" * 500)
    demonstration = task.demonstration(prompt, 0.5, np.random.default_rng(0))
    assert demonstration != prompt.answer
    for before, after in zip(prompt.answer, demonstration, strict=True):
        assert (before.isdigit(), before.islower(), before.isupper()) == (
            after.isdigit(),
            after.islower(),
            after.isupper(),
        )


def test_a_dataset_without_answers_has_no_demonstrations():
    task = ReasoningGym("graph_color", prompt_tokens=2000)
    prompt = task.prompts("train", 0)[0]
    with pytest.raises(ValueError, match="graph_color: no answer to demonstrate for prompt 0"):
        task.demonstration(prompt, 0.1, np.random.default_rng(0))


@pytest.mark.parametrize("score", [float("nan"), RuntimeError("signal only works in the main thread")])
def test_what_goes_wrong_in_a_verifier_is_not_a_reward(monkeypatch, score):
    task = ReasoningGym("chain_sum")
    prompt = task.prompts("train", 0)[0]

    def broken(self, answer, entry):
        if isinstance(score, Exception):
            raise score
        return score

    monkeypatch.setattr(DATASETS["chain_sum"][0], "score_answer", broken)
    with pytest.raises((RuntimeError, ValueError), match=r"main thread|the reward is nan"):
        task.reward.grade(prompt, "12")


def test_a_scorer_that_evaluates_what_it_is_given_is_killed():
    task = ReasoningGym("countdown")
    assert not task.reward.quick
    prompt = task.prompts("train", 0)[0]
    with VerifierPool(task.reward, Verifiers(processes=1, timeout_seconds=1)) as pool:
        good, bad, again = pool([(prompt, prompt.answer), (prompt, "9**9**9"), (prompt, prompt.answer)])
    assert good.reward == again.reward == 1
    assert isinstance(bad, TimedOut)


def test_every_dataset_fits_its_own_defaults():
    """Its tokenizer takes every character, and its limit nearly all of the questions."""
    for name in ("simple_geometry", "propositional_logic", "spell_backward", "gcd", "modulo_grid"):
        task = ReasoningGym(name)
        source = task.prompts("train", 0)
        lengths = [len(task.tokenizer.encode(source[i].text)) for i in range(50)]
        assert np.mean([length <= task.max_prompt_tokens for length in lengths]) > 0.9
        assert task.max_prompt_tokens <= 2 * max(lengths) + 32
    assert ReasoningGym("gcd", prompt_tokens=77).max_prompt_tokens == 77


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "chain_sums"}, "unknown reasoning-gym dataset 'chain_sums': did you mean chain_sum"),
        ({"dataset": "@@@@"}, "unknown reasoning-gym dataset '@@@@': there are .*chain_sum"),
        (
            {"dataset": "chain_sum", "settings": {"max_term": 2}},
            "chain_sum: no setting 'max_term'; did you mean 'max_terms'?",
        ),
        ({"dataset": "chain_sum", "settings": {"max_terms": 0}}, "max_terms must be >= min_terms"),
        ({"dataset": "chain_sum", "settings": {"max_terms": "two"}}, r"settings {'max_terms': 'two'} are not accepted"),
        ({"dataset": "chain_sum", "settings": {"seed": 1}}, "setting 'seed' is not free"),
        ({"dataset": "chain_sum", "num_prompts": 0}, "num_prompts must be at least 1, got 0"),
    ],
)
def test_wrong_input_is_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        ReasoningGym(**arguments)
    assert "\n" not in str(caught.value)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ImportError, match=r"pip install 'p3o_jax\[tasks\]'"):
        ReasoningGym("chain_sum")
