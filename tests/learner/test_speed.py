"""What is logged of a step's time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from p3o_jax.devices.chips import CHIPS
from p3o_jax.learner.speed import speed
from p3o_jax.models.flops import update_flops
from p3o_jax.models.lora import Lora
from p3o_jax.models.transformer import TransformerConfig
from tests.made_rollouts import one_turn

MODEL = TransformerConfig(num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32)
# Prompts of 3 and responses of 2 tokens: 4 predictions each, in rows with room for more.
ROLLOUT = one_turn(np.zeros((6, 9), np.int32), 3, np.full(6, 2))


def logged(device_kind, **changes):
    options = {"kept": np.ones(6, bool), "epochs": 1, "num_devices": 4, "model": MODEL, **changes}
    options |= {"vocab_size": 20, "device_kind": device_kind}
    return speed({"sample": 2.0, "learn": 0.5}, ROLLOUT, sampled_tokens=24, **options)


def test_mfu_counts_the_tokens_there_are():
    flops = update_flops(MODEL, 20, rows=6, tokens=4).model
    found = logged("TPU v5 lite")
    assert found["time/mfu"] == pytest.approx(flops / 0.5 / (4 * 197e12))
    assert logged("TPU v5 lite", epochs=3)["time/mfu"] == pytest.approx(3 * found["time/mfu"])
    assert found["time/sampler_tokens_per_second"] == 12  # of 24, half of which were not learned from
    assert found["time/learner_tokens_per_second"] == 24


def test_no_peak_is_invented():
    assert "cpu" not in CHIPS
    assert logged("cpu").keys() == logged("TPU v5 lite").keys() - {"time/mfu"}


def test_rows_that_are_not_learned_from_do_not_count():
    some = logged("TPU v5 lite", kept=np.asarray([True, False, True, False, False, True]))
    everyone = logged("TPU v5 lite")
    for tag in ("time/mfu", "time/learner_tokens_per_second"):
        assert some[tag] == pytest.approx(everyone[tag] / 2)
    assert some["time/sampler_tokens_per_second"] == everyone["time/sampler_tokens_per_second"]


def test_frozen_weights_have_no_gradient_of_their_own():
    adapted = replace(MODEL, lora=Lora(rank=1, targets=("query",)))
    assert 0.6 < logged("TPU v5 lite", model=adapted)["time/mfu"] / logged("TPU v5 lite")["time/mfu"] < 0.8
