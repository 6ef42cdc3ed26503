"""The parts of a run, made of its configuration: what the loop calls, and what a run's state begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from p3o_jax.batch.keys import Purpose, run_key
from p3o_jax.batch.types import AnyArray
from p3o_jax.config import Config, resolve, validate
from p3o_jax.devices import sharding
from p3o_jax.devices.processes import row_part
from p3o_jax.devices.sharding import MeshShape
from p3o_jax.evaluation.held_out import HeldOut
from p3o_jax.experience.filtering import FilteredGroups
from p3o_jax.experience.past import PastPolicy, PolicyRing
from p3o_jax.experience.prompts import EncodedPrompt, encoded, encoded_batches, evaluation_sets
from p3o_jax.experience.row_checks import Checks, usable
from p3o_jax.experience.scoring import Scorer
from p3o_jax.experience.source import ExperienceSource, FreshRollouts
from p3o_jax.learner.learner import Learner, TrainState
from p3o_jax.learner.plan import StepPlan
from p3o_jax.learner.updates import Updates
from p3o_jax.learner.warm_start import taught
from p3o_jax.models import lora
from p3o_jax.models.stored.contents import StoredModel
from p3o_jax.models.stored.load import load_params
from p3o_jax.runs.checkpoint import Checkpoints
from p3o_jax.runs.state import Loop, RunState
from p3o_jax.sampler import Engine, Sampler, SamplingLimits
from p3o_jax.tokenizers.text import Tokenizer


@dataclass(frozen=True)
class Parts:
    """What a run is made of. Nothing in it has started a process or compiled a program."""

    config: Config
    """With a pretrained model's architecture in it."""
    stored: StoredModel | None
    """The pretrained model."""
    tokenizer: Tokenizer
    mesh: Mesh
    """The learner's."""
    plan: StepPlan
    engine: Engine
    learner: Learner
    updates: Updates
    scorer: Scorer
    evaluate: HeldOut
    advantages: Callable[..., Any]
    """(rewards, group, known) -> advantages, on global arrays of rows."""

    def source(self, cursor: int) -> ExperienceSource:
        """Returns what gives each step its rows, from a position in the stream of prompts on."""
        config = self.config
        prompts: Iterator[list[EncodedPrompt]] = encoded_batches(
            config.task, self.tokenizer, config.seed, config.prompts_per_step, position=cursor
        )
        fresh = FreshRollouts(
            self.engine,
            self.scorer,
            prompts,
            key=partial(run_key, config.seed, Purpose.TRAIN),
            num_samples=config.samples_per_prompt,
            sampling=config.sampling,
            support=self.plan.sampler_support,
        )
        return FilteredGroups(fresh, config.zero_variance, config.max_sampled_batches, self.mesh)

    def publish(self, state: TrainState, step: int) -> PastPolicy:
        """Gives the engine the learner's parameters, and returns what is kept of them while they may sample."""
        kept = jax.tree.map(jnp.copy, lora.split(state.params)[0]) if self.plan.keeps_params else None
        return PastPolicy(self.engine.publish(state.params, step), kept)

    def start(self, pause: Callable[[], None] = lambda: None) -> RunState:
        """Makes the state of a run that begins: pretrained or random parameters, after the warm start if there is one.

        Args:
            pause: called now and then during the warm start, and may raise.
        """
        config, key = self.config, run_key(self.config.seed, Purpose.INIT)
        if self.stored is None:
            state = self.learner.init(key)
        else:
            state = self.learner.init_with(key, load_params(self.stored, config.model, self.mesh))
        if config.warm_start is not None:
            arguments = (config.task, config.warm_start, config.model, state.params, self.mesh)
            state = self.learner.init_from(taught(*arguments, seed=config.seed, pause=pause))
        return RunState(0, state, PolicyRing(config.staleness, {0: self.publish(state, 0)}), Loop())

    def restore(self, checkpoints: Checkpoints, *, within_streak: bool = True) -> RunState | None:
        """Makes the state of the newest checkpoint that is whole; None if there is none.

        Args:
            within_streak: also one that was made between updates that were skipped.

        Raises:
            CheckpointError: there are checkpoints, but none that is whole.
        """
        abstract = self.learner.abstract_state()
        params = lora.split(abstract.params)[0] if self.plan.keeps_params else None

        def good(loop: Mapping[str, Any]) -> bool:
            return within_streak or not Loop(**loop).skipped_in_a_row

        found = checkpoints.restore(abstract, PastPolicy(self.engine.abstract_weights(), params).stored(), good)
        if found is None:
            return None
        past = {version: PastPolicy.of_stored(tree) for version, tree in found.past.items()}
        ring = PolicyRing(self.config.staleness, past)
        ring.push(found.step, self.publish(found.state, found.step))
        return RunState(found.step, found.state, ring, Loop(**found.loop))

    def advantages_of(
        self, rewards: Float[np.ndarray, " B"], group: Int[AnyArray, " B"], known: Bool[np.ndarray, " B"]
    ) -> Float[np.ndarray, " B"]:
        """Computes this process's advantages; batch statistics are over all processes' rows."""
        return sharding.to_local(self.advantages(*sharding.to_global((rewards, group, known), self.mesh)))


