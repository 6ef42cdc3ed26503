"""How far a quantised, tempered or stale sampler is from the policy that would be trained, in ESS and KL."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import arg

from p3o_jax.commands.arguments import Counts, Directory, ModelArguments, Numbers, OptionalCount, Words
from p3o_jax.devices.sharding import MeshShape

if TYPE_CHECKING:
    from flax import nnx
    from jax.sharding import Mesh

    from p3o_jax.policies import LoadedPolicy
    from p3o_jax.probe import Report, Settings

LADDER = (
    "float32",
    "bfloat16",
    "int8/int8",
    "int8/int8/int8",
    "fp8_e4m3",
    "fp8_e4m3/fp8_e4m3",
    "fp8_e4m3/fp8_e4m3/fp8_e4m3",
    "fp8_e5m2/fp8_e5m2/fp8_e5m2",
    "int4",
    "int4@16",
)


@dataclass(frozen=True, kw_only=True)
class Arguments(ModelArguments):
    """What to probe."""

    prompts: Annotated[Path | None, arg(metavar="FILE")] = None
    """A UTF-8 text file with a prompt a line; empty lines are passed over. Default: the evaluation prompts of the
    task."""
    task: Annotated[str | None, arg(metavar="TASK")] = None
    """Whose prompts are taken: LAYOUT:FILE with a layout of docs/tasks.md, reasoning_gym:DATASET, EXPERIMENT[:VARIANT],
    or module:function that returns a task. Default: the run's own."""
    num_prompts: int = 64
    """Prompts, from the start of the file or of the evaluation set."""
    samples_per_prompt: int = 4
    """Responses to each prompt."""
    prompts_per_batch: int = 16
    """Prompts that are sampled at once, over all devices."""
    response_tokens: OptionalCount = None
    """Longest response. Default: the task's; 128 for a file of prompts."""
    precisions: Words = LADDER
    """The sampler's: WEIGHTS[@tensor | @BLOCK][+PART...][/ACTIVATIONS[/KV_CACHE]] each; what is left out is
    bfloat16."""
    temperatures: Numbers = (1.0,)
    """The sampler's."""
    staleness: Counts = (0,)
    """Steps that the sampler's weights are older than the learner's; other than 0 needs a run with those
    checkpoints."""
    learner_temperature: float = 1.0
    """Temperature of the policy that would be trained."""
    learner_dtype: Literal["float32", "bfloat16"] | None = None
    """The learner's compute dtype. Default: the run's; float32 for a published model."""
    mesh: MeshShape = MeshShape()
    """How the devices share the work."""
    seed: int = 0
    """Everything random is a function of it."""
    top_tokens: int = 5
    """Tokens shown of every cell: those on which the two sides disagree most."""
    out: Directory = None
    """Directory for probe.json and probe.png. Default: runs/probe/TIME."""


def run(arguments: Sequence[str]) -> None:
    """Prints a table with what it means, and writes it as JSON and as a heat map."""
    asked = tyro.cli(Arguments, args=list(arguments), prog="p3o probe", description=__doc__)

    from p3o_jax.devices import sharding
    from p3o_jax.devices.cache import enable_compilation_cache
    from p3o_jax.policies import find_checkpoint
    from p3o_jax.probe import Prober
    from p3o_jax.sampler import SamplingLimits
    from p3o_jax.terminal import say

    settings, ages = _settings(asked), sorted(set(asked.staleness))
    newest = find_checkpoint(asked.model)
    _check(asked, ages, is_run=newest is not None)
    enable_compilation_cache()
    mesh = sharding.make_mesh(asked.mesh)
    policy = asked.open(mesh)
    policies = _policies(newest, ages, policy, mesh)
    prompts, limit = _prompts(asked, policy)
    shards = sharding.num_batch_shards(mesh)
    if len(prompts) % shards or asked.prompts_per_batch % shards:
        raise ValueError(
            f"probe: {len(prompts)} prompts, {asked.prompts_per_batch} a batch, do not divide over {shards} devices"
        )
    limits = SamplingLimits(max(len(ids) for _, ids in prompts), limit, policy.tokenizer.eos_ids)
    model = replace(policy.model, dtype=asked.learner_dtype or policy.model.dtype)
    prober = Prober(model, policy.tokenizer, limits, mesh, settings)
    out = asked.out or Path("runs", "probe", time.strftime("%Y-%m-%d_%H-%M-%S"))
    if (out / "probe.json").exists():
        raise FileExistsError(f"{out / 'probe.json'} exists; give another --out")
    out.mkdir(parents=True, exist_ok=True)

    device = mesh.devices.flat[0].device_kind
    say(f"{asked.model} (step {policy.step}), {len(prompts)} prompts x {asked.samples_per_prompt}, on {device}")
    _describe(settings, device)
    about = {"model": asked.model, "step": policy.step, "device": device, "command": ["p3o", "probe", *arguments]}
    found = prober.run(prompts, policy.params, policies, found=partial(_keep, about=about, out=out))
    _show(found, asked, out)


def _settings(asked: Arguments) -> Settings:
    """Reads what is probed.

    Raises:
        ValueError: an unknown format, or an impossible number.
    """
    from p3o_jax.devices.precision import parse
    from p3o_jax.probe import Settings

    return Settings(
        precisions=tuple(dict.fromkeys(map(parse, asked.precisions))),
        temperatures=tuple(dict.fromkeys(asked.temperatures)),
        samples_per_prompt=asked.samples_per_prompt,
        prompts_per_batch=asked.prompts_per_batch,
        learner_temperature=asked.learner_temperature,
        top_tokens=asked.top_tokens,
        seed=asked.seed,
    )


