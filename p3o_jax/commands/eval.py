"""Any policy on any task: pass@k, majority vote, and every completion."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from p3o_jax.commands.trust import Trust, trusting
from p3o_jax.devices.sharding import MeshShape
from p3o_jax.tasks.faults import UnusableRows
from p3o_jax.terminal import say


@dataclass(frozen=True)
class Arguments:
    """What to evaluate, and how."""

    policy: tyro.conf.Positional[str]
    """A run directory (its newest checkpoint, or RUN@STEP), a directory in Hugging Face format, a .gguf file, or
    smollm2-135m."""
    task: tuple[str, ...] = ()
    """LAYOUT:FILE with a layout of docs/tasks.md (gsm8k:test.jsonl, math500:test.jsonl, aime:*.parquet, ...),
    reasoning_gym:DATASET, or module:function that returns a task; several of them. Default: the run's own."""
    prompts: int | None = None
    """Prompts of each task. Default: all of a file, 256 of a procedural task."""
    samples: int = 4
    """Completions of each prompt: pass@1, pass@2, ... pass@SAMPLES, majority@SAMPLES, each with its standard error over
    prompts. 0: none."""
    greedy: bool = False
    """Judge the most likely completion of each prompt too."""
    temperature: float = 1.0
    """Logits are divided by it."""
    top_k: int | None = None
    """Only the so many most likely tokens."""
    top_p: float = 1.0
    """Only the smallest set of most likely tokens that has this mass."""
    min_p: float = 0.0
    """Only tokens at least so many times as likely as the most likely one."""
    response_tokens: int | None = None
    """Longest completion. Default: the task's."""
    batch: int = 32
    """Prompts sampled at a time, over all devices."""
    precision: str | None = None
    """WEIGHTS[/ACTIVATIONS[/KV_CACHE]]; what is left out is bfloat16. Default: float32 on a CPU, else bfloat16."""
    chat: bool = True
    """Of a published model: put the prompts into its chat template, if it has one."""
    system_prompt: str | None = None
    """Of a published model: what the system says first."""
    verifier_timeout_seconds: float = 5.0
    """A verifier that takes longer is killed, and its completion counted as failed."""
    unusable_rows: UnusableRows | None = None
    """What becomes of rows whose text the tokenizer refuses, or whose answer the reward cannot judge: refuse to
    evaluate, or leave_out such rows. Default: as the task says, which refuses if it is not told otherwise."""
    mesh: Annotated[MeshShape, tyro.conf.arg(name="mesh")] = field(default_factory=MeshShape)
    """Which devices work."""
    seed: int = 0
    """The completions are a function of it."""
    output: Path | None = None
    """Directory for NAME.json, NAME.jsonl and NAME.md. Default: runs/eval/POLICY/TIME."""
    trust: Trust = ()
    """A module that a run's config.json may name, besides p3o_jax's own: it is imported, and so run. Repeatable."""


def run(arguments: Sequence[str]) -> None:
    """Evaluates on each task, prints the results and writes them with every completion."""
    asked = tyro.cli(Arguments, args=list(arguments), prog="p3o eval", description=__doc__)

    import jax

    from p3o_jax.devices import sharding
    from p3o_jax.devices.cache import enable_compilation_cache
    from p3o_jax.devices.precision import parse
    from p3o_jax.evaluation.evaluate import evaluate
    from p3o_jax.evaluation.files import readable, write_evaluation
    from p3o_jax.experience.prompts import encoded, evaluation_sets_of
    from p3o_jax.experience.row_checks import Checks, usable
    from p3o_jax.experience.scoring import Scorer
    from p3o_jax.policies import load_policy
    from p3o_jax.rewards.pool import Verifiers
    from p3o_jax.sampler import Sampler, Sampling, SamplingLimits
    from p3o_jax.sampler.sampling import check_seed
    from p3o_jax.tasks.specification import task_of

    if asked.samples < 0 or (asked.samples == 0 and not asked.greedy):
        raise ValueError(f"eval: samples={asked.samples}: give at least 1, or 0 with --greedy")
    if asked.batch < 1 or (asked.prompts is not None and asked.prompts < 1):
        raise ValueError(f"eval: batch={asked.batch} and prompts={asked.prompts} must be at least 1")
    check_seed(asked.seed)
    sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.min_p)
    if asked.output is not None and any(asked.output.glob("*.json")):
        raise FileExistsError(f"{asked.output} has results: give another --output")
    verifiers = Verifiers(timeout_seconds=asked.verifier_timeout_seconds)
    precision = parse(asked.precision or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    tasks = [task_of(specification) for specification in asked.task]
    mesh = sharding.make_mesh(asked.mesh)
    batch = -(-asked.batch // sharding.num_batch_shards(mesh)) * sharding.num_batch_shards(mesh)
    enable_compilation_cache()
    policy = load_policy(
        asked.policy, mesh, chat=asked.chat, system_prompt=asked.system_prompt, trusted=trusting(asked.trust)
    )
    if not tasks and policy.origin is None:
        raise ValueError(f"eval: {asked.policy} is no run, which would have a task of its own: give --task")
    checks = Checks(policy.tokenizer, verifiers, ("evaluation",), unusable_rows=asked.unusable_rows)
    tasks = [usable(task, checks) for task in tasks or [policy.task]]
    components = [one for task in tasks for one in task.components]
    name = Path(asked.policy).name.replace("@", "_step_")
    output = asked.output or Path("runs", "eval", name, time.strftime("%Y-%m-%d_%H-%M-%S"))
    sets = [encoded(prompts, policy.tokenizer) for task in tasks for prompts in evaluation_sets_of(task, asked.prompts)]
    prompt_tokens = max(len(ids) for prompts in sets for _, ids in prompts)  # one program serves all tasks
    samplers: dict[int, Sampler] = {}
    for task, prompts in zip(components, sets, strict=True):
        response_tokens = asked.response_tokens or task.max_response_tokens
        if response_tokens not in samplers:
            limits = SamplingLimits(prompt_tokens, response_tokens, policy.tokenizer.eos_ids)
            samplers[response_tokens] = Sampler(policy.model, policy.tokenizer.vocab_size, limits, precision, mesh)
            weights = samplers[response_tokens].publish(policy.params, policy.step)
        sampler = samplers[response_tokens]
        with Scorer(task, policy.tokenizer, verifiers) as scorer:
            result = evaluate(
                sampler,
                weights,
                scorer,
                prompts,
                key=jax.random.key(asked.seed),
                num_samples=asked.samples,
                sampling=sampling,
                greedy=asked.greedy,
                prompts_per_batch=batch,
                keep_completions=True,
            )
        settings = {
            "policy": asked.policy,
            "step": policy.step,
            "samples": asked.samples,
            **asdict(sampling),
            "response_tokens": response_tokens,
            "precision": asdict(precision),
            "chat": asked.chat,
            "system_prompt": asked.system_prompt,
            "seed": asked.seed,
        }
        write_evaluation(output, task.name, result.metrics, result.completions, settings)
        say(task.name)
        for tag, value in readable(result.metrics):
            say(f"  {tag:22} {value}")
    say(f"{output}: results (.json), completions (.jsonl) and a table of some (.md)")
