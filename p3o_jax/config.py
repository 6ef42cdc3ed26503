"""The configuration of a run: typed, complete, validated before anything compiles, and JSON and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from p3o_jax.batch.advantages import Advantages, BatchWhitening, GroupZScore
from p3o_jax.config_json import CLASS, UntrustedError, make_converter, structured
from p3o_jax.devices.precision import Precision
from p3o_jax.devices.sharding import MeshShape
from p3o_jax.experience.filtering import ZeroVariance
from p3o_jax.learner.optimizer import OptimizerConfig
from p3o_jax.learner.warm_start import WarmStart
from p3o_jax.models.rope import RopeScaling
from p3o_jax.models.stored.contents import StoredModel
from p3o_jax.models.stored.families import adapted, read_config
from p3o_jax.models.stored.pretrained import Pretrained
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.objectives import P3O, Aggregation, Objective
from p3o_jax.rewards.base import Reward
from p3o_jax.rewards.pool import Verifiers
from p3o_jax.sampler import Sampling
from p3o_jax.sampler.sampling import check_seed, is_temperature
from p3o_jax.tasks import SortDigits, Task


@dataclass(frozen=True)
class Config:
    """One training run. A rollout step samples once and makes epochs x minibatches optimizer updates."""

    task: Task = SortDigits()
    """Prompts and their reward."""
    model: TransformerConfig = TransformerConfig()
    """The policy's architecture. With a pretrained model only dtype, remat, lora and context_tokens are this run's."""
    pretrained: Pretrained | None = None
    """The model to start from, and its tokenizer; None: random weights, and the task's tokenizer."""
    warm_start: WarmStart | None = None
    """Supervised training before RL, for a randomly initialised model."""
    objective: Objective = P3O()
    """What is minimised."""
    advantages: Advantages = GroupZScore()
    """Rewards -> advantages."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning-rate schedule."""
    mesh: MeshShape = MeshShape()
    """How the devices share the learner's work."""
    sampler_mesh: MeshShape | None = None
    """How the devices share the sampler's; None: as the learner's, or on devices of its own all along `data`. `tensor`
    shares a model that is too large for one device or too slow on it; weights are whole along the other axes."""
    sampler_devices: int = 0
    """The last so many devices sample and do nothing else, the same number of every host; 0: all do both."""

    seed: int = 0
    """Everything random is a function of it."""
    num_steps: int = 60
    """Rollout steps."""
    prompts_per_step: int = 32
    """Prompts sampled in a rollout step, over all devices."""
    samples_per_prompt: int = 8
    """Responses to each prompt: the group over which advantages are taken."""
    zero_variance: ZeroVariance = "keep"
    """What becomes of groups whose rewards are all the same: keep, drop (masked out of every sum and denominator), or
    resample (further prompts are sampled until there are enough groups that have variance)."""
    max_sampled_batches: int = 10
    """With zero_variance="resample": sample at most so many times prompts_per_step; what is then missing is dropped."""
    epochs: int = 1
    """Passes over the rollouts of a step."""
    minibatches: int = 1
    """Optimizer updates in a pass."""
    micro_batches: int = 1
    """Parts in which an update's rows go through the model; changes memory, not the result."""
    pack: bool = True
    """Let short sequences share rows where that saves rows; changes speed and memory, not the result. Never done
    for an objective whose statistics are those of a micro-batch, since it changes what is in one."""
    support_tokens: int = 64
    """Tokens that are kept of a distribution, for an objective with kl="top_k"; the others are one bucket."""
    staleness: int = 0
    """Rollouts are sampled by the policy of this many rollout steps ago."""

    sampler_temperature: float = 1.0
    """Temperature rollouts are sampled at."""
    sampler_top_k: int | None = None
    """Rollouts are sampled from the so many most likely tokens; None: from all."""
    sampler_top_p: float = 1.0
    """Rollouts are sampled from the smallest set of most likely tokens that has this mass; 1: from all."""
    sampler_min_p: float = 0.0
    """Rollouts are sampled from tokens at least so many times as likely as the most likely one; 0: from all."""
    allow_truncated_behaviour: bool = False
    """Accept top-k, top-p or min-p for rollouts. What they cut is never sampled, however likely the learner finds it,
    and no ratio repairs that: the objective is then not that of the policy."""
    sampler_slots: int | None = None
    """Rows decoded at a time, over all devices; a slot whose row has ended takes the next row that waits. Saves time
    and memory where lengths differ much; changes no row. None: all rows of a step."""
    learner_temperature: float | None = None
    """Temperature of the policy that is optimised; None: the sampler's."""
    precision: Precision = Precision()
    """The sampler's formats."""

    verifiers: Verifiers = Verifiers()
    """The processes that rewards are computed in, unless they are quick and safe."""
    evaluate_every: int = 20
    """Rollout steps between evaluations; before the first and after the last there always is one. 0: none."""
    evaluation_prompts: int = 256
    """Size of the fixed evaluation set, disjoint from the training prompts."""
    evaluation_samples: int = 2
    """Samples per evaluation prompt for pass@1."""
    evaluation_sampling: Sampling = Sampling()
    """How they are sampled; truncation is free here."""
    save_every: int = 20
    """Rollout steps between checkpoints; after the last there always is one."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints are kept; the best evaluated one always is."""
    keep_every: int = 0
    """Checkpoints at multiples of this many rollout steps are kept too. 0: none."""
    write_rollouts_every: int = 20
    """Rollout steps between files of readable rollouts. 0: none."""
    max_skipped_updates: int = 10
    """Stop after this many non-finite updates in a row."""
    roll_back: int = 0
    """How often to go back to the last good checkpoint instead; the prompts go on, so other data follow."""
    watchdog_seconds: float = 1800.0
    """Report a step that takes longer, compilation aside. 0: never."""
    watchdog_ends: bool = False
    """End the process that reports, so that whatever starts runs can start it again."""

    def __post_init__(self) -> None:
        positive = (
            "num_steps", "prompts_per_step", "samples_per_prompt", "epochs", "minibatches", "micro_batches",
            "evaluation_prompts", "evaluation_samples", "save_every", "keep_checkpoints", "max_skipped_updates",
            "support_tokens", "max_sampled_batches",
        )  # fmt: skip
        for name in positive:
            if isinstance(getattr(self, name), bool) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "staleness",
            "sampler_devices",
            "evaluate_every",
            "keep_every",
            "write_rollouts_every",
            "roll_back",
            "watchdog_seconds",
        ):
            if isinstance(getattr(self, name), bool) or getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("sampler_temperature", "learner_temperature"):
            temperature = getattr(self, name)
            if temperature is not None and not is_temperature(temperature):
                raise ValueError(f"{name} must be positive and finite, got {temperature}")
        if self.pretrained is not None and self.warm_start is not None:
            raise ValueError("warm_start is for a randomly initialised model: leave it out, or leave out pretrained")
        if self.sampler_slots is not None and self.sampler_slots < 1:
            raise ValueError(f"sampler_slots must be at least 1, got {self.sampler_slots}")
        self._check_truncation()
        check_seed(self.seed)
        if self.objective.reference_kl_coefficient > 0:
            raise ValueError(
                f"objective.reference_kl_coefficient={self.objective.reference_kl_coefficient}: a run keeps no frozen "
                "reference policy; give 0 (the term is for objective_loss, with reference_log_probs)"
            )
        if self.samples_per_prompt == 1 and not isinstance(self.advantages, BatchWhitening):
            raise ValueError(
                f"samples_per_prompt=1: with {type(self.advantages).__name__}, which compares the samples of a prompt, "
                "every advantage would be 0; give at least 2, or advantages=BatchWhitening()"
            )
        if self.samples_per_prompt == 1 and self.zero_variance != "keep":
            raise ValueError(
                f"zero_variance={self.zero_variance!r}: a group of samples_per_prompt=1 has no variance, so that none "
                "would be left; give at least 2, or zero_variance='keep'"
            )

    def _check_truncation(self) -> None:
        if not self.sampling.is_truncated:
            return
        cuts = ", ".join(f"sampler_{name}={getattr(self.sampling, name)}" for name in ("top_k", "top_p", "min_p"))
        if not self.allow_truncated_behaviour:
            raise ValueError(
                f"{cuts}: rollouts would be from a truncated distribution, whose missing support no ratio repairs; "
                "give allow_truncated_behaviour=True if that is wanted (evaluation_sampling is free)"
            )
        if self.objective.support in ("behaviour", "both"):
            raise ValueError(
                f"{cuts}: the objective's KL to the behaviour distribution is infinite where that is truncated; "
                "sample from all tokens, or give the objective a KL of the sampled tokens"
            )

    @property
    def sampling(self) -> Sampling:
        """How rollouts are sampled."""
        return Sampling(self.sampler_temperature, self.sampler_top_k, self.sampler_top_p, self.sampler_min_p)

    @property
    def num_updates(self) -> int:
        """Optimizer updates in the whole run."""
        return self.num_steps * self.epochs * self.minibatches

    def is_due(self, step: int, every: int) -> bool:
        """Whether something done every so many steps is done at this one; the last step always is. 0: never."""
        return every > 0 and (step % every == 0 or step == self.num_steps)