def build(config: Config, devices: Sequence[jax.Device] | None = None, *, check_rows: bool = True) -> Parts:
    """Makes the parts of a run.

    Args:
        config: the run.
        devices: what it runs on. None: all.
        check_rows: look at every row of its datasets, and leave out, or refuse, those that cannot be used.

    Raises:
        ValueError: the configuration does not fit the devices, the model or the task, or there are rows that cannot be
            used; nothing was compiled.
    """
    stored = None if config.pretrained is None else config.pretrained.open()
    config = resolve(config, stored)
    task = config.task
    tokenizer = task.tokenizer
    if config.pretrained is not None and stored is not None:
        tokenizer = config.pretrained.tokenizer(stored)
    mesh, sampler_mesh = _meshes(config, devices)
    validate(
        config,
        vocab_size=tokenizer.vocab_size,
        batch_shards=sharding.num_batch_shards(mesh),
        num_processes=row_part(mesh)[1],
        sampler_shards=sharding.num_batch_shards(sampler_mesh),
    )
    if check_rows:
        task = usable(task, Checks(tokenizer, config.verifiers, demonstrated=config.warm_start is not None))
        config = replace(config, task=task)
    sets = _evaluation_sets(config, tokenizer)
    plan = StepPlan(
        config.objective,
        config.epochs,
        config.minibatches,
        config.micro_batches,
        config.staleness,
        config.support_tokens,
    )
    limits = SamplingLimits(
        task.max_prompt_tokens, task.max_response_tokens, tokenizer.eos_ids, slots=config.sampler_slots
    )
    engine = Sampler(config.model, tokenizer.vocab_size, limits, config.precision, sampler_mesh, mesh)
    learner = Learner(
        config.model,
        tokenizer.vocab_size,
        plan,
        config.optimizer,
        mesh,
        num_updates=config.num_updates,
        num_tasks=len(task.components),
        keep_log_probs=config.write_rollouts_every > 0,
    )
    scorer = Scorer(task, tokenizer, config.verifiers)
    held_out = HeldOut(
        engine,
        scorer,
        sets,
        run_key(config.seed, Purpose.EVALUATION),
        config.evaluation_samples,
        config.evaluation_sampling,
        config.prompts_per_step,
        {
            "samples": config.evaluation_samples,
            **asdict(config.evaluation_sampling),
            "response_tokens": task.max_response_tokens,
            "precision": asdict(config.precision),
            "seed": config.seed,
        },
    )
    updates = Updates(
        learner, group_size=config.samples_per_prompt, packed=config.pack, max_skipped=config.max_skipped_updates
    )
    advantages = jax.jit(config.advantages)
    return Parts(config, stored, tokenizer, mesh, plan, engine, learner, updates, scorer, held_out, advantages)


def _evaluation_sets(config: Config, tokenizer: Tokenizer) -> dict[str, list[EncodedPrompt]]:
    """Tokenises the held-out prompts.

    Raises:
        ValueError: some are longer than the task allows.
    """
    task = config.task
    sets = {
        name: encoded(prompts, tokenizer) for name, prompts in evaluation_sets(task, config.evaluation_prompts).items()
    }
    lengths = np.asarray([len(ids) for prompts in sets.values() for _, ids in prompts])
    too_long = int((lengths > task.max_prompt_tokens).sum())
    if too_long:
        raise ValueError(
            f"{too_long} of {len(lengths)} evaluation prompts are longer than the task's limit of "
            f"{task.max_prompt_tokens} tokens: give the task prompt_tokens={lengths.max()} or more"
        )
    return sets


def _meshes(config: Config, devices: Sequence[jax.Device] | None) -> tuple[Mesh, Mesh]:
    """Makes the learner's mesh and the sampler's.

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
