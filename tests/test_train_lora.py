"""Runs that train adapters."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from p3o_jax import config as config_lib
from p3o_jax.learner.warm_start import WarmStart
from p3o_jax.models.lora import Lora
from p3o_jax.train import train
from p3o_jax.writers import read_metrics
from tests.distributed_program import CONFIG

SMALL = replace(
    CONFIG,
    model=replace(CONFIG.model, lora=Lora(rank=2, alpha=4.0, targets=("query", "value", "down"))),
    warm_start=WarmStart(num_steps=2, rows_per_step=16),
    staleness=1,
)


def without_times(path) -> list[dict]:
    return [{tag: x for tag, x in line.items() if not tag.startswith("time/")} for line in read_metrics(path)]


@pytest.mark.long
def test_a_resumed_run_is_the_run(tmp_path):
    """With sampler weights of past policies, into which adapters are merged; the policy that sampled is the one that
    learns, so with matched temperatures the first step is on-policy."""
    matched = replace(SMALL, sampler_temperature=1.0)
    train(matched, tmp_path / "whole", devices=jax.devices())
    train(replace(matched, num_steps=2), tmp_path / "parts", devices=jax.devices())
    train(matched, tmp_path / "parts", devices=jax.devices(), resume=True)
    whole, parts = without_times(tmp_path / "whole"), without_times(tmp_path / "parts")
    assert whole == parts
    assert whole[1]["policy/ess"] > 0.999
    assert np.abs(whole[-1]["optim/grad_norm"]) > 0


def test_the_configuration_is_json():
    assert config_lib.from_json(config_lib.to_json(SMALL)) == SMALL