def resolve(config: Config, stored: StoredModel | None) -> Config:
    """The same run with the architecture of the model that it starts from, if it starts from one.

    Raises:
        ValueError: an architecture that is not read.
    """
    if stored is None:
        return config
    return dataclasses.replace(config, model=adapted(read_config(stored.config, stored.path), config.model))


def validate(
    config: Config, *, vocab_size: int, batch_shards: int, num_processes: int, sampler_shards: int | None = None
) -> None:
    """Checks what depends on the devices and on the task, before anything compiles.

    Args:
        vocab_size: entries of the embedding.
        batch_shards: devices that the rows of a batch are spread over.
        num_processes: hosts.
        sampler_shards: the same as `batch_shards` for the sampler, where it has its own mesh.

    Raises:
        ValueError: what does not fit, and what to change.
    """
    c = config
    if c.prompts_per_step % c.minibatches:
        raise ValueError(f"prompts_per_step={c.prompts_per_step} does not divide into minibatches={c.minibatches}")
    prompts = c.prompts_per_step // c.minibatches
    rows = prompts * c.samples_per_prompt
    if prompts % num_processes:
        raise ValueError(f"{prompts} prompts in a minibatch do not divide over {num_processes} hosts")
    if rows % (batch_shards * c.micro_batches):
        raise ValueError(
            f"a minibatch of {prompts} prompts x samples_per_prompt={c.samples_per_prompt} = {rows} rows does not "
            f"divide over {batch_shards} devices x micro_batches={c.micro_batches}"
        )
    sampler_shards = sampler_shards or batch_shards
    if c.prompts_per_step % sampler_shards:
        raise ValueError(f"prompts_per_step={c.prompts_per_step} does not divide over {sampler_shards} devices")
    if c.sampler_slots is not None and c.sampler_slots % sampler_shards:
        raise ValueError(f"sampler_slots={c.sampler_slots} does not divide over {sampler_shards} devices")
    if c.warm_start is not None and c.warm_start.rows_per_step % batch_shards:
        raise ValueError(
            f"warm_start.rows_per_step={c.warm_start.rows_per_step} does not divide over {batch_shards} devices"
        )
    tokens = c.task.max_prompt_tokens + c.task.max_response_tokens
    if tokens > c.model.context_tokens:
        raise ValueError(
            f"prompts of up to {c.task.max_prompt_tokens} and responses of up to {c.task.max_response_tokens} tokens "
            f"exceed model.context_tokens={c.model.context_tokens}"
        )
    for axis, size, names in (
        ("tensor", c.mesh.tensor, ("num_heads", "num_kv_heads", "mlp_dim")),
        ("fsdp", c.mesh.fsdp, ("embed_dim",)),
    ):
        for name in names:
            if getattr(c.model, name) % size:
                raise ValueError(f"model.{name}={getattr(c.model, name)} does not divide over mesh.{axis}={size}")
    if vocab_size % c.mesh.tensor:
        raise ValueError(f"a vocabulary of {vocab_size} does not divide over mesh.tensor={c.mesh.tensor}")


