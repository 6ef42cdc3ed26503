"""`p3o compile`: programs that are compiled and not run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.quickstart import p3o
from experiments.shapes import VARIANTS
from p3o_jax.commands import main as tool
from p3o_jax.devices.sharding import MeshShape
from p3o_jax.experience.batches import make_batch
from p3o_jax.forecast.programs import abstract_batch, device_bytes, report
from p3o_jax.objectives import P4O
from p3o_jax.parts import build
from p3o_jax.runs.stopwatch import Stopwatch

SMALL = replace(
    p3o(),
    model=replace(p3o().model, num_layers=3, embed_dim=16, mlp_dim=32, num_heads=2, num_kv_heads=2, head_dim=8),
    mesh=MeshShape(data=2, fsdp=4),
    prompts_per_step=16,
    samples_per_prompt=2,
    minibatches=2,
    warm_start=None,
)


@pytest.mark.slow
def test_a_report_is_of_the_programs_that_run():
    lines = list(report(SMALL, jax.devices()))
    assert lines[0].startswith("8 devices, cpu") and lines[0].endswith("data 2 x fsdp 4")
    assert "update: 16 rows x 21 tokens, 1 micro-batches" in lines
    assert "sampler: 32 rows, prompts of 11 and responses of 11" in lines
    kinds = [line.split()[0] for line in lines if "in the program" in line]
    assert {"all-gather", "all-reduce", "reduce-scatter"} <= set(kinds)
    assert sum(line.startswith("  collectives") for line in lines) == 2
    assert sum(line.startswith("  weights a device, float32/float32/float32: ") for line in lines) == 1


def test_the_batch_is_the_one_that_a_run_makes():
    parts = build(SMALL, jax.devices())
    _, state, ring, _ = parts.start()
    rollout = parts.source(0).next(1, ring.behaviour.weights, Stopwatch(1, "sample"), lambda: None).rollout
    ones = np.ones(len(rollout.tokens), np.float32)
    batch = make_batch(rollout, ones, learner_temperature=SMALL.learner_temperature, step=0)
    real = jax.tree.map(lambda leaf: (leaf.shape[1:], leaf.dtype, leaf.sharding), parts.updates.minibatches(batch)[0])
    described = jax.tree.map(lambda leaf: (leaf.shape[1:], leaf.dtype, leaf.sharding), abstract_batch(parts))
    assert described._replace(segment_ids=None) == real._replace(segment_ids=None)
    assert device_bytes(parts.learner.abstract_state()) == sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)
    )


def test_an_objective_that_needs_a_snapshot_gets_one():
    config = replace(SMALL, objective=P4O(), minibatches=2)
    batch = abstract_batch(build(config, jax.devices()))
    assert batch.proximal_log_probs.shape == batch.mask.shape


def test_published_shapes():
    """Parameters as published: 4.02 and 1.54 billion."""
    from p3o_jax.models.transformer import abstract_model

    for variant, millions in (("qwen3_4b", 4022), ("qwen2_5_1_5b", 1544)):
        config = VARIANTS[variant]
        _, state = abstract_model(config.model, config.task.tokenizer.vocab_size)
        assert sum(leaf.size for leaf in jax.tree.leaves(state)) // 10**6 in (millions, millions - 1), variant
        tokens = config.task.max_prompt_tokens + config.task.max_response_tokens - 1
        rows = config.prompts_per_step // config.minibatches * config.samples_per_prompt
        assert (rows, tokens) == ({"qwen3_4b": 256, "qwen2_5_1_5b": 64}[variant], 4096)


def p3o_command(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "p3o_jax.commands.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["paint"], "unknown verb 'paint'"),
        (["compile", "nothing", "--topology", "v5e:2x2"], "no experiment 'nothing': looked for"),
        (["compile", "--mesh.fsdp", "2", "quickstart", "--topology", "v5e:2x2"], "EXPERIMENT comes before --mesh.fsdp"),
        (["compile", "quickstart", "ppo", "--topology", "v5e:2x2"], "unknown variant 'ppo'"),
    ],
)
def test_mistakes_end_with_one_line(arguments, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["p3o", *arguments])
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code.startswith("error: ") and message in ended.value.code


def test_a_topology_that_does_not_exist_is_said_so():
    result = p3o_command("compile", "quickstart", "p3o", "--topology", "v5e:nonsense")
    assert result.returncode == 1
    assert "no topology 'v5e:nonsense'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu")
def test_a_small_topology_compiles():
    result = p3o_command("compile", "quickstart", "p3o", "--topology", "v5e:2x2", "--mesh.fsdp", "2")
    assert result.returncode == 0, result.stderr
    assert "4 devices, TPU v5 lite (16 GiB each): data 2 x fsdp 2" in result.stdout
    assert result.stdout.count("total") == 2 and "does not fit" not in result.stdout
    assert "reduce-scatter" in result.stdout or "all-reduce" in result.stdout


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu")
def test_the_weights_of_a_compiled_sampler_take_what_their_format_promises():
    """Two layers of Qwen3-4B's widths in int8, shared by four devices, compiled for TPUs that are not there. In it the
    layers' products take a byte a number and four a scale, the rest two a number."""
    from experiments.shapes import QWEN3_4B
    from p3o_jax.devices.precision import parse
    from p3o_jax.devices.sharding import batch_spec, make_mesh
    from p3o_jax.forecast.programs import topology
    from p3o_jax.sampler import AS_THEY_ARE, Sampler, SamplingLimits
    from p3o_jax.sampler.decode import Options
    from p3o_jax.sampler.sampling import NOTHING_CUT

    c, vocabulary, shared = replace(QWEN3_4B, num_layers=2), 1024, 4
    mesh = make_mesh(MeshShape(tensor=shared), topology("v5e:2x2"))
    sampler = Sampler(c, vocabulary, SamplingLimits(64, 64, (0,)), parse("int8/int8/int8"), mesh)
    request, _ = sampler.requests([[1] * 64], [0], AS_THEY_ARE)
    place = jax.sharding.NamedSharding(mesh, batch_spec(mesh))
    requests = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((8, *leaf.shape[1:]), leaf.dtype, sharding=place), request
    )
    options = Options(4, False, NOTHING_CUT, None)
    key = jax.eval_shape(jax.random.key, 0)
    compiled = sampler.program.lower(sampler.abstract_weights(), requests, key, options=options).compile()

    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    products = c.embed_dim * (2 * heads + 2 * kv_heads + 3 * c.mlp_dim)
    scales = 4 * (heads + 2 * kv_heads + 2 * c.mlp_dim) // shared + 4 * 2 * c.embed_dim  # outputs; the last are whole
    norms = 2 * (2 * c.embed_dim + 2 * c.head_dim)
    promised = 2 * (products // shared + scales + norms) + 2 * (vocabulary // shared + 1) * c.embed_dim
    assert device_bytes(sampler.abstract_weights().params) == promised
    assert promised <= compiled.memory_analysis().argument_size_in_bytes <= 1.01 * promised
