"""The loop: prompts -> engine -> rewards -> advantages -> learner -> weights back to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from p3o_jax.batch.types import Batch
from p3o_jax.config import Config, as_written_now, hyperparameters, to_json
from p3o_jax.devices.precision import describe
from p3o_jax.devices.processes import all_rows, fail_together, row_part
from p3o_jax.devices.profiling import Profiler
from p3o_jax.evaluation.held_out import NOT_EVALUATED
from p3o_jax.experience.batches import make_batch, readable
from p3o_jax.experience.source import Experience, experience_metrics
from p3o_jax.learner.speed import speed
from p3o_jax.learner.updates import Updated
from p3o_jax.parts import Parts, build
from p3o_jax.runs.checkpoint import newest_whole_step
from p3o_jax.runs.directory import MAY_DIFFER, RunDirectory
from p3o_jax.runs.lifecycle import Lifecycle
from p3o_jax.runs.state import Loop, RunState
from p3o_jax.tokenizers.small import tokenizer_to_json
from p3o_jax.writers.recorder import Recorder


def train(
    config: Config,
    run_dir: Path,
    *,
    resume: bool = False,
    argv: Sequence[str] = (),
    devices: Sequence[jax.Device] | None = None,
    profile_steps: range = range(0),
) -> dict[str, float]:
    """Trains a policy. Step s is the s-th rollout step; what it logs is logged at s, evaluations at 0 too.

    Args:
        config: the run.
        run_dir: where it is written.
        resume: continue the run that is there, from its newest checkpoint that is whole; without one, start it.
        argv: the command line, to be recorded.
        devices: default: all.
        profile_steps: the steps that are traced.

    Returns:
        The last value of every metric.

    Raises:
        ValueError: the configuration does not fit the devices or the task; nothing was compiled or written.
        FileExistsError: `run_dir` holds another run.
        FloatingPointError: too many updates in a row were not finite.
        Preempted: the process was asked to end (SIGTERM, or the notice that a TPU will be taken away); there is a
            checkpoint of the last step.
        CheckpointError: a checkpoint could not be written, or none be restored.
        OSError: something else could not be written.
    """
    parts = build(config, devices)
    config = parts.config
    with (
        _directory(parts, run_dir, argv, resume) as directory,
        Recorder(directory.path, config.num_steps, hyperparameters(config)) as recorder,
        lifecycle_of(config, directory, recorder) as life,
        Profiler(directory.path, profile_steps) as profiler,
        parts.scorer,
    ):
        _say_formats(parts)
        run = _begun(parts, life, directory, recorder, resume)
        source = parts.source(run.loop.prompt_position)
        while run.step < config.num_steps:
            step, state, ring, loop = run.step + 1, run.state, run.ring, run.loop
            profiler.before(step)
            clock = life.begin(step)
            behaviour = ring.behaviour
            experience = source.next(step, behaviour.weights, clock, partial(life.between, run))
            rollout, scores = experience.rollout, experience.scores
            metrics = experience_metrics(experience, config.task, parts.mesh, step=step, since=loop.prompt_position)
            loop = loop._replace(prompt_position=experience.cursor)
            advantages = parts.advantages_of(scores.rewards, rollout.group, scores.known)
            batch = _batch(config, experience, advantages, step)

            clock.begin("learn")
            updated = None
            try:
                updated = parts.updates(state, batch, rollout.group, behaviour, directory.nonfinite_batch(step))
            except FloatingPointError as error:
                loop = life.may_roll_back(loop, error)
            if updated is None:
                clock.end()
                del run, state, ring, behaviour  # makes room for what is restored
                run = _rolled_back(parts, life, recorder, loop)
                continue
            ring.push(step, parts.publish(updated.state, step))
            run = RunState(step, updated.state, ring, loop._replace(skipped_in_a_row=updated.skipped_in_a_row))

            clock.begin("evaluate")
            due = config.is_due(step, config.evaluate_every)
            evaluated = parts.evaluate(ring.newest.weights, directory.evaluation(step)) if due else NOT_EVALUATED
            clock.begin("write")
            metrics |= updated.metrics | evaluated.metrics | _speed(parts, experience, clock.seconds)
            recorder.metrics(step, metrics)
            if config.is_due(step, config.write_rollouts_every):
                recorder.rollouts(step, _readable(parts, experience, advantages, batch, updated))
            recorder.progress(step)
            clock.begin("save")
            life.end_step(run, evaluated.score)
            clock.end()
            profiler.after(step)
    return recorder.last


def _say_formats(parts: Parts) -> None:
    """Prints what the sampler computes in."""
    if jax.process_index() == 0:
        for line in describe(parts.config.precision, parts.engine.mesh.devices.flat[0].device_kind):
            print(f"sampler: {line}", flush=True)


def _begun(parts: Parts, life: Lifecycle, directory: RunDirectory, recorder: Recorder, resume: bool) -> RunState:
    """Restores a run or starts it, and then evaluates what it starts with."""
    run = (parts.restore(life.checkpoints) if resume else None) or parts.start(life.pause_before_first_step)
    recorder.start_at(run.step + 1 if run.step else 0)  # before the first step, evaluation 0 is made again too
    if run.step == 0 and parts.config.evaluate_every:
        recorder.metrics(0, parts.evaluate(run.ring.newest.weights, directory.evaluation(0)).metrics)
    return run


def _batch(config: Config, experience: Experience, advantages: Float[np.ndarray, " B"], step: int) -> Batch:
    """Makes what a step learns from."""
    with fail_together():
        return make_batch(
            experience.rollout,
            advantages,
            learner_temperature=config.learner_temperature,
            step=step - 1,
            kept=experience.kept,
        )


def _rolled_back(parts: Parts, life: Lifecycle, recorder: Recorder, loop: Loop) -> RunState:
    """Restores the newest checkpoint made before the streak of skipped updates; the prompts go on where they are.

    Raises:
        FloatingPointError: there is none.
    """
    restored = parts.restore(life.checkpoints, within_streak=False)
    if restored is None:
        raise FloatingPointError("updates were not finite, and there is no checkpoint to go back to")
    recorder.start_at(restored.step + 1)
    return restored._replace(loop=loop)


def _speed(parts: Parts, experience: Experience, seconds: Mapping[str, float]) -> dict[str, float]:
    """Says what a step's time was spent on."""
    return speed(
        seconds,
        experience.rollout,
        kept=experience.kept,
        sampled_tokens=int(experience.sampled.rollout.action_mask.sum()),
        epochs=parts.config.epochs,
        model=parts.config.model,
        vocab_size=parts.tokenizer.vocab_size,
        num_devices=parts.mesh.size / row_part(parts.mesh)[1],
        device_kind=parts.mesh.devices.flat[0].device_kind,
    )


