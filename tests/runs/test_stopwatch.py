from __future__ import annotations

import time

import jax
import numpy as np
import pytest

from p3o_jax.batch.types import FinishReason, Rollout
from p3o_jax.devices.chips import CHIPS
from p3o_jax.models.flops import update_flops
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.runs.stopwatch import Stopwatch, speed


def test_every_moment_of_a_step_belongs_to_one_phase():
    started = time.perf_counter()
    clock = Stopwatch(3, "sample")
    assert clock.phase == "sample"
    time.sleep(0.02)
    clock.begin("learn")
    assert clock.phase == "learn" and clock.seconds.keys() == {"sample"}
    clock.begin("sample")
    time.sleep(0.01)
    clock.end()
    assert clock.seconds["sample"] >= 0.03 and clock.seconds["learn"] < 0.02
    assert sum(clock.seconds.values()) == pytest.approx(time.perf_counter() - started, abs=0.01)


MODEL = TransformerConfig(num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32)
# Prompts of 3 and responses of 2 tokens: 4 predictions each, in rows with room for more.
ROLLOUT = jax.tree.map(
    lambda shape: np.zeros(shape, np.int32),
    Rollout((6, 9), (6,), (6,), (6, 9), (6,), (6,), (6,), (6,), (6,)),
    is_leaf=lambda shape: type(shape) is tuple,
)._replace(
    prompt_length=np.full(6, 3), response_length=np.full(6, 2), finish_reason=np.full(6, FinishReason.EOS, np.int32)
)


def logged(device_kind, **changes):
    options = {"epochs": 1, "num_devices": 4, **changes}
    options |= {"model": MODEL, "vocab_size": 20, "device_kind": device_kind}
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