def _check(asked: Arguments, ages: Sequence[int], *, is_run: bool) -> None:
    """Checks what is asked, before anything is loaded.

    Raises:
        ValueError: impossible numbers, or no prompts.
        FileNotFoundError: there is no such file of prompts.
    """
    if ages[0] < 0:
        raise ValueError(f"probe: staleness must be one or more numbers of steps, got {asked.staleness}")
    if asked.num_prompts < 1:
        raise ValueError(f"probe: num_prompts must be at least 1, got {asked.num_prompts}")
    if asked.prompts is not None and asked.task is not None:
        raise ValueError("probe: give --prompts or --task, not both")
    if ages[-1] > 0 and not is_run:
        raise ValueError(
            f"probe: staleness {ages[-1]} needs a run, whose checkpoints are its past; {asked.model} is none"
        )
    if asked.prompts is not None and not asked.prompts.exists():
        raise FileNotFoundError(f"probe: there is no file of prompts {asked.prompts}")
    if not (is_run or asked.model.startswith("random:") or asked.prompts or asked.task):
        raise ValueError(f"probe: {asked.model} has no task of its own; give --prompts FILE or --task TASK")


def _describe(settings: Settings, device: str) -> None:
    """Prints which formats the device computes in, and which are emulated."""
    from p3o_jax.devices.precision import describe

    for precision in settings.precisions:
        products, cache = (line.partition(": ")[2] for line in describe(precision, device))
        print(f"  {precision}: {products}; {cache}")


def _keep(known: Report, *, about: dict[str, Any], out: Path) -> None:
    """Writes what is known so far, and says what is new."""
    from p3o_jax.probe import report
    from p3o_jax.runs.directory import write_atomically

    write_atomically(out / "probe.json", report.to_json(known, about))
    cell = known.cells[-1] if known.cells else known.equal_precision
    floor = "" if known.cells else ", the noise floor"
    print(f"  {report.name(cell)}{floor}: ESS {cell.mismatch.ess:.5f}", file=sys.stderr, flush=True)


def _show(found: Report, asked: Arguments, out: Path) -> None:
    """Prints the table and what it means, and draws it."""
    from p3o_jax.probe import report
    from p3o_jax.terminal import say

    report.heat_map(found, out / "probe.png", f"ESS of {Path(asked.model).name} against its sampler")
    print(f"\n{report.table(found)}\n")
    for line in report.explanation(found):
        print(line)
    for cell in found.cells if asked.top_tokens else ():
        print(f"\n{report.name(cell)}: largest log-ratios")
        for line in report.offenders(cell):
            say(f"  {line}")
    say(f"\nWrote {out / 'probe.json'} and {out / 'probe.png'}")


def _policies(
    newest: Path | None, ages: Sequence[int], policy: LoadedPolicy, mesh: Mesh
) -> dict[int, Callable[[], nnx.State]]:
    """The parameters that are so many steps older than a policy's, each to be loaded when it is called."""
    from p3o_jax.policies import find_checkpoint, load_policy

    def load(name: str) -> nnx.State:
        return load_policy(name, mesh, trusted=policy.trusted).params

    policies: dict[int, Callable[[], nnx.State]] = {}
    for age in ages:
        if age == 0 or newest is None:
            policies[age] = lambda: policy.params
        elif age > policy.step:
            raise ValueError(f"probe: staleness {age} is older than the run, which is at step {policy.step}")
        else:
            older = f"{newest.parents[1]}@{policy.step - age}"
            try:
                find_checkpoint(older)
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"probe: staleness {age}: {error} (a run keeps those it is told to by --save-every and "
                    "--keep-checkpoints)"
                ) from None
            policies[age] = partial(load, older)
    return policies


def _prompts(asked: Arguments, policy: LoadedPolicy) -> tuple[list[tuple[int, list[int]]], int]:
    """Prompts, each with its index (in a file, its line from 0), and the longest response."""
    from p3o_jax.commands.lookup import task_named
    from p3o_jax.experience.prompts import evaluation_prompts
    from p3o_jax.experience.row_checks import Checks, usable
    from p3o_jax.json_lines import read_text_lines

    if asked.prompts is not None:
        texts, limit = [(i, line) for i, line in enumerate(read_text_lines(asked.prompts)) if line.strip()], 128
        if not texts:
            raise ValueError(f"probe: there is no prompt in {asked.prompts}")
    else:
        task = policy.task if asked.task is None else task_named(asked.task)
        task = usable(task, Checks(policy.tokenizer, None, ("evaluation",)))
        texts = [(prompt.index, prompt.text) for prompt in evaluation_prompts(task, asked.num_prompts)]
        limit = task.max_response_tokens
    if asked.response_tokens is not None:
        limit = asked.response_tokens
    prompts, context = [], policy.model.context_tokens
    for i, text in texts[: asked.num_prompts]:
        where = f"line {i + 1} of {asked.prompts}" if asked.prompts else f"prompt {i} of the task"
        try:
            ids = policy.tokenizer.encode(text)
        except ValueError as error:
            raise ValueError(f"probe: {where}: {error}") from None
        if len(ids) + limit > context:
            raise ValueError(
                f"probe: {where} has {len(ids)} tokens: with a response of {limit} more than the model's context of "
                f"{context}; give fewer --response-tokens, or a shorter prompt"
            )
        prompts.append((i, ids))
    return prompts, limit
