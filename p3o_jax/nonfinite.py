"""Which rows of a step are to blame for an update that was skipped."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from p3o_jax import sharding
from p3o_jax.types import Batch

NAMED_PROMPTS = 8


def nonfinite_rows(
    log_probs: Callable[[Batch], Float[Array, "B T"]],
    batch: Batch,
    group: Int[np.ndarray, " B"],
    num_parts: int,
    mesh: Mesh,
) -> str:
    """Names the rows with a counted token whose log-prob, the policy's or the behaviour policy's, is not finite.

    Every process must call it, and all get the same words.

    Args:
        log_probs: the policy's, of global rows.
        batch: this process's rows, one sequence a row.
        group: the prompt of each.
        num_parts: into how many equal parts the rows are cut for `log_probs`.
        mesh: where they go.
    """
    bad = np.zeros(len(group), bool)
    for rows in np.split(np.arange(len(group)), num_parts):
        part = jax.tree.map(lambda leaf, rows=rows: leaf[rows], batch)
        found = sharding.to_local(log_probs(sharding.to_global(part, mesh)))
        bad[rows] = (part.mask & ~(np.isfinite(found) & np.isfinite(part.behaviour_log_probs))).any(axis=1)
    count = int(sharding.sum_over_processes(np.asarray(bad.sum())))
    if not count:
        return "every row's log-probs are finite under the parameters that remain"
    first = np.unique(group[bad])[:NAMED_PROMPTS]
    named = np.full(NAMED_PROMPTS, np.iinfo(np.int32).max, np.int32)
    named[: len(first)] = first
    prompts = np.unique(sharding.gather_over_processes(named))[:NAMED_PROMPTS]
    listed = ", ".join(str(prompt) for prompt in prompts if prompt != np.iinfo(np.int32).max)
    return f"{count} rows have log-probs that are not finite, of prompts {listed}"
