"""The loop: prompts -> sampler -> rewards -> advantages -> learner -> weights back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from p3o_jax.checkpoint import newest_step
from p3o_jax.config import Config, hyperparameters, to_json
from p3o_jax.dynamic_sampling import Gathering
from p3o_jax.lifecycle import Lifecycle
from p3o_jax.precision import describe
from p3o_jax.processes import all_rows, fail_together
from p3o_jax.profiling import Profiler
from p3o_jax.prompts import prompt_batches
from p3o_jax.rollouts import make_batch, readable
from p3o_jax.run_directory import MAY_DIFFER, RunDirectory
from p3o_jax.scoring import agreed
from p3o_jax.trainer import RunState, Trainer
from p3o_jax.writers import Progress, Writer


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
        Writer(directory.path, enabled=trainer.is_main) as writer,
        Lifecycle(trainer, directory, before_save=writer.flush) as life,
        Progress(config.num_steps, enabled=trainer.is_main) as progress,
        trainer.scorer,
        Profiler(directory.path, profile_steps) as profiler,
    ):
        if trainer.is_main:
            for line in describe(config.precision, trainer.sampler_mesh.devices.flat[0].device_kind):
                print(f"sampler: {line}", flush=True)
        made, state, ring, loop = (life.restore() if resume else None) or life.start()
        with fail_together():
            writer.resume_at(made + 1 if made else 0)  # before the first step, the evaluation at 0 is made again too
            writer.describe(hyperparameters(config))
        stream = {"position": loop["prompt_position"], "tokenizer": trainer.tokenizer}
        prompts = prompt_batches(config.task, config.seed, config.prompts_per_step, **stream)
        last: dict[str, float] = {}
        if made == 0:
            evaluated = trainer.evaluate(ring.newest["sampler"], directory.evaluation(0))
            with fail_together():
                last |= writer.write(0, evaluated)

        while made < config.num_steps:
            step = made + 1
            profiler.before(step)
            clock = life.begin(step)
            gathering = Gathering(config.zero_variance, config.max_sampled_batches, trainer.mesh)
            while not gathering.is_full:
                if clock.phase != "sample":
                    clock.begin("sample")
                asked = next(prompts)
                rollout = trainer.sample(ring, trainer.local(asked), step)
                life.leave_if_asked(RunState(made, state, ring, loop))  # of which the rollouts are a function
                clock.begin("score")
                with fail_together():
                    life.check()
                    scores = trainer.scorer(trainer.local(asked), rollout)
                gathering.add(asked, rollout, agreed(scores, trainer.mesh))
            gathered = gathering.gathered()
            of_step, rollout, scores = gathered.prompts, gathered.rollout, gathered.scores
            of_rollouts = gathered.metrics | trainer.rollout_metrics(gathered, step)
            of_rollouts["rollout/prompts_too_long"] = of_step[-1].index + 1 - loop["prompt_position"] - len(of_step)
            loop = loop | {"prompt_position": of_step[-1].index + 1}
            advantages = trainer.advantages(scores, rollout.group)
            with fail_together():
                temperature = config.learner_temperature
                batch = make_batch(rollout, advantages, learner_temperature=temperature, step=made, kept=gathered.kept)
            clock.begin("learn")
            _, sampled_by = ring.behaviour
            try:
                dump_to = directory.nonfinite_batch(step)
                state, metrics, seen = trainer.learn(state, batch, rollout.group, sampled_by, dump_to)
            except FloatingPointError as error:
                loop = life.may_roll_back(loop, error)
                state = ring = sampled_by = None  # makes room for what is restored
            if state is None:
                clock.end()
                made, state, ring, loop = life.roll_back(loop)
                with fail_together():
                    writer.resume_at(made + 1)
                continue
            made, loop = step, loop | {"skipped_in_a_row": int(metrics["optim/skipped_updates_in_a_row"])}
            ring.push(step, trainer.remember(state, step))
            clock.begin("evaluate")
            if config.is_due(step, config.evaluate_every):
                metrics |= trainer.evaluate(ring.newest["sampler"], directory.evaluation(step))
            clock.begin("write")
            metrics |= of_rollouts | trainer.speed(clock.seconds, rollout, gathered.sampled)
            writes_rollouts = config.is_due(step, config.write_rollouts_every)
            if writes_rollouts:
                rewards = np.where(scores.known, scores.rewards, np.nan)
                log_probs = trainer.token_log_probs(batch, seen)
                of_all = all_rows((rollout._replace(support=None), rewards, advantages, log_probs), trainer.mesh)
            with fail_together():  # only process 0 writes
                last |= writer.write(step, metrics)
                if writes_rollouts:
                    writer.rollouts(step, readable(of_step, *of_all, tokenizer=trainer.tokenizer))
            progress.update(step, last)
            clock.begin("save")
            life.end_step(RunState(step, state, ring, loop), metrics)
            clock.end()
            profiler.after(step)
    return last