def _readable(
    parts: Parts, experience: Experience, advantages: Float[np.ndarray, " B"], batch: Batch, updated: Updated
) -> list[dict[str, Any]]:
    """Puts a step's rollouts, of all processes, as a person reads them."""
    scores = experience.scores
    seen = parts.updates.token_log_probs(batch, updated.log_probs)
    rewards = np.where(scores.known, scores.rewards, np.nan)
    rows = all_rows((experience.rollout._replace(support=None), rewards, advantages, seen), parts.mesh)
    return readable(experience.prompts, *rows, tokenizer=parts.tokenizer)


def _directory(parts: Parts, run_dir: Path, argv: Sequence[str], resume: bool) -> RunDirectory:
    """Opens the directory of a run that begins or goes on."""
    config = parts.config
    made = newest_whole_step(RunDirectory(run_dir).checkpoints) if resume else 0
    if made > config.num_steps:
        raise ValueError(f"{run_dir} has already made {made} steps, more than num_steps={config.num_steps}")
    # The steps of a run may change only where its learning rates do not hang on them.
    fixed = set() if config.optimizer.decay == "constant" else {"num_steps"}
    may_differ = [name for name in MAY_DIFFER if name not in fixed]
    with fail_together():  # only process 0 looks into the directory
        return RunDirectory.open(
            run_dir,
            to_json(config),
            argv,
            resume=resume,
            may_differ=may_differ,
            tokenizer=tokenizer_to_json(parts.tokenizer),
            as_written_now=partial(as_written_now, running=config),
        )


def lifecycle_of(config: Config, directory: RunDirectory, recorder: Recorder) -> Lifecycle:
    """Makes what keeps a run alive, by its configuration."""
    return Lifecycle(
        directory,
        num_steps=config.num_steps,
        save_every=config.save_every,
        keep_checkpoints=config.keep_checkpoints,
        keep_every=config.keep_every,
        roll_back=config.roll_back,
        watchdog_seconds=config.watchdog_seconds,
        watchdog_ends=config.watchdog_ends,
        before_save=recorder.flush,
    )
