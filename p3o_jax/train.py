"""The loop: prompts -> engine -> rewards -> advantages -> learner -> weights back to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np

from p3o_jax.config import Config, as_written_now, hyperparameters, to_json
from p3o_jax.devices.precision import describe
from p3o_jax.devices.processes import all_rows, fail_together, row_part
from p3o_jax.devices.profiling import Profiler
from p3o_jax.evaluation.held_out import NOT_EVALUATED
from p3o_jax.experience.batches import make_batch, readable
from p3o_jax.experience.source import experience_metrics
from p3o_jax.learner.speed import speed
from p3o_jax.parts import Parts, build
from p3o_jax.runs.checkpoint import newest_whole_step
from p3o_jax.runs.directory import MAY_DIFFER, RunDirectory
from p3o_jax.runs.lifecycle import Lifecycle
from p3o_jax.runs.state import RunState
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
        if jax.process_index() == 0:
            for line in describe(config.precision, parts.engine.mesh.devices.flat[0].device_kind):
                print(f"sampler: {line}", flush=True)
        run = (parts.restore(life.checkpoints) if resume else None) or parts.start(life.pause_before_first_step)
        recorder.start_at(run.step + 1 if run.step else 0)  # before the first step, evaluation 0 is made again too
        source = parts.source(run.loop.prompt_position)
        if run.step == 0 and config.evaluate_every:
            recorder.metrics(0, parts.evaluate(run.ring.newest.weights, directory.evaluation(0)).metrics)

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
            with fail_together():
                temperature = config.learner_temperature
                batch = make_batch(
                    rollout, advantages, learner_temperature=temperature, step=step - 1, kept=experience.kept
                )

            clock.begin("learn")
            try:
                updated = parts.updates(state, batch, rollout.group, behaviour, directory.nonfinite_batch(step))
            except FloatingPointError as error:
                loop = life.may_roll_back(loop, error)
                run = state = ring = behaviour = None  # makes room for what is restored
            if run is None:
                clock.end()
                run = parts.restore(life.checkpoints, within_streak=False)
                if run is None:
                    raise FloatingPointError("updates were not finite, and there is no checkpoint to go back to")
                run = run._replace(loop=loop)  # the prompts go on where they are
                recorder.start_at(run.step + 1)
                continue
            ring.push(step, parts.publish(updated.state, step))
            metrics |= updated.metrics
            run = RunState(step, updated.state, ring, loop._replace(skipped_in_a_row=updated.skipped_in_a_row))

            clock.begin("evaluate")
            evaluated = NOT_EVALUATED
            if config.is_due(step, config.evaluate_every):
                evaluated = parts.evaluate(ring.newest.weights, directory.evaluation(step))
            clock.begin("write")
            metrics |= evaluated.metrics | speed(
                clock.seconds,
                rollout,
                kept=experience.kept,
                sampled_tokens=int(experience.sampled.rollout.action_mask.sum()),
                epochs=config.epochs,
                model=config.model,
                vocab_size=parts.tokenizer.vocab_size,
                num_devices=parts.mesh.size / row_part(parts.mesh)[1],
                device_kind=parts.mesh.devices.flat[0].device_kind,
            )
            recorder.metrics(step, metrics)
            if config.is_due(step, config.write_rollouts_every):
                seen = parts.updates.token_log_probs(batch, updated.log_probs)
                rewards = np.where(scores.known, scores.rewards, np.nan)
                rows = all_rows((rollout._replace(support=None), rewards, advantages, seen), parts.mesh)
                recorder.rollouts(step, readable(experience.prompts, *rows, tokenizer=parts.tokenizer))
            recorder.progress(step)
            clock.begin("save")
            life.end_step(run, evaluated.score)
            clock.end()
            profiler.after(step)
    return recorder.last


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
