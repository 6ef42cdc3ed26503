"""Tokens a second of an update: P3O, GRPO, and what a user would otherwise take.

    python -m experiments.benchmarks.learner [--tunix PYTHON] [--torch PYTHON]

PYTHON is that of an environment with google-tunix==0.1.7 and jax==0.10.2, or with torch and transformers; from the
repository root. All take turns, and figures are medians over the rounds.

Nine rounds on two cores that had other work (wall time; differences of a fifth are noise):

    P3O                                                      639 tokens/s
    GRPO                                                     641 tokens/s
    P3O, 8 micro-batches                                     858 tokens/s
    GRPO, 8 micro-batches                                   1054 tokens/s
    GRPO recomputing its old log-probs, 8 micro-batches      794 tokens/s
    P3O, nothing recomputed                                  695 tokens/s
    GRPO, nothing recomputed                                 509 tokens/s
    Tunix GRPO                                               870 tokens/s
    Hugging Face and torch, P3O                             1137 tokens/s
    P3O costs 0.975 of GRPO
    with 8 micro-batches 1.214
    and 1.164 of one that recomputes
    Tunix GRPO takes 0.83 times as long as P3O, nothing recomputed
    Hugging Face and torch, P3O takes 0.61 times as long as P3O, nothing recomputed
    log-probs of 16,384 tokens x 151,936: 3.07 GiB temporary, naive 21.44 GiB

In processor time, which other work disturbs less, medians of eight steps: P3O 0.945 of GRPO, 1.151 with eight
micro-batches, and 0.977 of a GRPO that recomputes its old log-probs. The least of a few steps: P3O with nothing
recomputed 1.75 s, the same with the scan over layers unrolled 1.27 s, Tunix, which unrolls, 1.27 s.

So on this shape we are not faster than Tunix, and cannot be by half: both run the same products of matrices, 48 GFLOP
a step, which are nearly all of its time, and a vocabulary of 512 leaves the log-probs nothing to save. The scan over
layers costs 0.5 s of copies here where nothing is recomputed. What is won elsewhere is not in the table: padding that
is not computed (`Config.pack`), and log-probs at a seventh of the memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import shape
from p3o_jax.batch.types import Batch, Inputs
from p3o_jax.devices.sharding import make_mesh, to_global
from p3o_jax.learner.learner import Learner
from p3o_jax.learner.optimizer import OptimizerConfig
from p3o_jax.learner.plan import StepPlan
from p3o_jax.models.architecture import Remat, TransformerConfig
from p3o_jax.models.log_probs import token_log_probs
from p3o_jax.objectives import P3O, Grpo, Objective

MODEL = TransformerConfig(
    num_layers=shape.LAYERS,
    embed_dim=shape.WIDTH,
    num_heads=shape.HEADS,
    num_kv_heads=shape.KV_HEADS,
    head_dim=shape.HEAD_DIM,
    mlp_dim=shape.MLP,
)


def make_batch() -> Batch:
    """Random rows, half prompt and half response."""
    rng = np.random.default_rng(0)
    length = shape.PROMPT + shape.RESPONSE
    tokens = rng.integers(0, shape.VOCABULARY, (shape.ROWS, length + 1)).astype(np.int32)
    columns = np.arange(length, dtype=np.int32)
    full = (shape.ROWS, length)
    return Batch(
        mask=np.broadcast_to(columns >= shape.PROMPT, full),
        behaviour_log_probs=np.full(full, -6.3, np.float32),
        advantages=np.repeat(rng.normal(size=(shape.ROWS, 1)), length, axis=1).astype(np.float32),
        inputs=Inputs(tokens[:, :-1], tokens[:, 1:], np.broadcast_to(columns, full), np.ones(full, np.float32)),
    )


def our_step(objective: Objective, micro_batches: int, remat: Remat = "full") -> Callable[[], None]:
    """An update on one device, warmed up."""
    mesh = make_mesh(devices=jax.devices()[:1])
    model, optimizer = replace(MODEL, remat=remat), OptimizerConfig()
    learner = Learner(
        model, shape.VOCABULARY, StepPlan(objective, micro_batches=micro_batches), optimizer, mesh, num_updates=100
    )
    state, batch = learner.init(jax.random.key(0)), to_global(make_batch(), mesh)

    def step() -> None:
        nonlocal state
        state, _ = learner.update(state, batch)
        jax.block_until_ready(state)

    step()
    step()
    return step


def served_step(python: str, module: str) -> Callable[[], float]:
    """A measurement made in another environment."""
    process = subprocess.Popen(
        [python, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )

    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None  # they are pipes

    def line() -> str:
        text = stdout.readline()
        if not text:
            raise RuntimeError(f"{python} -m {module} ended; run it by itself to see why")
        return text.strip()

    while line() != "ready":
        pass

    def measure() -> float:
        stdin.write("\n")
        stdin.flush()
        return float(line())

    return measure


def log_prob_bytes(tokens: int = 16_384, width: int = 2560, vocabulary: int = 151_936) -> tuple[int, int]:
    """Temporary bytes of log-probs with gradient, compiled and not run: ours and the naive ones."""
    shapes = (
        jax.ShapeDtypeStruct((1, tokens, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((vocabulary, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, tokens), jnp.int32),
    )

    def ours(hidden, head, targets):
        return token_log_probs(hidden, head, targets, jnp.ones(targets.shape, jnp.float32))[0].sum()

    def naive(hidden, head, targets):
        logits = jnp.einsum("BTD,VD->BTV", hidden, head, preferred_element_type=jnp.float32)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1).sum()

    def temporary(function: Callable) -> int:
        compiled = jax.jit(jax.grad(function, (0, 1))).lower(*shapes).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None  # every backend of ours has one
        return analysis.temp_size_in_bytes

    return temporary(ours), temporary(naive)


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunix", metavar="PYTHON")
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()

    recomputing = Grpo(ratio_to="proximal")
    ours = {
        "P3O": our_step(P3O(), 1),
        "GRPO": our_step(Grpo(), 1),
        "P3O, 8 micro-batches": our_step(P3O(), 8),
        "GRPO, 8 micro-batches": our_step(Grpo(), 8),
        "GRPO recomputing its old log-probs, 8 micro-batches": our_step(recomputing, 8),
        "P3O, nothing recomputed": our_step(P3O(), 1, "none"),
        "GRPO, nothing recomputed": our_step(Grpo(), 1, "none"),
    }
    measures: dict[str, Callable[[], float]] = {name: partial(shape.seconds, step) for name, step in ours.items()}
    if arguments.tunix:
        measures["Tunix GRPO"] = served_step(arguments.tunix, "experiments.benchmarks.tunix_update")
    if arguments.torch:
        measures["Hugging Face and torch, P3O"] = served_step(arguments.torch, "experiments.benchmarks.torch_update")

    rounds: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(arguments.rounds):
        for name, measure in measures.items():
            rounds[name].append(measure())

    def ratio(one: str, other: str) -> float:
        """How much longer `one` takes: the median over rounds, in each of which both met the same machine."""
        return statistics.median(a / b for a, b in zip(rounds[one], rounds[other], strict=True))

    print(f"{shape.ROWS} rows of {shape.PROMPT} + {shape.RESPONSE} tokens, {arguments.rounds} rounds")
    for name, times in rounds.items():
        print(f"  {name:<52} {shape.TOKENS / statistics.median(times):7.0f} tokens/s")
    many = ", 8 micro-batches"
    print(f"  P3O costs {ratio('P3O', 'GRPO'):.3f} of GRPO")
    print(f"  with 8 micro-batches {ratio('P3O' + many, 'GRPO' + many):.3f}")
    print(f"  and {ratio('P3O' + many, 'GRPO recomputing its old log-probs' + many):.3f} of one that recomputes")
    for name in list(measures)[len(ours) :]:
        print(f"  {name} takes {ratio(name, 'P3O, nothing recomputed'):.2f} times as long as P3O, nothing recomputed")
    lean, naive = log_prob_bytes()
    print(f"  log-probs of 16,384 tokens x 151,936: {lean / 2**30:.2f} GiB temporary, naive {naive / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
