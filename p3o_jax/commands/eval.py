"""Any policy on any task: pass@k, majority vote, and every completion."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from p3o_jax.devices.sharding import MeshShape


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
    mesh: Annotated[MeshShape, tyro.conf.arg(name="mesh")] = field(default_factory=MeshShape)
    """Which devices work."""
    seed: int = 0
    """The completions are a function of it."""
    output: Path | None = None
    """Directory for NAME.json, NAME.jsonl and NAME.md. Default: runs/eval/POLICY/TIME."""


def run(arguments: Sequence[str]) -> None:
    """Evaluates on each task, prints the results and writes them with every completion."""
    asked = tyro.cli(Arguments, args=list(arguments), prog="p3o eval", description=__doc__)

    import jax

    from p3o_jax.devices import sharding
    from p3o_jax.devices.cache import enable_compilation_cache
    from p3o_jax.devices.precision import parse
    from p3o_jax.evaluation.evaluate import evaluate
    from p3o_jax.evaluation.files import readable, write_evaluation
    from p3o_jax.experience.prompts import evaluation_set, longest
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
    policy = load_policy(asked.policy, mesh, chat=asked.chat, system_prompt=asked.system_prompt)
    if not tasks and policy.config is None:
        raise ValueError(f"eval: {asked.policy} is no run, which would have a task of its own: give --task")
    components = [one for task in tasks or [policy.config.task] for one in task.components]
    name = Path(asked.policy).name.replace("@", "_step_")
    output = asked.output or Path("runs", "eval", name, time.strftime("%Y-%m-%d_%H-%M-%S"))
    sets = [evaluation_set(task, asked.prompts) for task in components]
    prompt_tokens = max(longest(prompts, policy.tokenizer) for prompts in sets)  # one program serves all tasks
    samplers: dict[int, Sampler] = {}
    for task, prompts in zip(components, sets, strict=True):
        response_tokens = asked.response_tokens or task.max_response_tokens
        if response_tokens not in samplers:
            limits = SamplingLimits(prompt_tokens, response_tokens, policy.tokenizer.eos_ids)
            samplers[response_tokens] = Sampler(policy.model, policy.tokenizer.vocab_size, limits, precision, mesh)
            weights = samplers[response_tokens].synchronise(policy.params, policy.step)
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
        print(task.name)
        for tag, value in readable(result.metrics):
            print(f"  {tag:22} {value}", flush=True)
    print(f"{output}: results (.json), completions (.jsonl) and a table of some (.md)")
