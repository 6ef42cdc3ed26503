"""`p3o compile`: the real update and the real sampler, compiled for a TPU topology that need not be there.

Nothing is allocated: shapes go in, and out come the bytes each device needs and the collectives it runs. XLA itself
refuses a program that does not fit; its first line is then the report.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from p3o_jax.batch.keys import Purpose, run_key
from p3o_jax.batch.types import Batch, Rollout
from p3o_jax.config import Config
from p3o_jax.devices import hlo, sharding
from p3o_jax.devices.chips import CHIPS, Chip
from p3o_jax.experience.batches import make_batch
from p3o_jax.json_lines import first_line
from p3o_jax.models import lora
from p3o_jax.models.flops import forward_flops, update_flops
from p3o_jax.parts import Parts, build
from p3o_jax.sampler import Requests, Sampler
from p3o_jax.sampler.decode import Options

GIB = 2**30


def topology(name: str, num_slices: int = 1) -> list[jax.Device]:
    """The devices of a topology such as v5p:4x4x4, described rather than present.

    Raises:
        ValueError: libtpu is not installed, or knows no such topology.
    """
    from jax.experimental import topologies

    # This machine is not one of a pod, several may describe at once, and what libtpu misses here does not matter.
    quiet = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_MIN_LOG_LEVEL": "3"}
    hosts = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_ID": "0"}
    for variable, value in (quiet | hosts).items():
        os.environ.setdefault(variable, value)
    options = {"num_slices": num_slices} if num_slices > 1 else {}
    try:
        return list(topologies.get_topology_desc(name, "tpu", **options).devices)
    except Exception as error:  # of several types, by version
        reason = first_line(error)
        raise ValueError(f"no topology {name!r}: {reason} (libtpu comes with pip install 'p3o_jax[tpu]')") from error


def _sampler(parts: Parts) -> Sampler:
    """Narrows the engine to the one that is compiled here."""
    assert isinstance(parts.engine, Sampler)
    return parts.engine


def abstract_sampler_arguments(parts: Parts) -> tuple[tuple, dict[str, Any]]:
    """What a rollout step hands to the compiled sampler, as shapes."""
    config = parts.config
    longest = [0] * config.task.max_prompt_tokens
    key = run_key(config.seed, Purpose.TRAIN)
    sampler = _sampler(parts)
    request, truncation = sampler.padded(Requests([longest], [0], key, sampling=config.sampling))
    requests = _rows(request, config.prompts_per_step, sampler.mesh)
    options = Options(config.samples_per_prompt, False, truncation, parts.plan.sampler_support)
    arguments = (sampler.abstract_weights(), requests, jax.eval_shape(lambda: key))
    return arguments, {"options": options}


def abstract_batch(parts: Parts) -> Batch:
    """What the learner is given in an update, as shapes: rows of full length, the most there can be."""
    config, learner = parts.config, parts.learner
    arguments, options = abstract_sampler_arguments(parts)
    rollout: Rollout = jax.eval_shape(lambda *arrays: _sampler(parts).program(*arrays, **options), *arguments)
    one_row = jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape[1:]), leaf.dtype), rollout)
    batch = make_batch(one_row, np.zeros(1, np.float32), learner_temperature=config.learner_temperature, step=0)
    batch = _rows(batch, config.prompts_per_step // config.minibatches * config.samples_per_prompt, parts.mesh)
    if parts.plan.snapshot_pass is not None:
        snapshot = jax.eval_shape(learner.snapshot, learner.abstract_state().params, batch)
        batch = _rows(snapshot, batch.mask.shape[0], parts.mesh)
    return batch


def _rows(tree: Any, count: int, mesh: Mesh) -> Any:
    place = NamedSharding(mesh, sharding.batch_spec(mesh))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype, sharding=place), tree)


def device_bytes(tree: Any) -> int:
    """What a tree of abstract arrays takes on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding is not None
    )


Program = Literal["update", "sampler"]


