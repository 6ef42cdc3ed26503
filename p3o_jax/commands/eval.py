"""Any policy on any task: pass@k, majority vote, and every completion."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import arg

from p3o_jax.commands.arguments import Directory, ModelArguments, OptionalCount, RowArguments, SamplingArguments
from p3o_jax.devices.sharding import MeshShape
from p3o_jax.terminal import say

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from p3o_jax.policies import LoadedPolicy
    from p3o_jax.rewards.pool import Verifiers
    from p3o_jax.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Arguments(RowArguments, SamplingArguments, ModelArguments):
    """What to evaluate, and how."""

    task: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, arg(metavar="TASK")] = ()
    """LAYOUT:FILE with a layout of docs/tasks.md (gsm8k:test.jsonl, math500:test.jsonl, aime:*.parquet, ...),
    reasoning_gym:DATASET, EXPERIMENT[:VARIANT], or module:function that returns a task. May be given again. Default:
    the run's own."""
    num_prompts: OptionalCount = None
    """Prompts of each task. Default: all of a file, 256 of a procedural task."""
    samples_per_prompt: int = 4
    """Responses to each prompt: pass@1, pass@2, ... pass@N, majority@N, each with its standard error over prompts.
    0: none."""
    prompts_per_batch: int = 32
    """Prompts that are sampled at once, over all devices."""
    response_tokens: OptionalCount = None
    """Longest response. Default: the task's."""
    greedy: bool = False
    """Judge the most likely response to each prompt too."""
    mesh: MeshShape = MeshShape()
    """How the devices share the work."""
    seed: int = 0
    """Everything random is a function of it."""
    out: Directory = None
    """Directory for NAME.json, NAME.jsonl and NAME.md. Default: runs/eval/MODEL/TIME."""


def run(arguments: Sequence[str]) -> None:
    """Evaluates on each task, prints the results and writes them with every completion."""
    asked = tyro.cli(Arguments, args=list(arguments), prog="p3o eval", description=__doc__)
    _check(asked)

    from p3o_jax.commands.lookup import task_named
    from p3o_jax.devices import sharding
    from p3o_jax.devices.cache import enable_compilation_cache
    from p3o_jax.experience.row_checks import Checks, usable
    from p3o_jax.rewards.pool import Verifiers

    verifiers = Verifiers(timeout_seconds=asked.verifier_timeout_seconds)
    tasks = [task_named(specification) for specification in asked.task]
    mesh = sharding.make_mesh(asked.mesh)
    enable_compilation_cache()
    policy = asked.open(mesh)
    if not tasks and policy.origin is None:
        raise ValueError(f"eval: {asked.model} is no run, which would have a task of its own: give --task")
    checks = Checks(policy.tokenizer, verifiers, ("evaluation",), unusable_rows=asked.unusable_rows)
    tasks = [usable(task, checks) for task in tasks or [policy.task]]
    name = Path(asked.model).name.replace("@", "_step_").replace(":", "_")
    out = asked.out or Path("runs", "eval", name, time.strftime("%Y-%m-%d_%H-%M-%S"))
    _evaluate(asked, policy, tasks, verifiers, mesh, out)
    say(f"{out}: results (.json), completions (.jsonl) and a table of some (.md)")


def _check(asked: Arguments) -> None:
    """Checks what is asked, before anything is loaded.

    Raises:
        ValueError: impossible numbers.
        FileExistsError: there are results where they should go.
    """
    from p3o_jax.sampler.sampling import check_seed

    if asked.samples_per_prompt < 0 or (asked.samples_per_prompt == 0 and not asked.greedy):
        raise ValueError(f"eval: samples_per_prompt={asked.samples_per_prompt}: give at least 1, or 0 with --greedy")
    for name in ("num_prompts", "prompts_per_batch", "response_tokens"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise ValueError(f"eval: {name}={value} must be at least 1")
    check_seed(asked.seed)
    asked.sampling()
    asked.formats()
    if asked.out is not None and any(asked.out.glob("*.json")):
        raise FileExistsError(f"{asked.out} has results: give another --out")


def _evaluate(
    asked: Arguments, policy: LoadedPolicy, tasks: Sequence[Task], verifiers: Verifiers, mesh: Mesh, out: Path
) -> None:
    """Evaluates on each component of each task; prints the results, and writes them to `out`."""
    import jax

    from p3o_jax.devices import sharding
    from p3o_jax.evaluation.evaluate import evaluate
    from p3o_jax.evaluation.files import readable, write_evaluation
    from p3o_jax.experience.prompts import encoded, evaluation_sets_of
    from p3o_jax.experience.scoring import Scorer
    from p3o_jax.sampler import Sampler, SamplingLimits, Weights

    shards, tokenizer = sharding.num_batch_shards(mesh), policy.tokenizer
    components = [one for task in tasks for one in task.components]
    sets = [encoded(prompts, tokenizer) for task in tasks for prompts in evaluation_sets_of(task, asked.num_prompts)]
    prompt_tokens = max(len(ids) for prompts in sets for _, ids in prompts)  # one program serves all tasks
    samplers: dict[int, tuple[Sampler, Weights]] = {}
    for task, prompts in zip(components, sets, strict=True):
        response_tokens = asked.response_tokens or task.max_response_tokens
        if response_tokens not in samplers:
            limits = SamplingLimits(prompt_tokens, response_tokens, tokenizer.eos_ids)
            sampler = Sampler(policy.model, tokenizer.vocab_size, limits, asked.formats(), mesh)
            samplers[response_tokens] = sampler, sampler.publish(policy.params, policy.step)
        with Scorer(task, tokenizer, verifiers) as scorer:
            result = evaluate(
                *samplers[response_tokens],
                scorer,
                prompts,
                key=jax.random.key(asked.seed),
                num_samples=asked.samples_per_prompt,
                sampling=asked.sampling(),
                greedy=asked.greedy,
                prompts_per_batch=-(-asked.prompts_per_batch // shards) * shards,
                keep_completions=True,
            )
        settings = {
            "policy": asked.model,
            "step": policy.step,
            "samples": asked.samples_per_prompt,
            **asdict(asked.sampling()),
            "response_tokens": response_tokens,
            "precision": asdict(asked.formats()),
            "chat": asked.chat,
            "system_prompt": asked.system_prompt,
            "seed": asked.seed,
        }
        write_evaluation(out, task.name, result.metrics, result.completions, settings)
        say(task.name)
        for tag, value in readable(result.metrics):
            say(f"  {tag:22} {value}")
