"""The loop: prompts -> sampler -> rewards -> advantages -> learner -> weights back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax

from p3o_jax.checkpoint import Checkpoints, newest_step
from p3o_jax.config import Config, to_json
from p3o_jax.precision import describe
from p3o_jax.processes import all_rows, fail_together, of_first_process
from p3o_jax.prompts import prompt_batches
from p3o_jax.rollouts import make_batch, readable, rollout_metrics, score
from p3o_jax.run_directory import MAY_DIFFER, RunDirectory
from p3o_jax.stopwatch import Stopwatch
from p3o_jax.trainer import Trainer
from p3o_jax.writers import Progress, Writer


def train(
    config: Config,
    run_dir: Path,
    *,
    resume: bool = False,
    argv: Sequence[str] = (),
    devices: Sequence[jax.Device] | None = None,
) -> dict[str, float]:
    """Trains a policy. Step s is the s-th rollout step; what it logs is logged at s, evaluations at 0 too.

    Args:
        config: the run.
        run_dir: where it is written.
        resume: continue the run that is there.
        argv: the command line, to be recorded.
        devices: default: all.

    Returns:
        The last value of every metric.

    Raises:
        ValueError: the configuration does not fit the devices or the task; nothing was compiled or written.
        FileExistsError: `run_dir` holds another run.
        FloatingPointError: too many updates in a row were not finite.
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
        Checkpoints(directory.checkpoints) as checkpoints,
        Writer(directory.path, enabled=trainer.is_main) as writer,
        Progress(config.num_steps, enabled=trainer.is_main) as progress,
    ):
        if trainer.is_main:
            for line in describe(config.precision, trainer.mesh.devices.flat[0].device_kind):
                print(f"sampler: {line}", flush=True)
        done, state, ring, loop = trainer.restore(checkpoints) if resume else trainer.start()
        writer.resume_at(done + 1 if done else 0)  # without a checkpoint, the evaluation at 0 is made again too
        prompts = prompt_batches(config.task, config.seed, config.prompts_per_step, position=loop["prompt_position"])
        last = writer.write(0, trainer.evaluate(ring.newest["sampler"])) if done == 0 else {}

        for step in range(done + 1, config.num_steps + 1):
            clock = Stopwatch(step, "sample")
            of_step = next(prompts)
            loop["prompt_position"] += len(of_step)
            asked = trainer.local(of_step)
            rollout = trainer.sample(ring, asked, step)
            clock.begin("score")
            with fail_together():
                _, rewards = score(config.task, asked, rollout, trainer.tokenizer)
            rewards = of_first_process(rewards, trainer.mesh)
            advantages = trainer.advantages(rewards, rollout.group)
            with fail_together():
                batch = make_batch(rollout, advantages, learner_temperature=config.learner_temperature, step=step - 1)
            clock.begin("learn")
            _, sampled_by = ring.behaviour
            state, metrics = trainer.learn(state, batch, rollout.group, sampled_by)
            ring.push(step, trainer.remember(state, step))
            clock.begin("evaluate")
            if config.is_due(step, config.evaluate_every):
                metrics |= trainer.evaluate(ring.newest["sampler"])
            clock.begin("write")
            metrics |= rollout_metrics(rollout, rewards, step - 1) | trainer.speed(clock.seconds, rollout)
            last |= writer.write(step, metrics)
            progress.update(step, last)
            if config.is_due(step, config.write_rollouts_every):
                of_all = all_rows((rollout._replace(support=None), rewards, advantages), trainer.mesh)
                writer.rollouts(step, readable(of_step, of_all[0], of_all[1], of_all[2], trainer.tokenizer))
            clock.begin("save")
            if config.is_due(step, config.save_every):
                writer.flush()
                checkpoints.save(step, state, ring.past, loop)
            clock.end()
    return last
