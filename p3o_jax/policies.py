"""Policies by name: a run's checkpoint, a published model in a directory or a GGUF file, or the one in a package."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from p3o_jax.config import Config, load, load_architecture, load_task
from p3o_jax.devices import sharding
from p3o_jax.models.architecture import TransformerConfig
from p3o_jax.models.lora import merged
from p3o_jax.models.stored.contents import StoredModel
from p3o_jax.models.stored.families import adapted, read_config
from p3o_jax.models.stored.load import load_params
from p3o_jax.models.stored.pretrained import Pretrained, open_model
from p3o_jax.models.transformer import Transformer, abstract_model, weight_specs
from p3o_jax.runs import integrity
from p3o_jax.runs.checkpoint import best_step, newest_step
from p3o_jax.runs.directory import RunDirectory
from p3o_jax.tasks.base import Task
from p3o_jax.tokenizers import small
from p3o_jax.tokenizers.hf import default_template
from p3o_jax.tokenizers.prompt_format import PromptFormat
from p3o_jax.tokenizers.text import Tokenizer


class LoadedPolicy(NamedTuple):
    """A model that can be asked, and where it comes from."""

    name: str
    """What was asked for."""
    model: TransformerConfig
    """Its architecture, without adapters: those of a run are merged."""
    params: nnx.State
    """Its parameters, placed by `sharding.LEARNER_RULES`: what a sampler's `publish` takes."""
    tokenizer: Tokenizer
    """Its tokenizer; the embedding has `tokenizer.vocab_size` entries."""
    origin: Config | Path | None = None
    """The run's configuration, if it is one, or the file that holds it, which is not read before it is asked for: it
    may name modules that would be imported."""
    step: int = 0
    """The run's step; 0 for a published model."""
    trusted: tuple[str, ...] = ()
    """The modules that may be."""

    @property
    def config(self) -> Config | None:
        """The run's configuration, if it is one.

        Raises:
            UntrustedError: it names a module that is not trusted.
        """
        return load(self.origin, self.trusted) if isinstance(self.origin, Path) else self.origin

    @property
    def task(self) -> Task | None:
        """The run's task, if it is a run; nothing else of its configuration is read.

        Raises:
            UntrustedError: it names a module that is not trusted.
        """
        if isinstance(self.origin, Path):
            return load_task(self.origin, self.trusted)
        return None if self.origin is None else self.origin.task


def load_policy(
    name: str,
    mesh: Mesh,
    *,
    chat: bool = True,
    system_prompt: str | None = None,
    context_tokens: int | None = None,
    dtype: DTypeLike = jnp.float32,
    trusted: Sequence[str] = (),
) -> LoadedPolicy:
    """A policy by name. Called by all processes alike.

    Of a run, nothing that its configuration names is imported for it, unless its tokenizer is its task's own.

    Args:
        name: the directory of a run, with @STEP or @best for another checkpoint than its newest; or a directory with
            config.json and safetensors, a .gguf file, or smollm2-135m.
        mesh: where its parameters go.
        chat: of a published model, whether prompts go into its chat template if it has one. A run's own setting holds,
            and that of the run that a directory was exported from: without a template if it was trained so, else with
            its system prompt and options.
        system_prompt: of a published model, what the system says first in a chat.
        context_tokens: of a published model, the longest sequence; None: as long as the model was made for.
        dtype: of the parameters.
        trusted: of a run, modules besides this package's that its configuration may name.

    Raises:
        FileNotFoundError: there is no such model, run or checkpoint.
        UntrustedError: the run's tokenizer is that of a module that is not trusted.
        ValueError: a model that cannot be read, or a checkpoint that is damaged.
    """
    checkpoint = find_checkpoint(name)
    if checkpoint is not None:
        return _of_run(name, checkpoint, mesh, dtype, tuple(trusted))
    stored = open_model(name)
    pretrained = _as_trained(name, stored, chat, system_prompt)
    architecture = read_config(stored.config, stored.path)
    wishes = TransformerConfig(context_tokens=context_tokens or architecture.context_tokens)
    model = adapted(architecture, wishes)
    params = load_params(stored, model, mesh, dtype=dtype)
    return LoadedPolicy(name, model, params, pretrained.tokenizer(stored))


def _as_trained(name: str, stored: StoredModel, chat: bool, system_prompt: str | None) -> Pretrained:
    """With prompts as the model's directory says they were made, if it does, except for what is asked for."""
    source = stored.tokenizer()
    made = source.prompt_format or PromptFormat(chat=True)
    if not (chat and made.chat and default_template(source.config)):
        return Pretrained(name, chat=False)
    return Pretrained(
        name, True, made.system_prompt if system_prompt is None else system_prompt, dict(made.template_options)
    )