_OPEN_TYPES = (Task, Reward, Objective, Advantages, Aggregation, RopeScaling)


def to_json(config: Config) -> dict[str, Any]:
    """The complete configuration as JSON values."""
    return make_converter(_OPEN_TYPES).unstructure(config)


_COMPARED = (
    "task", "objective", "advantages", "optimizer", "seed", "prompts_per_step", "samples_per_prompt", "epochs",
    "minibatches", "support_tokens", "staleness", "sampler_temperature", "learner_temperature", "precision",
)  # fmt: skip


def hyperparameters(config: Config) -> dict[str, bool | int | float | str]:
    """What runs are compared by, flat: `objective` is a class name, `objective.kl` one of its fields."""
    found: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                add(name if key == CLASS else f"{name}.{key}", item.rpartition(":")[2] if key == CLASS else item)
        else:
            found[name] = value if isinstance(value, bool | int | float | str) else json.dumps(value)

    as_json = to_json(config)
    for name in _COMPARED:
        add(name, as_json[name])
    return found


def from_json(data: Any, trusted: Collection[str] = ()) -> Config:
    """The inverse of `to_json`.

    Args:
        data: JSON values.
        trusted: modules that may be imported for the classes that are named, besides this package's.

    Raises:
        UntrustedError: another module is named.
        ValueError: an unknown field, a missing class or a value of the wrong type, with its path.
    """
    return structured(make_converter(_OPEN_TYPES, trusted), data, Config)


