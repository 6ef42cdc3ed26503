"""The loop: prompts -> sampler -> rewards -> advantages -> learner -> weights back."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from p3o_jax import metrics as metrics_lib
from p3o_jax import sharding
from p3o_jax.checkpoint import Checkpoints
from p3o_jax.config import Config, to_json, validate
from p3o_jax.evaluate import evaluate
from p3o_jax.learner import Learner, TrainState
from p3o_jax.models import lora
from p3o_jax.nonfinite import nonfinite_rows
from p3o_jax.objectives import Reinforce
from p3o_jax.packing import pack
from p3o_jax.processes import all_rows, fail_together, of_first_process, row_part
from p3o_jax.prompts import evaluation_prompts, prompt_batches
from p3o_jax.rollouts import PolicyRing, local_prompts, make_batch, minibatches, readable, rollout_metrics, score
from p3o_jax.run_directory import RunDirectory
from p3o_jax.sampler import Sampler, SamplingLimits
from p3o_jax.tasks.base import Prompt
from p3o_jax.types import Batch, Rollout
from p3o_jax.warm_start import demonstrations
from p3o_jax.writers import Progress, Writer

_logger = logging.getLogger(__name__)


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
    with fail_together():  # only process 0 looks into the directory
        directory = RunDirectory.open(run_dir, to_json(config), argv, resume=resume)
    with (
        Checkpoints(directory.checkpoints) as checkpoints,
        Writer(directory.path, enabled=trainer.is_main) as writer,
        Progress(config.num_steps, enabled=trainer.is_main) as progress,
    ):
        done, state, ring = trainer.restore(checkpoints) if resume else trainer.start()
        writer.resume_at(done + 1 if done else 0)  # without a checkpoint, the evaluation at 0 is made again too
        prompts = prompt_batches(config.task, config.seed, config.prompts_per_step, start_step=done)
        last = writer.write(0, trainer.evaluate(ring.newest["sampler"])) if done == 0 else {}

        for step in range(done + 1, config.num_steps + 1):
            clock = Stopwatch()
            of_step = next(prompts)
            asked = trainer.local(of_step)
            rollout = trainer.sample(ring, asked, step)
            clock.lap("sample")
            with fail_together():
                _, rewards = score(config.task, asked, rollout)
            rewards = of_first_process(rewards, trainer.mesh)
            advantages = trainer.advantages(rewards, rollout.group)
            with fail_together():
                batch = make_batch(rollout, advantages, learner_temperature=config.learner_temperature, step=step - 1)
            clock.lap("score")
            _, sampled_by = ring.behaviour
            state, metrics = trainer.learn(state, batch, rollout.group, sampled_by)
            ring.push(step, trainer.remember(state))
            clock.lap("learn")

            metrics |= rollout_metrics(rollout, rewards, step - 1) | clock.metrics(rollout, config.epochs)
            if config.is_due(step, config.evaluate_every):
                metrics |= trainer.evaluate(ring.newest["sampler"])
            last |= writer.write(step, metrics)
            progress.update(step, last)
            if config.is_due(step, config.write_rollouts_every):
                of_all = all_rows((rollout._replace(support=None), rewards, advantages), trainer.mesh)
                writer.rollouts(step, readable(of_step, of_all[0], of_all[1], of_all[2], config.task.tokenizer))
            if config.is_due(step, config.save_every):
                writer.flush()
                checkpoints.save(step, state, ring.past)
    return last


class Trainer:
    """The parts of the loop, each as the loop calls it."""

    def __init__(self, config: Config, devices: Sequence[jax.Device] | None = None):
        self.config, self.task = config, config.task
        self.mesh = sharding.make_mesh(config.mesh, devices)
        self.part, self.num_parts = row_part(self.mesh)
        validate(config, batch_shards=sharding.num_batch_shards(self.mesh), num_processes=self.num_parts)
        self.is_main = jax.process_index() == 0
        self.evaluation_set = evaluation_prompts(self.task, config.evaluation_prompts)
        tokenizer = self.task.tokenizer
        limits = SamplingLimits(self.task.max_prompt_tokens, self.task.max_response_tokens, tokenizer.eos_ids)
        self.sampler = Sampler(config.model, tokenizer.vocab_size, limits, config.precision, self.mesh)
        self.learner = Learner(
            config.model,
            tokenizer.vocab_size,
            config.objective,
            config.optimizer,
            self.mesh,
            num_updates=config.num_updates,
            micro_batches=config.micro_batches,
            support_tokens=config.support_tokens,
        )
        self._advantages = jax.jit(config.advantages)
        self._key = jax.random.key(config.seed)

    def key(self, purpose: int, step: int = 0) -> jax.Array:
        """The root of the random numbers of one purpose at one step."""
        return jax.random.fold_in(jax.random.fold_in(self._key, purpose), step)

    def start(self) -> tuple[int, TrainState, PolicyRing]:
        """Random parameters, after the supervised warm start if there is one."""
        state = self.learner.init(self.key(_INIT))
        warm_start = self.config.warm_start
        if warm_start is not None:
            teacher = Learner(
                replace(self.config.model, lora=None),  # every weight
                self.task.tokenizer.vocab_size,
                Reinforce(),
                warm_start.optimizer,
                self.mesh,
                num_updates=warm_start.num_steps,
            )
            if self.is_main:
                print(f"warm start: {warm_start.num_steps} supervised updates", flush=True)
            taught = teacher.init_from(lora.without_adapters(state.params))
            processes = {"num_processes": self.num_parts, "process": self.part}
            for batch in demonstrations(self.task, warm_start, self.config.seed, **processes):
                taught, _ = teacher.update(taught, sharding.to_global(batch, self.mesh))
            state = self.learner.init_from(lora.with_weights(state.params, taught.params))
        return 0, state, PolicyRing(self.config.staleness, {0: self.remember(state)})

    def restore(self, checkpoints: Checkpoints) -> tuple[int, TrainState, PolicyRing]:
        """The newest checkpoint, or the start if the run was interrupted before its first."""
        step = checkpoints.latest_step()
        if step is None:
            return self.start()
        abstract = self.learner.abstract_state()
        remembered = {"sampler": self.sampler.abstract_weights()}
        if self.remembers_params:
            remembered["learner"] = abstract.params
        state, past = checkpoints.restore(step, abstract, remembered)
        return step, state, PolicyRing(self.config.staleness, past)

    @property
    def remembers_params(self) -> bool:
        """Whether a snapshot is wanted of parameters that the learner no longer has."""
        return self.config.objective.snapshot == "rollout" and self.config.staleness > 0

    def remember(self, state: TrainState) -> dict[str, Any]:
        """What is kept of a policy until it is too old to sample: the sampler's weights, and, for a snapshot of the
        parameters that sampled, the learner's own at full precision, sharded as they are: another 4 bytes a parameter
        for each of the `staleness` + 1 versions. Without staleness the learner still has them."""
        remembered = {"sampler": self.sampler.synchronise(state.params)}
        if self.remembers_params:
            remembered["learner"] = jax.tree.map(jnp.copy, state.params)
        return remembered

    def local(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """This process's part of a step's prompts."""
        return local_prompts(prompts, self.num_parts, self.part)

    def sample(self, ring: PolicyRing, prompts: Sequence[Prompt], step: int) -> Rollout:
        """A group of responses to each prompt, by the policy of `staleness` steps ago; on the host."""
        version, remembered = ring.behaviour
        rollout = self.sampler(
            remembered["sampler"],
            [self.task.tokenizer.encode(prompt.text) for prompt in prompts],
            [prompt.index for prompt in prompts],
            key=self.key(_TRAIN, step),
            num_samples=self.config.samples_per_prompt,
            temperature=self.config.sampler_temperature,
            policy_version=version,
            support=self.sampler_support,
        )
        return sharding.to_local(rollout)

    @property
    def sampler_support(self) -> int | str | None:
        """What the objective needs of the distributions that are sampled from."""
        objective = self.config.objective
        if objective.support not in ("behaviour", "both"):
            return None
        return "exact" if objective.support_form == "exact" else self.config.support_tokens

    def advantages(self, rewards: np.ndarray, group: np.ndarray) -> np.ndarray:
        """Advantages of this process's rows; batch statistics are over all processes' rows."""
        return sharding.to_local(self._advantages(*sharding.to_global((rewards, group), self.mesh)))

    def learn(
        self, state: TrainState, batch: Batch, group: np.ndarray, sampled_by: dict[str, Any]
    ) -> tuple[TrainState, dict[str, Any]]:
        """One optimizer update a minibatch, epoch after epoch; nothing waits for the device in between.

        Args:
            state: the learner's.
            batch: this process's rows of the step.
            group: the prompt of each row.
            sampled_by: what is remembered of the policy that sampled.

        Raises:
            FloatingPointError: too many updates in a row were not finite.
        """
        config, snapshot, of_updates = self.config, self.learner.snapshot, []
        parts = self.minibatches(batch)
        if config.objective.snapshot == "rollout":
            parts = [snapshot(sampled_by.get("learner", state.params), part) for part in parts]
        for _ in range(config.epochs):
            of_epoch = parts
            if config.objective.snapshot == "epoch" and len(parts) > 1:  # the learner takes that of a single one itself
                of_epoch = [snapshot(state.params, part) for part in parts]
            for part in of_epoch:
                state, metrics = self.learner.update(state, part)
                of_updates.append(metrics)
        metrics, in_a_row = jax.device_get((_merge(of_updates), state.num_skipped_in_a_row))
        if metrics["optim/skipped_updates"]:
            found = nonfinite_rows(
                lambda part: self.learner.log_probs(state.params, part)[0], batch, group, config.minibatches, self.mesh
            )
            message = f"{metrics['policy/nonfinite_log_ratio']:.0f} log-ratios in the last step; {found}"
            if in_a_row >= config.max_skipped_updates:
                raise FloatingPointError(
                    f"{in_a_row} updates in a row had a loss, gradient or log-ratio that is not finite ({message}); "
                    "the parameters are those before them"
                )
            if self.is_main:
                _logger.warning("%d updates skipped: %s", metrics["optim/skipped_updates"], message)
        return state, metrics

    def minibatches(self, batch: Batch) -> list[Batch]:
        """A step's optimizer batches, packed, on the devices."""
        config = self.config
        parts = list(minibatches(batch, config.minibatches, 1, config.samples_per_prompt))
        if config.pack and config.objective.statistics_scope != "micro_batch":
            shards = sharding.num_batch_shards(self.mesh) // self.num_parts
            parts = pack(parts, shards * config.micro_batches)
        return [sharding.to_global(part, self.mesh) for part in parts]

    def evaluate(self, weights: Any) -> dict[str, float]:
        """Metrics of an evaluation; none if evaluations are off."""
        if not self.config.evaluate_every:
            return {}
        result = evaluate(
            self.sampler,
            weights,
            self.task,
            self.evaluation_set,
            key=self.key(_EVALUATION),
            num_samples=self.config.evaluation_samples,
            prompts_per_batch=self.config.prompts_per_step,
        )
        prefix = f"eval/{self.task.name}"
        names = {"pass_at_1": "pass@1"}
        return {f"{prefix}/{names.get(name, name)}": value for name, value in result._asdict().items()}


class Stopwatch:
    """Seconds of the phases of a step."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Ends a phase."""
        now = time.perf_counter()
        self.seconds[phase], self._last = now - self._last, now

    def metrics(self, rollout: Rollout, epochs: int) -> dict[str, float]:
        """Phase times, and response tokens a second on this process."""
        tokens = int(rollout.response_length.sum())
        return {f"time/{phase}_seconds": seconds for phase, seconds in self.seconds.items()} | {
            "time/sampler_tokens_per_second": tokens / self.seconds["sample"],
            "time/learner_tokens_per_second": tokens * epochs / self.seconds["learn"],
        }


# What a random key is for; folded into the seed.
_INIT, _TRAIN, _EVALUATION = range(3)


@jax.jit
def _merge(of_updates: list[dict[str, Any]]) -> dict[str, Any]:
    """The logged values of a step: its updates' metrics, merged by type."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_updates)
    return metrics_lib.values(metrics_lib.fold(stacked))
