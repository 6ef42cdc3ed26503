"""Which rows of a step are to blame for an update that was skipped, and the batch for whoever wants to see it."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from p3o_jax.batch.types import AnyArray, Batch, Inputs, Support
from p3o_jax.devices import sharding
from p3o_jax.devices.processes import agreed_any, all_rows, fail_together

NAMED_PROMPTS = 8
MAX_DUMPS = 10
"""Batches kept of a run: the first, which show how it began."""


def nonfinite_rows(
    log_probs: Callable[[Batch], Float[Array, "B T"]],
    batch: Batch,
    group: Int[AnyArray, " B"],
    num_parts: int,
    mesh: Mesh,
) -> tuple[str, Float[np.ndarray, "B T"]]:
    """Names the rows with a counted token whose log-prob, the policy's or the behaviour policy's, is not finite.

    Every process must call it, and all get the same words.

    Args:
        log_probs: the policy's, of global rows.
        batch: this process's rows, one sequence a row.
        group: the prompt of each.
        num_parts: into how many equal parts the rows are cut for `log_probs`.
        mesh: where they go.

    Returns:
        The words, and the policy's log-probs of this process's rows.
    """
    bad, policy = np.zeros(len(group), bool), np.zeros(batch.mask.shape, np.float32)
    for rows in np.split(np.arange(len(group)), num_parts):
        part = jax.tree.map(lambda leaf, rows=rows: leaf[rows], batch)
        policy[rows] = sharding.to_local(log_probs(sharding.to_global(part, mesh)))
        bad[rows] = (part.mask & ~(np.isfinite(policy[rows]) & np.isfinite(part.behaviour_log_probs))).any(axis=1)
    count = int(sharding.sum_over_processes(np.asarray(bad.sum())))
    if not count:
        return "every row's log-probs are finite under the parameters that remain", policy
    first = np.unique(group[bad])[:NAMED_PROMPTS]
    named = np.full(NAMED_PROMPTS, np.iinfo(np.int32).max, np.int32)
    named[: len(first)] = first
    prompts = np.unique(sharding.gather_over_processes(named))[:NAMED_PROMPTS]
    listed = ", ".join(str(prompt) for prompt in prompts if prompt != np.iinfo(np.int32).max)
    return f"{count} rows have log-probs that are not finite, of prompts {listed}", policy


class Dump(NamedTuple):
    """A batch with an update that was skipped: the rows of all processes, in order, one sequence a row."""

    batch: Batch
    group: Int[AnyArray, " B"]
    policy_log_probs: Float[np.ndarray, "B T"]  # under the parameters that remained


def write_dump(path: Path, dump: Dump, mesh: Mesh) -> bool:
    """Writes a batch from each process's rows of it, unless there are `MAX_DUMPS` already. Every process must call it.

    Args:
        path: an .npz file, in a directory of its own; process 0 writes it.
        dump: this process's rows.
        mesh: where they come from.

    Returns:
        Whether it was written.
    """
    full = jax.process_index() == 0 and len(list(path.parent.glob("*.npz"))) >= MAX_DUMPS and not path.exists()
    if agreed_any(full):
        return False
    dump = all_rows(dump, mesh)
    with fail_together():
        if jax.process_index() == 0:
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_suffix(".tmp")
            with open(temporary, "wb") as file:
                arrays: dict[str, Any] = dict(_flat(dump))
                np.savez(file, **arrays)
            temporary.replace(path)
    return True


def read_dump(path: Path) -> Dump:
    """Reads what `write_dump` wrote: `objective_loss` and `Learner.gradients` take the batch as it is.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:  # it may be another's, and a pickle is a program
            arrays = {name: file[name] for name in file.files}
        return _nested(Dump, arrays, "")
    except (KeyError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


_PARTS = {"batch.": Batch, "batch.support.": Support, "batch.inputs.": Inputs}


def _flat(node: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of named tuples in named tuples, by dotted name; what is None is left out."""
    for name, value in zip(node._fields, node, strict=True):
        if isinstance(value, tuple):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, np.asarray(value)


def _nested(kind: Any, arrays: Mapping[str, np.ndarray], prefix: str) -> Any:
    """The inverse of `_flat`."""
    fields = {}
    for name in kind._fields:
        inner = f"{prefix}{name}."
        if any(known.startswith(inner) for known in arrays):
            fields[name] = _nested(_PARTS[inner], arrays, inner)
        else:
            fields[name] = arrays.get(prefix + name)
    return kind(**fields)
