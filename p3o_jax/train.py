"""The loop: prompts -> sampler -> rewards -> advantages -> learner -> weights back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax

from p3o_jax.config import Config, to_json
from p3o_jax.devices.precision import describe
from p3o_jax.devices.processes import fail_together
from p3o_jax.devices.profiling import Profiler
from p3o_jax.experience.prompts import prompt_batches
from p3o_jax.runs.checkpoint import newest_step
from p3o_jax.runs.directory import MAY_DIFFER, RunDirectory
from p3o_jax.runs.lifecycle import Lifecycle
from p3o_jax.trainer import RunState, Trainer
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
    trainer = Trainer(config, devices)
    config = trainer.config  # with a pretrained model's architecture in it
    made = newest_step(RunDirectory(run_dir).checkpoints) if resume else 0
    if made > config.num_steps:
        raise ValueError(f"{run_dir} has already made {made} steps, more than num_steps={config.num_steps}")
    # The steps of a run may change only where its learning rates do not hang on them.
    fixed = set() if config.optimizer.decay == "constant" else {"num_steps"}
    may_differ = [name for name in MAY_DIFFER if name not in fixed]
    with fail_together():  # only process 0 looks into the directory
        directory = RunDirectory.open(run_dir, to_json(config), argv, resume=resume, may_differ=may_differ)
    with (
        directory,
        Recorder(trainer, directory) as recorder,
        Lifecycle(trainer, directory, before_save=recorder.flush) as life,
        Profiler(directory.path, profile_steps) as profiler,
        trainer.scorer,
    ):
        if trainer.is_main:
            for line in describe(config.precision, trainer.sampler_mesh.devices.flat[0].device_kind):
                print(f"sampler: {line}", flush=True)
        run = (life.restore() if resume else None) or life.start()
        recorder.start_at(
            run.step + 1 if run.step else 0
        )  # before the first step, the evaluation at 0 is made again too
        stream = {"position": run.loop["prompt_position"], "tokenizer": trainer.tokenizer}
        prompts = prompt_batches(config.task, config.seed, config.prompts_per_step, **stream)
        if run.step == 0:
            recorder.metrics(0, trainer.evaluate(run.ring.newest["sampler"], directory.evaluation(0)))

        while run.step < config.num_steps:
            made, state, ring, loop = run
            step = made + 1
            profiler.before(step)
            clock = life.begin(step)
            gathered = trainer.gather(prompts, ring, step, clock, between=partial(life.between, run))
            metrics = trainer.rollout_metrics(gathered, step, since=loop["prompt_position"])
            loop = loop | {"prompt_position": gathered.position}
            advantages = trainer.advantages(gathered)
            batch = trainer.batch(gathered, advantages, step)

            clock.begin("learn")
            _, sampled_by = ring.behaviour
            try:
                updated = trainer.updates(
                    state, batch, gathered.rollout.group, sampled_by, directory.nonfinite_batch(step)
                )
            except FloatingPointError as error:
                loop = life.may_roll_back(loop, error)
                run = state = ring = sampled_by = None  # makes room for what is restored
            if run is None:
                clock.end()
                run = life.roll_back(loop)
                recorder.start_at(run.step + 1)
                continue
            state = updated.state
            ring.push(step, trainer.remember(state, step))
            metrics |= updated.metrics
            loop = loop | {"skipped_in_a_row": int(metrics["optim/skipped_updates_in_a_row"])}
            run = RunState(step, state, ring, loop)

            clock.begin("evaluate")
            if config.is_due(step, config.evaluate_every):
                metrics |= trainer.evaluate(ring.newest["sampler"], directory.evaluation(step))
            clock.begin("write")
            metrics |= trainer.speed(clock.seconds, gathered)
            recorder.step(step, metrics, gathered, batch, advantages, updated.log_probs)
            clock.begin("save")
            life.end_step(run, metrics)
            clock.end()
            profiler.after(step)
    return recorder.last