def as_written_now(stored: Any, running: Config) -> Any:
    """Rewrites the JSON values of an earlier version: classes where they are now, absent fields at their defaults.

    Args:
        stored: what a `config.json` holds.
        running: the configuration that is being run; the modules it names may be imported.

    Returns:
        The same configuration as `to_json` gives it, or `stored` itself if it cannot be read.
    """
    try:
        return to_json(from_json(stored, _modules(to_json(running))))
    except ValueError:
        return stored


def _modules(value: Any) -> set[str]:
    """Collects what stands before the colon of every text `module:name`."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return set().union(*map(_modules, value))
    return {value.partition(":")[0]} if isinstance(value, str) and ":" in value else set()


@dataclass(frozen=True)
class Architecture:
    """What of a run's configuration says how its policy is made: data, for which nothing that it names is imported."""

    model: TransformerConfig
    pretrained: Pretrained | None


def load(path: Any, trusted: Collection[str] = ()) -> Config:
    """Reads a `config.json`; see `from_json`."""
    return _read(path, lambda data: from_json(data, trusted))


def load_architecture(path: Any, trusted: Collection[str] = ()) -> Architecture:
    """Reads what a `config.json` says of the policy, and nothing else of it."""
    return _read(path, lambda data: _fields(data, Architecture, trusted))


def load_task(path: Any, trusted: Collection[str] = ()) -> Task:
    """Reads the task of a `config.json`, and nothing else of it."""
    return _read(path, lambda data: _fields(data, _OfTask, trusted)).task


@dataclass(frozen=True)
class _OfTask:
    task: Task


def _fields(data: Any, kind: Any, trusted: Collection[str]) -> Any:
    """Those fields of a configuration that another dataclass has too."""
    wanted = [field.name for field in dataclasses.fields(kind)]
    found = {name: data[name] for name in wanted if isinstance(data, dict) and name in data}
    return structured(make_converter(_OPEN_TYPES, trusted), found, kind)


def _read(path: Any, convert: Callable[[Any], Any]) -> Any:
    try:
        with open(path, "rb") as file:
            return convert(json.load(file))
    except RecursionError:
        raise ValueError(f"{path} is no configuration: it is nested too deep") from None
    except ValueError as error:
        wrong = UntrustedError if isinstance(error, UntrustedError) else ValueError
        raise wrong(f"{path}: {error}") from error