def find_checkpoint(name: str) -> Path | None:
    """The checkpoint that RUN, RUN@STEP or RUN@best means, checked for damage; None: the name is not that of a run.

    Raises:
        FileNotFoundError: the run has no such checkpoint.
        ValueError: the checkpoint is damaged.
    """
    directory, _, step = name.rpartition("@")
    if not (step.isdecimal() or step == "best") or not Path(directory).is_dir():
        directory, step = name, ""
    path = Path(directory)
    checkpoints = RunDirectory(path).checkpoints
    if not checkpoints.is_dir():
        if (path / "command.txt").is_file():
            raise FileNotFoundError(f"{path} is a run without a checkpoint yet")
        return None
    found = best_step(checkpoints) if step == "best" else int(step or newest_step(checkpoints))
    if found is None:
        raise FileNotFoundError(f"{path} has no checkpoint that was evaluated")
    checkpoint = checkpoints / str(found)
    if not checkpoint.is_dir():
        there = sorted(int(entry.name) for entry in checkpoints.glob("*") if entry.name.isdigit())
        raise FileNotFoundError(f"{path} has no checkpoint of step {found}; it has {there or 'none'}")
    problem = integrity.damage(checkpoint)
    if problem is not None:
        raise ValueError(f"{checkpoint} is damaged: {problem}; {path}@STEP takes another")
    return checkpoint


def _of_run(name: str, checkpoint: Path, mesh: Mesh, dtype: DTypeLike, trusted: tuple[str, ...]) -> LoadedPolicy:
    path = checkpoint.parents[1] / "config.json"
    architecture = load_architecture(path, trusted)
    model, pretrained = architecture.model, architecture.pretrained
    tokenizer = _own_tokenizer(path, trusted) if pretrained is None else pretrained.tokenizer(pretrained.open())
    params = restore_params(checkpoint / "state", model, tokenizer.vocab_size, mesh)
    plain = adapted(model, TransformerConfig(dtype=model.dtype, context_tokens=model.context_tokens))
    _, abstract = abstract_model(plain, tokenizer.vocab_size)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), weight_specs(abstract, mesh, sharding.LEARNER_RULES))
    finish = jax.jit(
        lambda params: jax.tree.map(lambda leaf: leaf.astype(dtype), merged(params, model.lora)), out_shardings=places
    )
    return LoadedPolicy(name, plain, finish(params), tokenizer, path, int(checkpoint.name), trusted)


def _own_tokenizer(path: Path, trusted: tuple[str, ...]) -> Tokenizer:
    """The tokenizer of a run that starts from no published model: as the run has stored it, or its task's."""
    stored = path.with_name(small.FILE)
    if not stored.exists():  # of an earlier version, or of a kind that is no data
        return load_task(path, trusted).tokenizer
    try:
        return small.tokenizer_from_json(json.loads(stored.read_bytes()))
    except ValueError as error:
        raise ValueError(f"{stored} is damaged: {error}") from error


def random_policy(name: str, config: Config, mesh: Mesh) -> LoadedPolicy:
    """The model of a configuration as it is initialised, without adapters, which are 0 then.

    Raises:
        ValueError: the configuration starts from a published model.
    """
    if config.pretrained is not None:
        raise ValueError(f"{name} starts from {config.pretrained.path}: give that as the model")
    model, vocab_size = dataclasses.replace(config.model, lora=None), config.task.tokenizer.vocab_size
    _, abstract = abstract_model(model, vocab_size)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), weight_specs(abstract, mesh, sharding.LEARNER_RULES))

    def create(key: jax.Array) -> nnx.State:
        return nnx.state(Transformer(model, vocab_size, nnx.Rngs(params=key)))

    params = jax.jit(create, out_shardings=places)(jax.random.key(config.seed))
    return LoadedPolicy(name, model, params, config.task.tokenizer, config)


def restore_params(path: Path, model: TransformerConfig, vocab_size: int, mesh: Mesh) -> nnx.State:
    """The parameters, adapters beside them, out of a checkpoint's train state, and nothing else of it."""
    _, abstract = abstract_model(model, vocab_size)
    specs = weight_specs(abstract, mesh, sharding.LEARNER_RULES)
    placed = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        abstract,
        specs,
    )
    wanted = {"params": placed}
    arguments = ocp.args.PyTreeRestore(
        wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path.absolute(), args=arguments)["params"]
