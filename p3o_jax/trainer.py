"""The parts of a run, each as the loop calls it: one method a part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from p3o_jax.batch.types import Batch, Rollout
from p3o_jax.config import Config, resolve, validate
from p3o_jax.devices import sharding
from p3o_jax.devices.processes import fail_together, row_part
from p3o_jax.devices.sharding import MeshShape
from p3o_jax.evaluation.evaluate import evaluate
from p3o_jax.evaluation.files import write_evaluation
from p3o_jax.experience.batches import PolicyRing, local_prompts, make_batch, rollout_metrics
from p3o_jax.experience.filtering import Gathered, Gathering
from p3o_jax.experience.prompts import evaluation_sets
from p3o_jax.experience.scoring import Scorer, agreed, score_metrics
from p3o_jax.learner.learner import Learner, TrainState
from p3o_jax.learner.updates import Updates
from p3o_jax.learner.warm_start import demonstrations
from p3o_jax.models import lora
from p3o_jax.models.stored.load import load_params
from p3o_jax.objectives import Reinforce
from p3o_jax.runs.checkpoint import Checkpoints
from p3o_jax.runs.stopwatch import Stopwatch, speed
from p3o_jax.sampler import Sampler, SamplingLimits
from p3o_jax.tasks.base import Prompt
from p3o_jax.tokenizers.text import Tokenizer

_UPDATES_BETWEEN_PAUSES = 20


class RunState(NamedTuple):
    """All that a run is made of between two steps, and hence what a checkpoint holds."""

    step: int  # rollout steps made
    state: TrainState
    ring: PolicyRing
    loop: dict[str, Any]
    """What the loop holds on the host, as JSON values, the same on every process: `prompt_position`, the prompts of
    the stream that were taken, over all processes; `skipped_in_a_row`, updates up to this step; `rolled_back`, how
    often the run went back to a checkpoint."""


class Trainer:
    """The parts of the loop, each as the loop calls it."""

    def __init__(self, config: Config, devices: Sequence[jax.Device] | None = None):
        self._stored = None if config.pretrained is None else config.pretrained.open()
        self.config = config = resolve(config, self._stored)
        self.task = config.task
        self.tokenizer: Tokenizer = self.task.tokenizer
        if self._stored is not None:
            self.tokenizer = config.pretrained.tokenizer(self._stored)
        self.mesh, self.sampler_mesh = _meshes(config, devices)
        self.part, self.num_parts = row_part(self.mesh)
        validate(
            config,
            vocab_size=self.tokenizer.vocab_size,
            batch_shards=sharding.num_batch_shards(self.mesh),
            num_processes=self.num_parts,
            sampler_shards=sharding.num_batch_shards(self.sampler_mesh),
        )
        self.is_main = jax.process_index() == 0
        self.evaluation_sets = evaluation_sets(self.task, config.evaluation_prompts)
        self.evaluation_set = [prompt for prompts in self.evaluation_sets.values() for prompt in prompts]
        tokenizer = self.tokenizer
        # What the tokenizer or the limits refuse is refused before anything runs.
        lengths = np.asarray([len(tokenizer.encode(prompt.text)) for prompt in self.evaluation_set])
        too_long = int((lengths > self.task.max_prompt_tokens).sum())
        if too_long:
            raise ValueError(
                f"{too_long} of {len(lengths)} evaluation prompts are longer than the task's limit of "
                f"{self.task.max_prompt_tokens} tokens: give the task prompt_tokens={lengths.max()} or more"
            )
        limits = SamplingLimits(
            self.task.max_prompt_tokens, self.task.max_response_tokens, tokenizer.eos_ids, slots=config.sampler_slots
        )
        self.sampler = Sampler(
            config.model, tokenizer.vocab_size, limits, config.precision, self.sampler_mesh, self.mesh
        )
        self.learner = Learner(
            config.model,
            tokenizer.vocab_size,
            config.objective,
            config.optimizer,
            self.mesh,
            num_updates=config.num_updates,
            micro_batches=config.micro_batches,
            support_tokens=config.support_tokens,
            num_staleness=config.staleness + 1,
            num_sources=len(self.task.components),
            keep_log_probs=config.write_rollouts_every > 0,
        )
        self.scorer = Scorer(self.task, tokenizer, config.verifiers)
        self.updates = Updates(config, self.learner)
        self._advantages = jax.jit(config.advantages)
        self._key = jax.random.key(config.seed)

    def key(self, purpose: int, step: int = 0) -> jax.Array:
        """The root of the random numbers of one purpose at one step."""
        return jax.random.fold_in(jax.random.fold_in(self._key, purpose), step)

    def start(self, pause: Callable[[], None] = lambda: None) -> RunState:
        """The pretrained model's parameters or random ones, after the supervised warm start if there is one.

        Args:
            pause: called now and then during the warm start, and may raise.
        """
        if self._stored is None:
            state = self.learner.init(self.key(_INIT))
        else:
            weights = load_params(self._stored, self.config.model, self.mesh)
            state = self.learner.init_with(self.key(_INIT), weights)
        warm_start = self.config.warm_start
        if warm_start is not None:
            teacher = Learner(
                replace(self.config.model, lora=None),  # every weight
                self.tokenizer.vocab_size,
                Reinforce(),
                warm_start.optimizer,
                self.mesh,
                num_updates=warm_start.num_steps,
            )
            if self.is_main:
                print(f"warm start: {warm_start.num_steps} supervised updates", flush=True)
            taught = teacher.init_from(lora.without_adapters(state.params))
            processes = {"num_processes": self.num_parts, "process": self.part}
            for i, batch in enumerate(demonstrations(self.task, warm_start, self.config.seed, **processes)):
                if i % _UPDATES_BETWEEN_PAUSES == 0:
                    pause()
                taught, _ = teacher.update(taught, sharding.to_global(batch, self.mesh))
            state = self.learner.init_from(lora.with_weights(state.params, taught.params))
        ring = PolicyRing(self.config.staleness, {0: self.remember(state, 0)})
        return RunState(0, state, ring, {"prompt_position": 0, "skipped_in_a_row": 0, "rolled_back": 0})

    def restore(self, checkpoints: Checkpoints, *, within_streak: bool = True) -> RunState | None:
        """The newest checkpoint that is whole; None if there is none.

        Args:
            within_streak: also one that was made between updates that were skipped.

        Raises:
            CheckpointError: there are checkpoints, but none that is whole.
        """
        abstract = self.learner.abstract_state()
        remembered: dict[str, Any] = {"sampler": self.sampler.abstract_weights()}
        if self.remembers_params:
            remembered["learner"] = lora.split(abstract.params)[0]

        def good(loop: Mapping[str, Any]) -> bool:
            return within_streak or not loop["skipped_in_a_row"]

        found = checkpoints.restore(abstract, remembered, good)
        if found is None:
            return None
        ring = PolicyRing(self.config.staleness, found.past)
        ring.push(found.step, self.remember(found.state, found.step))
        return RunState(found.step, found.state, ring, found.loop)

    @property
    def remembers_params(self) -> bool:
        """Whether a snapshot is wanted of parameters that the learner no longer has."""
        return self.config.objective.snapshot == "rollout" and self.config.staleness > 0

    def remember(self, state: TrainState, step: int) -> dict[str, Any]:
        """What is kept of a policy until it is too old to sample: the sampler's weights, and, for a snapshot of the
        parameters that sampled, what the learner trains, at full precision and sharded as it is: another 4 bytes a
        trained parameter for each of the `staleness` + 1 versions. Without staleness the learner still has them."""
        remembered = {"sampler": self.sampler.synchronise(state.params, step)}
        if self.remembers_params:
            remembered["learner"] = jax.tree.map(jnp.copy, lora.split(state.params)[0])
        return remembered

    def sample(self, ring: PolicyRing, prompts: Sequence[Prompt], step: int) -> Rollout:
        """A group of responses to each prompt, by the policy of `staleness` steps ago; on the host."""
        _, remembered = ring.behaviour
        rollout = self.sampler(
            remembered["sampler"],
            [self.tokenizer.encode(prompt.text) for prompt in prompts],
            [prompt.index for prompt in prompts],
            key=self.key(_TRAIN, step),
            num_samples=self.config.samples_per_prompt,
            sampling=self.config.sampling,
            support=self.sampler_support,
        )
        source = np.repeat([prompt.source for prompt in prompts], self.config.samples_per_prompt).astype(np.int32)
        return sharding.to_local(rollout)._replace(source=source)

    def rollout_metrics(self, gathered: Gathered, step: int, since: int) -> dict[str, Any]:
        """What is logged of all that was sampled in a step, whose prompts began at `since`.

        Raises:
            ValueError: no row of any process has a reward.
        """
        rollout, scores = gathered.sampled, gathered.sampled_scores
        metrics = score_metrics(scores, rollout.group, rollout.source, self.task, self.mesh)
        if math.isnan(metrics["reward/mean"]):
            raise ValueError(
                f"the verifier failed on every response of a step: {metrics['reward/verifier_errors']:.0f} errors, "
                f"{metrics['reward/verifier_timeouts']:.0f} time-outs; here first: {scores.failures[0]}"
            )
        too_long = gathered.position - since - len(gathered.prompts)
        metrics |= gathered.metrics | {"rollout/prompts_too_long": too_long}
        return metrics | rollout_metrics(rollout, step - 1, self.task.max_response_tokens)

    @property
    def sampler_support(self) -> int | str | None:
        """What the objective needs of the distributions that are sampled from."""
        objective = self.config.objective
        if objective.support not in ("behaviour", "both"):
            return None
        return "exact" if objective.support_form == "exact" else self.config.support_tokens

    def gather(
        self,
        prompts: Iterator[list[Prompt]],
        ring: PolicyRing,
        step: int,
        clock: Stopwatch,
        between: Callable[[], None],
    ) -> Gathered:
        """The rows of a step: prompts, responses and their rewards, until there are enough that teach something.

        Args:
            prompts: batches of prompts, of all processes.
            ring: the policies that may sample.
            step: the step.
            clock: in its phase `sample`; left in `score`.
            between: called after rollouts, and may raise, on all processes alike.
        """
        gathering = Gathering(self.config.zero_variance, self.config.max_sampled_batches, self.mesh)
        while not gathering.is_full:
            if clock.phase != "sample":
                clock.begin("sample")
            asked = next(prompts)
            mine = local_prompts(asked, self.num_parts, self.part)
            rollout = self.sample(ring, mine, step)
            between()
            clock.begin("score")
            with fail_together():
                scores = self.scorer(mine, rollout)
            gathering.add(asked, rollout, agreed(scores, self.mesh))
        return gathering.gathered()

    def advantages(self, gathered: Gathered) -> np.ndarray:
        """Advantages of this process's rows; batch statistics are over all processes' rows."""
        rows = (gathered.scores.rewards, gathered.rollout.group, gathered.scores.known)
        return sharding.to_local(self._advantages(*sharding.to_global(rows, self.mesh)))

    def batch(self, gathered: Gathered, advantages: np.ndarray, step: int) -> Batch:
        """This process's rows of a step's batch."""
        temperature = self.config.learner_temperature
        with fail_together():
            return make_batch(
                gathered.rollout, advantages, learner_temperature=temperature, step=step - 1, kept=gathered.kept
            )

    def speed(self, seconds: Mapping[str, float], gathered: Gathered) -> dict[str, float]:
        """What is logged of a step's time; this process's rows stand for those of all."""
        return speed(
            seconds,
            gathered.rollout,
            sampled_tokens=int(gathered.sampled.response_length.sum()),
            epochs=self.config.epochs,
            model=self.config.model,
            vocab_size=self.tokenizer.vocab_size,
            num_devices=self.mesh.size / self.num_parts,
            device_kind=self.mesh.devices.flat[0].device_kind,
        )

    def evaluate(self, weights: Any, directory: Path) -> dict[str, float]:
        """Metrics of an evaluation of each task; none if evaluations are off. Its files go into `directory`."""
        config = self.config
        metrics: dict[str, float] = {}
        if not config.evaluate_every:
            return metrics
        for name, prompts in self.evaluation_sets.items():
            result = evaluate(
                self.sampler,
                weights,
                self.scorer,
                prompts,
                key=self.key(_EVALUATION),
                num_samples=config.evaluation_samples,
                sampling=config.evaluation_sampling,
                greedy=True,
                prompts_per_batch=config.prompts_per_step,
                keep_completions=True,
            )
            metrics |= {f"eval/{name}/{tag}": value for tag, value in result.metrics.items()}
            settings = {
                "samples": config.evaluation_samples,
                **asdict(config.evaluation_sampling),
                "response_tokens": self.task.max_response_tokens,
                "precision": asdict(config.precision),
                "seed": config.seed,
            }
            with fail_together():  # only process 0 writes
                if self.is_main:
                    write_evaluation(directory, name, result.metrics, result.completions, settings)
        return metrics


def _meshes(config: Config, devices: Sequence[jax.Device] | None) -> tuple[Mesh, Mesh]:
    """The learner's mesh and the sampler's.

    Raises:
        ValueError: a shape does not fit its devices, or hosts feed the two with different rows.
    """
    of_learner, of_sampler = sharding.split_devices(
        jax.devices() if devices is None else devices, config.sampler_devices
    )
    mesh = sharding.make_mesh(config.mesh, of_learner)
    if config.sampler_mesh is None and not config.sampler_devices:
        return mesh, mesh
    try:
        sampler_mesh = sharding.make_mesh(config.sampler_mesh or MeshShape(), of_sampler)
    except ValueError as error:
        raise ValueError(f"sampler_{error}") from error
    if row_part(mesh) != row_part(sampler_mesh):
        raise ValueError(
            f"sampler_mesh: its rows are in {row_part(sampler_mesh)[1]} parts over hosts, the learner's in "
            f"{row_part(mesh)[1]}; choose tensor sizes that cut across hosts alike"
        )
    return mesh, sampler_mesh


# What a random key is for; folded into the seed.
_INIT, _TRAIN, _EVALUATION = range(3)
