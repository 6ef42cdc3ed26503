"""A step that hangs is reported, with its phase; one that compiles is not."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

from p3o_jax.runs.stopwatch import Stopwatch
from p3o_jax.runs.watchdog import Watchdog


def watched(limit: float, body) -> list[str]:
    lines: list[str] = []
    with Watchdog(limit, report=lines.append) as watchdog:
        body(watchdog)
    return lines


def test_a_step_that_hangs_is_reported_with_its_phase():
    def hang(watchdog):
        clock = Stopwatch(7, "sample")
        watchdog.watch(7, clock)
        clock.begin("learn")
        time.sleep(0.5)

    first, *more = watched(0.2, hang)
    assert first.startswith("watchdog: process 0 (")
    assert "step 7 has taken 0 s, the limit is 0.2 s; phase: learn, at " in first
    assert len(more) <= 1  # again when it has doubled, and not at every look


def test_steps_within_the_limit_are_not_reported():
    def work(watchdog):
        for step in range(8):
            watchdog.watch(step, Stopwatch(step, "sample"))
            time.sleep(0.05)

    assert watched(0.3, work) == []


def test_before_the_first_step_the_start_is_watched():
    (line, *_) = watched(0.1, lambda watchdog: time.sleep(0.3))
    assert "phase: start" in line


def test_compiling_does_not_count():
    """A program that takes much longer to compile than a step may take, and that no cache has."""
    unlike_any = time.time() % 1

    def program(x):
        for i in range(300):
            x = jnp.sin(x @ x + i * unlike_any)
        return x

    lowered, limit, seconds = jax.jit(program).lower(jnp.ones((8, 8))), 0.15, []

    def compile_it(watchdog):
        started = time.monotonic()
        lowered.compile({"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False})
        seconds.append(time.monotonic() - started)

    lines = watched(limit, compile_it)
    assert seconds[0] > 2 * limit
    assert lines == []


def test_without_a_limit_nothing_is_watched():
    assert watched(0, lambda watchdog: time.sleep(0.05)) == []


def test_whoever_wants_to_end_the_process_is_told():
    told = []
    with Watchdog(0.1, end=told.append, report=lambda line: None) as watchdog:
        time.sleep(0.25)
        assert told == []  # the start may take long
        watchdog.watch(1, Stopwatch(1, "sample"))
        time.sleep(0.25)
    assert told and "step 1 has taken 0 s, the limit is 0.1 s" in told[0]
