from __future__ import annotations

import io

from p3o_jax.writers import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


METRICS = {
    "reward/mean": 0.412,
    "policy/ess": 0.9312,
    "time/learner_tokens_per_second": 31_400.0,
    "time/sampler_tokens_per_second": 1_234_000.0,
}


def test_progress_line():
    stream, now = io.StringIO(), [100.0]
    with Progress(60, stream=stream, clock=lambda: now[0]) as progress:
        progress.update(1, METRICS)
        now[0] += 11 * 2.0
        progress.update(12, METRICS)
    first, last = stream.getvalue().splitlines()
    assert first == ("step 1/60  reward 0.41  ess 0.9312  learner 31k tok/s  sampler 1.2M tok/s  --:-- left")
    # 2 s a step since the first, 48 to go.
    assert last.startswith("step 12/60  ")
    assert last.endswith("  01:36 left")


def test_progress_in_place_leaves_nothing_of_a_longer_line():
    stream = Terminal()
    with Progress(3, stream=stream, clock=lambda: 0.0) as progress:
        progress.update(1, METRICS)
        progress.update(2, {"reward/mean": 0.5})
    first, second = stream.getvalue().removesuffix("\n").split("\r")[1:]
    assert len(second) == len(first)
    assert second.rstrip() == "step 2/3  reward 0.50  00:00 left"
    assert stream.getvalue().endswith("\n")


def test_progress_without_a_terminal_is_a_line_every_few_seconds_and_the_last():
    stream, now = io.StringIO(), [0.0]
    progress = Progress(100, stream=stream, clock=lambda: now[0])
    for step in range(1, 101):
        progress.update(step, {})
        now[0] += 1.0
    shown = [int(line.split()[1].split("/")[0]) for line in stream.getvalue().splitlines()]
    assert shown == [*range(1, 100, 5), 100]


def test_progress_of_a_resumed_run_counts_the_time_of_its_own_steps():
    stream, now = io.StringIO(), [0.0]
    progress = Progress(60, stream=stream, clock=lambda: now[0])
    progress.update(41, {})
    now[0] += 10.0
    progress.update(42, {})
    assert stream.getvalue().splitlines()[-1] == "step 42/60  03:00 left"


def test_hours_left():
    stream, now = io.StringIO(), [0.0]
    progress = Progress(1000, stream=stream, clock=lambda: now[0])
    progress.update(1, {})
    now[0] += 10.0
    progress.update(2, {})
    assert stream.getvalue().splitlines()[-1] == "step 2/1000  2:46:20 left"  # 998 steps of 10 s


def test_disabled_progress_is_silent():
    stream = io.StringIO()
    with Progress(2, enabled=False, stream=stream) as progress:
        progress.update(1, METRICS)
        progress.update(2, METRICS)
    assert stream.getvalue() == ""