def report(
    config: Config, devices: Sequence[jax.Device], programs: Sequence[Program] = get_args(Program)
) -> Iterator[str]:
    """Lines about the update and the sampler of a run on these devices, as they are compiled.

    Args:
        config: the run.
        devices: what it would run on.
        programs: which of the two are compiled.

    Raises:
        ValueError: the configuration does not fit the devices.
    """
    parts = build(config, devices, check_rows=False)
    chip = CHIPS.get(devices[0].device_kind)
    memory = f"{chip.memory_gib:g} GiB each" if chip else "memory unknown"
    shape = " x ".join(f"{axis} {size}" for axis, size in parts.mesh.shape.items() if size > 1) or "one device"
    yield f"{len(devices)} devices, {devices[0].device_kind} ({memory}): {shape}"

    state, batch = parts.learner.abstract_state(), abstract_batch(parts)
    remembered = (config.staleness + 1) * device_bytes(_sampler(parts).abstract_weights())
    if parts.plan.keeps_params:
        remembered += (config.staleness + 1) * device_bytes(lora.split(state.params)[0])
    if "update" in programs:
        rows, tokens = batch.mask.shape
        yield ""
        yield f"update: {rows} rows x {tokens} tokens, {config.micro_batches} micro-batches"
        yield from _update_flops(parts, rows, tokens, parts.mesh.size, chip)
        yield from _compiled(lambda: parts.learner.update.lower(state, batch), remembered, "sampler weights", chip)
    if "sampler" not in programs:
        return

    arguments, options = abstract_sampler_arguments(parts)
    num_rows = config.prompts_per_step * config.samples_per_prompt
    task = config.task
    yield ""
    yield f"sampler: {num_rows} rows, prompts of {task.max_prompt_tokens} and responses of {task.max_response_tokens}"
    yield from _sampler_flops(parts, num_rows, parts.engine.mesh.size)
    yield f"  weights a device, {config.precision}: {_gib(device_bytes(_sampler(parts).abstract_weights())).strip()}"
    others = device_bytes(state) + remembered - device_bytes(_sampler(parts).abstract_weights())
    yield from _compiled(lambda: _sampler(parts).program.lower(*arguments, **options), others, "learner", chip)


def _update_flops(parts: Parts, rows: int, tokens: int, num_devices: int, chip: Chip | None) -> Iterator[str]:
    config = parts.config
    extra = int(parts.plan.first_look)
    flops = update_flops(config.model, parts.tokenizer.vocab_size, rows, tokens, extra_passes=extra)
    yield (
        f"  FLOPs a device: {_tera(flops.total / num_devices)} = model {_tera(flops.model / num_devices)} "
        f"+ recomputed {_tera(flops.recomputed / num_devices)} + statistics {_tera(flops.extra_passes / num_devices)}"
    )
    if chip:
        yield f"  at the chip's peak: {flops.total / num_devices / chip.peak_flops:.2f} s"


def _sampler_flops(parts: Parts, rows: int, num_devices: int) -> Iterator[str]:
    config = parts.config
    tokens = config.task.max_prompt_tokens + config.task.max_response_tokens
    flops = forward_flops(config.model, parts.tokenizer.vocab_size, rows, tokens)
    yield f"  FLOPs a device, of rows of full length: {_tera(flops.total / num_devices)}"


def _compiled(lower: Callable, others: int, what: str, chip: Chip | None) -> Iterator[str]:
    """Memory and collectives of a program; `others` are bytes that are held besides."""
    started = time.perf_counter()
    try:
        compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        yield f"  does not fit: {next(line for line in str(error).splitlines() if line)}"
        return
    stats = compiled.memory_analysis()
    arguments = stats.argument_size_in_bytes
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    rest = stats.temp_size_in_bytes + stats.generated_code_size_in_bytes
    total = arguments + results + rest + others
    yield f"  compiled in {time.perf_counter() - started:.0f} s; bytes a device:"
    yield f"    arguments    {_gib(arguments)}"
    yield f"    new results  {_gib(results)}"
    yield f"    temporary    {_gib(rest)}"
    yield f"    held besides {_gib(others)}  ({what})"
    of_chip = f"  {total / GIB / chip.memory_gib:.0%} of {chip.memory_gib:g} GiB" if chip else ""
    yield f"    total        {_gib(total)}{of_chip}"
    if chip and total > chip.memory_gib * GIB:
        yield "  does not fit"
    yield "  collectives of a device, in one run:"
    found = sorted(hlo.collectives(compiled.as_text()), key=lambda each: each.kind)
    for kind, group in groupby(found, key=lambda each: each.kind):
        each = list(group)
        runs = sum(one.executions for one in each)
        size = sum(one.executions * one.size_bytes for one in each)
        yield f"    {kind:<18} {len(each):3} in the program, run {runs:5} times, {size / 1e9:9.3f} GB"


def _gib(size: float) -> str:
    return f"{size / GIB:8.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:8.2f} MiB"


def _tera(flops: float) -> str:
    return f"{flops / 1e12:.4g} T"
