"""Tokens a second of the sampler: by batch and length, with and without refill, and what a user would otherwise take.

    python -m experiments.benchmarks.sampler [--tunix PYTHON] [--torch PYTHON] [--rounds 9]

PYTHON is that of an environment with google-tunix==0.1.7 and jax==0.10.2, or with torch and transformers; from the
repository root. Those that are compared take turns, and figures are medians over the rounds.

Nine rounds (three after the first table) on two cores with nothing else on them, in 7 minutes:

    16 rows of 64 + 64 tokens
      p3o_jax                                 4002 tokens/s
      Tunix 0.1.7                             2682 tokens/s   p3o_jax samples 1.55 times as many
      Hugging Face generate, one thread       1549 tokens/s   p3o_jax samples 2.56 times as many
    128 rows of log-normal length (mean 103, longest 474 tokens)
      batches of 16                            764 tokens/s
      16 slots, refilled                      1843 tokens/s
      all 128 rows at once                     296 tokens/s
      refilled / batches                      2.36
    prefill and decode, tokens/s
        1 rows of   64 +   64: prefill    5165, decode   1087
       16 rows of   64 +   64: prefill   13456, decode   5441
       64 rows of   64 +   64: prefill   15262, decode   5860
       16 rows of  512 +   64: prefill    7010, decode   1723
       16 rows of   64 +  512: prefill   11841, decode   1973
    bytes a decoded token moves, by the compiled program, against weights and cache read once
       16 rows,  128 slots:   1.95 MB, least   1.54 MB: 1.26
       16 rows,  256 slots:   2.62 MB, least   2.06 MB: 1.27
       64 rows,  128 slots:   1.16 MB, least   0.78 MB: 1.49

Two hours before, with a pass more over the logits, the ratios were 1.45, 2.40 and 2.38; under a load of 12 to 24, at a
third of the speed, 1.49, 2.42 and 2.77.

Tunix and Hugging Face draw from the whole vocabulary at temperature 1 as we do; Tunix gives log-probs too, Hugging Face
does not. What refilling saves is waiting: a batch takes as many steps as its longest row. All rows at once take the
longest row's number of steps, too, of 128 rows each, and a CPU computes also the rows that have ended; on an
accelerator, where a step of 128 rows costs little more than one of 16, they would fare better, for 8 times the cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.benchmarks import shape
from experiments.benchmarks.learner import MODEL, served_step
from p3o_jax.devices.precision import Precision
from p3o_jax.devices.sharding import make_mesh
from p3o_jax.models.kv_cache import KVCache, num_bytes
from p3o_jax.models.transformer import Transformer, abstract_model
from p3o_jax.sampler import AS_THEY_ARE, Requests, Sampler, SamplingLimits
from p3o_jax.sampler.decode import model_logits
from p3o_jax.sampler.sampling import RowSampling, draw, sampled_log_probs

WIDE = replace(MODEL, context_tokens=1 << 16)


def our_step(
    rows: int, prompt: int, response: int, *, limits: list[int] | None = None, slots: int | None = None
) -> Callable[..., None]:
    """Rows sampled on one device, each up to its limit, compiled."""
    mesh = make_mesh(devices=jax.devices()[:1])
    settings = SamplingLimits(prompt, response, eos_ids=(), slots=slots)
    sampler = Sampler(WIDE, shape.VOCABULARY, settings, Precision(), mesh)
    weights = sampler.publish(nnx.state(Transformer(WIDE, shape.VOCABULARY, nnx.Rngs(0))))
    prompts = np.random.default_rng(0).integers(shape.VOCABULARY, size=(rows, prompt)).tolist()

    def step(limits: list[int] | None = limits) -> None:
        rollout = sampler.generate(weights, Requests(prompts, range(rows), jax.random.key(0), response_limits=limits))
        jax.block_until_ready(rollout)

    step()
    return step


def medians(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, taking turns."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            found[name].append(measure())
    return found


def ratio(times: Mapping[str, list[float]], one: str, other: str) -> float:
    """How much longer `one` takes: the median over rounds, in each of which both met the same machine."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def timed(step: Callable[[], None], repetitions: int = 1) -> Callable[[], float]:
    """A measurement of it."""
    return lambda: shape.seconds(step, repetitions)


def compare(tunix: str | None, torch: str | None, rounds: int) -> None:
    """The same batch by us and by others."""
    ours = "p3o_jax"
    measures = {ours: timed(our_step(shape.ROWS, shape.PROMPT, shape.RESPONSE), 3)}
    if tunix:
        measures["Tunix 0.1.7"] = served_step(tunix, "experiments.benchmarks.tunix_sample")
    if torch:
        measures["Hugging Face generate, one thread"] = served_step(torch, "experiments.benchmarks.torch_sample")
    times = medians(measures, rounds)
    print(f"{shape.ROWS} rows of {shape.PROMPT} + {shape.RESPONSE} tokens, {rounds} rounds")
    for name, of_name in times.items():
        tokens = shape.ROWS * shape.RESPONSE / statistics.median(of_name)
        more = "" if name == ours else f"   p3o_jax samples {ratio(times, name, ours):.2f} times as many"
        print(f"  {name:<36} {tokens:7.0f} tokens/s{more}")


