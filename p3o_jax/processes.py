"""Several processes, one a host: starting them, failing together, and what each has of the rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

_MESSAGE_BYTES = 1024
_SHUTDOWN_SECONDS = 30
"""How long a process that ends waits for the others, which end with it if they were not about to."""


class ElsewhereError(RuntimeError):
    """Another process failed, and this one ends with it."""


def initialize() -> None:
    """Joins the other processes.

    TPU VMs, GKE and Slurm are found by JAX. Elsewhere the environment says: JAX_COORDINATOR_ADDRESS (host:port of
    process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Raises:
        ValueError: neither.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = [os.environ.get(name) for name in names]
    try:
        if all(given):
            address, count, index = given
            jax.distributed.initialize(address, int(count), int(index), shutdown_timeout_seconds=_SHUTDOWN_SECONDS)
        else:
            jax.distributed.initialize(shutdown_timeout_seconds=_SHUTDOWN_SECONDS)
    except ValueError as error:
        raise ValueError(f"--distributed: no other processes found; set {', '.join(names)} ({error})") from error


@contextmanager
def fail_together() -> Iterator[None]:
    """A block that every process runs: if it raises on one, it raises on all.

    Raises:
        ElsewhereError: on the processes where the block itself did not raise, with the first message of the others.
    """
    message, failure = b"", None
    try:
        yield
    except Exception as error:  # whatever it is, the others must hear of it
        failure, message = error, str(error).encode()[:_MESSAGE_BYTES] or type(error).__name__.encode()
    if jax.process_count() > 1:
        padded = np.zeros(_MESSAGE_BYTES, np.uint8)
        padded[: len(message)] = np.frombuffer(message, np.uint8)
        heard = multihost_utils.process_allgather(padded)
        for process, text in enumerate(heard):
            if text.any() and failure is None:
                raise ElsewhereError(f"process {process}: {bytes(text).rstrip(bytes(1)).decode(errors='replace')}")
    if failure is not None:
        raise failure


def row_part(mesh: Mesh) -> tuple[int, int]:
    """Which part of a batch's rows this process feeds and reads, of how many parts.

    Processes that share a tensor group hold the same rows, hence feed the same part.

    Raises:
        ValueError: the processes' rows overlap without being equal.
    """
    groups = mesh.devices.reshape(-1, mesh.shape["tensor"])  # one row shard each
    held: dict[int, set[int]] = {}
    for shard, group in enumerate(groups):
        for device in group:
            held.setdefault(device.process_index, set()).add(shard)
    parts = sorted({tuple(sorted(shards)) for shards in held.values()})
    if len({len(part) for part in parts}) > 1 or sum(len(part) for part in parts) != len(groups):
        raise ValueError(
            f"mesh: tensor groups of {mesh.shape['tensor']} devices cut across hosts unevenly; choose mesh.tensor to "
            "divide the devices of a host, or to be a multiple of them"
        )
    return parts.index(tuple(sorted(held[jax.process_index()]))), len(parts)


def of_first_process(values: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Host values of the first of the processes that feed the same rows, on all of them.

    For what hosts compute alike but need not agree on to the last bit, such as rewards.
    """
    part, num_parts = row_part(mesh)
    if num_parts == jax.process_count():
        return values
    parts, everyone = multihost_utils.process_allgather((np.asarray(part), values))
    return everyone[int(np.flatnonzero(np.ravel(parts) == part)[0])]


def all_rows(tree: Any, mesh: Mesh) -> Any:
    """The rows of all processes from those of each, numpy, in order of parts; every process must call it."""
    if jax.process_count() == 1:
        return tree
    part, num_parts = row_part(mesh)
    parts, everyone = multihost_utils.process_allgather((np.asarray(part), tree))
    first = [int(np.flatnonzero(np.ravel(parts) == p)[0]) for p in range(num_parts)]
    return jax.tree.map(lambda rows: np.concatenate([rows[process] for process in first]), everyone)
