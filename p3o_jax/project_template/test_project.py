"""What is ours, against numbers worked out by hand."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from experiment import VARIANTS
from objective import LearnFromSuccess
from task import Reversal

from p3o_jax.objectives import objective_loss


@pytest.mark.parametrize(("completion", "reward"), [("cba", 1.0), ("cbb", 2 / 3), ("c", 1 / 3), ("cbac", 0.0)])
def test_letters_in_their_places_are_paid(completion, reward):
    task = Reversal(length=3)
    prompt = task.prompts("train", seed=0)[0]._replace(text="abc=", answer="cba")
    assert task.reward(prompt, completion) == pytest.approx(reward)


def test_a_prompt_is_in_one_split():
    train, held_out = (Reversal().prompts(split, seed=0) for split in ("train", "evaluation"))
    assert not {train[i].text for i in range(100)} & {held_out[i].text for i in range(100)}


@pytest.mark.parametrize(
    ("rho", "negative_weight", "loss"),
    [
        (1.0, 0.0, 0.5),  # (1 + 0) / 2
        (1.0, 0.5, 0.25),  # (1 - 0.5) / 2
        (4.0, 0.5, 0.25),  # rho is capped at 1
        (0.5, 0.0, 0.25),  # (0.5 + 0) / 2
    ],
)
def test_the_loss_by_hand(rho, negative_weight, loss):
    """Of a token with A = 1 and one with A = -1, both with log pi = -1."""
    log_probs = jnp.full((2, 1), -1.0)
    found, metrics = objective_loss(
        LearnFromSuccess(negative_weight=negative_weight),
        log_probs,
        behaviour_log_probs=log_probs - jnp.log(rho),
        advantages=jnp.array([1.0, -1.0]),
        mask=jnp.ones((2, 1), bool),
    )
    assert float(found) == pytest.approx(loss)
    assert float(metrics["policy/better_fraction"]) == 0.5


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_fit_their_model(variant):
    task, model = VARIANTS[variant].task, VARIANTS[variant].model
    assert task.max_prompt_tokens + task.max_response_tokens <= model.context_tokens