def by_batch_and_length(rounds: int) -> None:
    """Prefill and decoding apart: what a call takes with a response of 1 token, and what more with a longer one."""
    print("prefill and decode, tokens/s")
    for rows, prompt, response in ((1, 64, 64), (16, 64, 64), (64, 64, 64), (16, 512, 64), (16, 64, 512)):
        steps = {"prefill": our_step(rows, prompt, 1), "both": our_step(rows, prompt, response)}
        times = medians({name: timed(step) for name, step in steps.items()}, rounds)
        prefill = statistics.median(times["prefill"])
        decode = statistics.median(b - a for a, b in zip(times["prefill"], times["both"], strict=True))
        print(
            f"  {rows:3} rows of {prompt:4} + {response:4}: prefill {rows * prompt / prefill:7.0f}, "
            f"decode {rows * (response - 1) / decode:6.0f}"
        )


def with_refill(rounds: int, rows: int = 128, slots: int = 16, prompt: int = 16, longest: int = 512) -> None:
    """Log-normal lengths, median 64, sigma 1: slots that are refilled, and batches that wait for their longest row."""
    lengths = np.clip(np.exp(np.random.default_rng(0).normal(np.log(64), 1, rows)).astype(int), 1, longest).tolist()
    one_batch = our_step(slots, prompt, longest, limits=lengths[:slots])

    def in_batches() -> None:
        for start in range(0, rows, slots):
            one_batch(lengths[start : start + slots])

    measures = {
        "batches of 16": timed(in_batches),
        "16 slots, refilled": timed(our_step(rows, prompt, longest, limits=lengths, slots=slots)),
        "all 128 rows at once": timed(our_step(rows, prompt, longest, limits=lengths)),
    }
    times = medians(measures, rounds)
    print(f"{rows} rows of log-normal length (mean {np.mean(lengths):.0f}, longest {max(lengths)} tokens)")
    for name, of_name in times.items():
        print(f"  {name:<36} {sum(lengths) / statistics.median(of_name):7.0f} tokens/s")
    print(f"  refilled / batches                   {ratio(times, 'batches of 16', '16 slots, refilled'):7.2f}")


def bytes_of_a_token(rows: int, slots: int) -> tuple[float, float]:
    """Bytes that one decoded token moves in the compiled step, and the least: weights and cache read once a step.

    XLA counts a write into the cache, which is in place, as if all of it were read and written: that is taken off.
    """
    graphdef, abstract = abstract_model(WIDE, shape.VOCABULARY)
    heads = (1, rows, WIDE.num_kv_heads, slots, WIDE.head_dim)
    cache = jax.eval_shape(lambda: [KVCache(*[jnp.zeros(heads, jnp.float32)] * 2) for _ in range(WIDE.num_layers)])
    layers = jax.eval_shape(lambda params: nnx.merge(graphdef, params).unstacked_layers(), abstract)
    ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    settings = RowSampling.of([AS_THEY_ARE] * rows)

    def step(params, layers, tokens, positions, cache, keys):
        model = nnx.merge(graphdef, params)
        hidden, cache = model.decode(tokens, positions, cache, layers)
        log_probs = sampled_log_probs(model_logits(model, hidden), settings)
        token = draw(log_probs, keys)
        return token, jnp.take_along_axis(log_probs, token[:, None], axis=-1), cache

    compiled = jax.jit(step, donate_argnums=4).lower(abstract, layers, ids, ids, cache, keys).compile()
    moved = _bytes_accessed(compiled)
    new = jax.ShapeDtypeStruct((rows, WIDE.num_kv_heads, WIDE.head_dim), jnp.float32)
    write = jax.jit(lambda cache, *new: cache.write(jnp.int32(0), jnp.arange(rows), *new), donate_argnums=0)
    moved -= WIDE.num_layers * _bytes_accessed(write.lower(cache[0], ids, new, new).compile())
    embedding = shape.VOCABULARY * WIDE.embed_dim * 4  # looked up, not read
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)) - embedding
    return moved / rows, (weights + num_bytes(cache)) / rows


def _bytes_accessed(compiled: jax.stages.Compiled) -> float:
    analysis = compiled.cost_analysis()
    assert analysis is not None  # every backend of ours has one
    return analysis["bytes accessed"]


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunix", metavar="PYTHON")
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    started = time.perf_counter()
    compare(arguments.tunix, arguments.torch, arguments.rounds)
    with_refill(max(arguments.rounds // 3, 1))
    by_batch_and_length(max(arguments.rounds // 3, 1))
    print("bytes a decoded token moves, by the compiled program, against weights and cache read once")
    for rows, slots in ((16, 128), (16, 256), (64, 128)):
        moved, least = bytes_of_a_token(rows, slots)
        print(
            f"  {rows:3} rows, {slots:4} slots: {moved / 1e6:6.2f} MB, least {least / 1e6:6.2f} MB: {moved / least:.2f}"
        )
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
