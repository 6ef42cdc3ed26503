from __future__ import annotations

import time

import pytest

from p3o_jax.runs.stopwatch import Stopwatch


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
