"""How far a quantised, tempered or stale sampler is from the policy that would be trained, in ESS and KL."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from p3o_jax.sharding import MeshShape

if TYPE_CHECKING:
    from p3o_jax.policies import Policy

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


@dataclass(frozen=True)
class Arguments:
    """What to probe."""

    model: tyro.conf.Positional[str]
    """A run directory (its newest checkpoint, or RUN@STEP), a directory in Hugging Face format, a .gguf file,
    smollm2-135m, or random:EXPERIMENT[:VARIANT] for that experiment's model as it is initialised."""
    prompts: Path | None = None
    """A text file with a prompt a line. Default: the evaluation prompts of the task."""
    task: str | None = None
    """EXPERIMENT[:VARIANT] whose task the prompts are of. Default: the run's own."""
    num_prompts: int = 64
    """Prompts, from the start of the file or of the evaluation set."""
    response_tokens: int | None = None
    """Longest response. Default: the task's; 128 for a file of prompts."""
    precisions: tuple[str, ...] = LADDER
    """WEIGHTS[@tensor | @BLOCK][+PART...][/ACTIVATIONS[/KV_CACHE]] each; what is left out is bfloat16."""
    temperatures: tuple[float, ...] = (1.0,)
    """The sampler's."""
    staleness: tuple[int, ...] = (0,)
    """Steps that the sampler's weights are older than the learner's; needs a run with those checkpoints."""
    learner_temperature: float = 1.0
    """Temperature of the policy that would be trained."""
    learner_dtype: Literal["float32", "bfloat16"] | None = None
    """The learner's compute dtype. Default: the run's; float32 for a published model."""
    samples_per_prompt: int = 4
    """Responses to each prompt."""
    prompts_per_batch: int = 16
    """Prompts that are sampled at once."""
    chat: bool = True
    """Of a published model: put prompts into its chat template, if it has one."""
    system_prompt: str | None = None
    """Of a published model: what the system says first."""
    mesh: MeshShape = MeshShape()
    """How the devices share the work."""
    seed: int = 0
    """Everything random is a function of it."""
    top_tokens: int = 5
    """Tokens shown of every cell: those on which the two sides disagree most."""
    out: Path | None = None
    """Directory for probe.json and probe.png. Default: runs/probe/TIME."""


def run(arguments: Sequence[str]) -> None:
    """Prints a table with what it means, and writes it as JSON and as a heat map."""
    asked = tyro.cli(Arguments, args=list(arguments), prog="p3o probe", description=__doc__)

    from p3o_jax import probe, probe_report, sharding
    from p3o_jax.cli import open_policy
    from p3o_jax.compilation_cache import enable_compilation_cache
    from p3o_jax.policies import find_checkpoint, load_policy
    from p3o_jax.precision import describe, parse
    from p3o_jax.sampler import SamplingLimits

    settings = probe.Settings(
        precisions=tuple(parse(text) for text in dict.fromkeys(asked.precisions)),
        temperatures=tuple(dict.fromkeys(asked.temperatures)),
        samples_per_prompt=asked.samples_per_prompt,
        prompts_per_batch=asked.prompts_per_batch,
        learner_temperature=asked.learner_temperature,
        top_tokens=asked.top_tokens,
        seed=asked.seed,
    )
    if min(asked.staleness, default=0) < 0 or asked.num_prompts < 1:
        raise ValueError(f"probe: staleness {asked.staleness} and num_prompts={asked.num_prompts} must not be negative")
    enable_compilation_cache()
    mesh = sharding.make_mesh(asked.mesh)
    newest = find_checkpoint(asked.model)
    policy = open_policy(asked.model, mesh, chat=asked.chat, system_prompt=asked.system_prompt)
    ages = sorted(set(asked.staleness) - {0})
    if ages and newest is None:
        raise ValueError(f"probe: staleness {ages} needs a run, whose checkpoints are its past; {asked.model} is none")
    older = {age: f"{newest.parents[1]}@{policy.step - age}" for age in ages} if newest else {}
    for age, name in older.items():
        if age > policy.step or find_checkpoint(name) is None:
            raise ValueError(f"probe: staleness {age} is older than the run, which is at step {policy.step}")

    texts, limit = _prompts(asked, policy)
    prompts = [(i, policy.tokenizer.encode(text)) for i, text in texts]
    shards = sharding.num_batch_shards(mesh)
    if len(prompts) % shards or asked.prompts_per_batch % shards:
        raise ValueError(
            f"probe: {len(prompts)} prompts, {asked.prompts_per_batch} a batch, do not divide over {shards} devices"
        )
    limits = SamplingLimits(max(len(ids) for _, ids in prompts), limit, policy.tokenizer.eos_ids)
    model = replace(policy.model, dtype=asked.learner_dtype or policy.model.dtype)
    prober = probe.Prober(model, policy.tokenizer, limits, mesh, settings)
    out = asked.out or Path("runs", "probe", time.strftime("%Y-%m-%d_%H-%M-%S"))
    if (out / "probe.json").exists():
        raise FileExistsError(f"{out / 'probe.json'} exists; give another --out")
    out.mkdir(parents=True, exist_ok=True)

    device = mesh.devices.flat[0].device_kind
    print(f"{asked.model} (step {policy.step}), {len(prompts)} prompts x {asked.samples_per_prompt}, on {device}")
    for precision in settings.precisions:
        products, cache = (line.partition(": ")[2] for line in describe(precision, device))
        print(f"  {precision}: {products}; {cache}")

    def say(cell: probe.Cell) -> None:
        print(f"  {probe_report.name(cell)}: ESS {cell.mismatch.ess:.5f}", file=sys.stderr, flush=True)

    past = [(age, lambda name=name: load_policy(name, mesh).params) for age, name in older.items()]
    report = prober.run(prompts, policy.params, past, found=say)

    print(f"\n{probe_report.table(report)}\n")
    for line in probe_report.explanation(report):
        print(line)
    for cell in report.cells:
        print(f"\n{probe_report.name(cell)}: largest log-ratios")
        for line in probe_report.offenders(cell):
            print(f"  {line}")
    about = {"model": asked.model, "step": policy.step, "device": device, "command": ["p3o", "probe", *arguments]}
    (out / "probe.json").write_text(probe_report.to_json(report, about))
    probe_report.heat_map(report, out / "probe.png", f"ESS of {Path(asked.model).name} against its sampler")
    print(f"\nWrote {out / 'probe.json'} and {out / 'probe.png'}")


def _prompts(asked: Arguments, policy: Policy) -> tuple[list[tuple[int, str]], int]:
    """Prompts with their index, and the longest response."""
    from p3o_jax.cli import configuration
    from p3o_jax.prompts import evaluation_prompts

    if asked.prompts is not None:
        lines = enumerate(asked.prompts.read_text(encoding="utf-8").splitlines())
        texts, limit = [(i, line) for i, line in lines if line.strip()], 128
        if not texts:
            raise ValueError(f"probe: there is no prompt in {asked.prompts}")
    elif asked.task is None and policy.config is None:
        raise ValueError(f"probe: {asked.model} has no task of its own; give --prompts FILE or --task EXPERIMENT")
    else:
        task = policy.config.task if asked.task is None else configuration(asked.task).task
        texts = [(prompt.index, prompt.text) for prompt in evaluation_prompts(task, asked.num_prompts)]
        limit = task.max_response_tokens
    return texts[: asked.num_prompts], limit if asked.response_tokens is None else asked.response_tokens
