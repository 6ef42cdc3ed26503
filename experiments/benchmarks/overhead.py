"""What it costs to see a run and to keep it: everything on, against neither logging nor checkpoints.

    python -m experiments.benchmarks.overhead [--segments 10]

The quickstart's P3O run, from where a real one starts. Segments of 50 steps with everything on as it is in that run
(scalars, histograms, the stored log-ratios, status, watchdog; rollouts and samples every 20 steps, a checkpoint every
50) and with nothing of it, in turn, in one process, so that how fast the machine is just then falls on both. What the
update itself computes for its metrics is in both; it is part of the algorithm's program. Evaluations, a choice of their
own, are in neither.

One run of 600 steps of each kind on two cores with nothing else to do; seconds a step, on / off:

    processor time  0.2710 / 0.2651  ratio 1.022, median over pairs of segments 1.030 (0.93 to 1.08)
    wall time       0.1720 / 0.1665  ratio 1.033, median over pairs of segments 1.046 (0.92 to 1.11)

How fast the machine is varies by a tenth from segment to segment, so the third digit is noise. A checkpoint takes 0.2 s
of processor time whatever its size (about 3 ms an array, in Python); one every 30 steps instead gave 1.048 and 1.060.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import tyro

from experiments.quickstart import p3o
from p3o_jax.config import Config, hyperparameters, to_json
from p3o_jax.devices.cache import enable_compilation_cache
from p3o_jax.experience.batches import make_batch, readable
from p3o_jax.experience.source import ExperienceSource, experience_metrics
from p3o_jax.parts import Parts, build
from p3o_jax.runs.directory import RunDirectory
from p3o_jax.runs.lifecycle import Lifecycle
from p3o_jax.runs.state import RunState
from p3o_jax.runs.stopwatch import Stopwatch
from p3o_jax.train import lifecycle_of
from p3o_jax.writers.recorder import Recorder

SEGMENT = 50  # with one checkpoint in its middle, so that what is done of it in the background falls on its own kind


@dataclass(frozen=True)
class Overhead:
    """How long to measure."""

    segments: int = 10
    """Segments of 50 steps of each kind."""


class Seen(NamedTuple):
    """What records a run."""

    recorder: Recorder
    life: Lifecycle


def steps(parts: Parts, source: ExperienceSource, run: RunState, count: int, seen: Seen | None) -> RunState:
    """Makes steps as `train` does; without `seen` nothing is recorded."""
    config = parts.config
    for _ in range(count):
        step, ring, loop = run.step + 1, run.ring, run.loop
        clock = seen.life.begin(step) if seen else Stopwatch(step, "sample")
        pause = partial(seen.life.between, run) if seen else lambda: None
        behaviour = ring.behaviour
        experience = source.next(step, behaviour.weights, clock, pause)
        rollout, scores = experience.rollout, experience.scores
        advantages = parts.advantages_of(scores.rewards, rollout.group, scores.known)
        temperature = config.learner_temperature
        batch = make_batch(rollout, advantages, learner_temperature=temperature, step=step - 1, kept=experience.kept)
        clock.begin("learn")
        updated = parts.updates(run.state, batch, rollout.group, behaviour, Path("nonfinite.npz"))
        ring.push(step, parts.publish(updated.state, step))
        run = RunState(step, updated.state, ring, loop._replace(prompt_position=experience.cursor))
        clock.begin("write")
        if seen:
            since = loop.prompt_position
            metrics = experience_metrics(experience, config.task, parts.mesh, step=step, since=since) | updated.metrics
            seen.recorder.metrics(step, metrics)
            if config.is_due(step, config.write_rollouts_every):
                log_probs = parts.updates.token_log_probs(batch, updated.log_probs)
                rows = (rollout, scores.rewards, advantages, log_probs)
                seen.recorder.rollouts(step, readable(experience.prompts, *rows, tokenizer=parts.tokenizer))
            seen.recorder.progress(step)
            clock.begin("save")
            seen.life.end_step(run)
        clock.end()
    return run


def main(asked: Overhead) -> None:
    """Prints seconds a step of both kinds, and their ratio."""
    enable_compilation_cache()
    total = 2 * SEGMENT * (asked.segments + 1)
    on = replace(p3o(), num_steps=total + 1, evaluate_every=0, save_every=SEGMENT)
    off: Config = replace(on, write_rollouts_every=0)
    parts = {True: build(on), False: build(off)}
    with tempfile.TemporaryDirectory() as directory:
        opened = RunDirectory.open(Path(directory, "run"), to_json(on), ["overhead"])
        with (
            Recorder(opened.path, on.num_steps, hyperparameters(on)) as recorder,
            lifecycle_of(on, opened, recorder) as life,
        ):
            seen = Seen(recorder, life)
            run = parts[True].start()
            recorder.start_at(1)
            source = parts[True].source(0)
            spent: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for turn in range(-2, 2 * asked.segments):  # the first of each kind compiles
                recorded = turn % 4 in (0, 3)  # on, off, off, on: neither is always the later
                started = time.perf_counter(), time.process_time()
                count = SEGMENT // 2 if turn == -1 else SEGMENT
                run = steps(parts[recorded], source, run, count, seen if recorded else None)
                if turn >= 0:
                    spent[recorded].append((time.perf_counter() - started[0], time.process_time() - started[1]))
    for index, kind in enumerate(("wall", "processor")):
        with_all, without = ([each[index] / SEGMENT for each in spent[recorded]] for recorded in (True, False))
        ratios = [a / b for a, b in zip(with_all, without, strict=True)]
        print(
            f"{kind:9} time a step: {sum(with_all) / len(with_all):.4f} s with everything on, "
            f"{sum(without) / len(without):.4f} s without; ratio {sum(with_all) / sum(without):.3f}, "
            f"median over pairs {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main(tyro.cli(Overhead, description=__doc__.splitlines()[0]))
