"""Several processes, one a host: starting them, failing together, and what each has of the rows."""

from __future__ import annotations

import itertools
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from p3o_jax.json_lines import first_line
from p3o_jax.terminal import say

_MESSAGE_BYTES = 1024
_PART_BYTES = 2**20
_PATIENCE_MILLISECONDS = 24 * 3600 * 1000
"""If process 0 is lost, its heartbeats are missed long before."""
_calls = itertools.count()
_SHUTDOWN_SECONDS = 30
"""How long a process that ends waits for the others, which end with it if they were not about to."""


_LOST = ("gloo", "connection", "heartbeat", "unavailable", "peer", "deadline", "aborted")
"""Words of the runtime's errors when a process does not answer any more."""


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
        address, count, index = given
        if address and count and index:
            jax.distributed.initialize(address, int(count), int(index), shutdown_timeout_seconds=_SHUTDOWN_SECONDS)
        else:
            jax.distributed.initialize(shutdown_timeout_seconds=_SHUTDOWN_SECONDS)
    except ValueError as error:
        raise ValueError(f"--distributed: no other processes found; set {', '.join(names)} ({error})") from error


def end_at_once(error: BaseException) -> NoReturn:
    """Ends this process with status 1 and one line, without waiting for the others as an orderly exit would."""
    text = str(error)
    reason = first_line(error)[:300]
    lost = any(word in text.lower() for word in _LOST)
    what = "another process is lost, and this one ends with it" if lost else "failed on a device"
    sys.stdout.flush()
    say(f"error: process {jax.process_index()}: {what} ({reason})", sys.stderr)
    os._exit(1)


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
    heard = _first_message(message)
    if failure is not None:
        raise failure
    if heard is not None:
        raise ElsewhereError(f"process {heard[0]}: {heard[1]}")


def agreed(message: str | None) -> str | None:
    """The first of the messages that processes have, None if none has one; every process must call it."""
    heard = _first_message((message or "").encode()[:_MESSAGE_BYTES])
    return None if heard is None else heard[1]


def agreed_any(flag: bool) -> bool:
    """Whether it is so on any process; every process must call it."""
    return flag if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def _first_message(message: bytes) -> tuple[int, str] | None:
    """The first process with a message, and what it says."""
    padded = np.zeros(_MESSAGE_BYTES, np.uint8)
    padded[: len(message)] = np.frombuffer(message, np.uint8)
    heard = padded[None] if jax.process_count() == 1 else multihost_utils.process_allgather(padded)
    for process, text in enumerate(heard):
        if text.any():
            return process, bytes(text).rstrip(bytes(1)).decode(errors="replace")
    return None


def of_process_0(find: Callable[[], Any]) -> Any:
    """What process 0 finds, as JSON values, on all processes; every process must call it.

    It may take process 0 as long as it likes: the others wait at the key-value store of `jax.distributed`, where no
    collective runs into its time-out.

    Raises:
        ElsewhereError: on the other processes, where process 0 raised.
    """
    client = distributed.global_state.client
    if jax.process_count() == 1 or client is None:
        return json.loads(json.dumps(find()))
    name = f"p3o_jax/of_process_0/{next(_calls)}"
    if jax.process_index() == 0:
        try:
            found = find()
        except Exception as error:
            _tell(client, name, {"error": str(error)[:_MESSAGE_BYTES] or type(error).__name__})
            raise
        _tell(client, name, {"found": found})
        return json.loads(json.dumps(found))
    told = _hear(client, name)
    if "error" in told:
        raise ElsewhereError(f"process 0: {told['error']}")
    return told["found"]


def _tell(client: Any, name: str, value: Any) -> None:
    """In parts, since a message has a greatest length; the number of them last."""
    packed = zlib.compress(json.dumps(value).encode())
    parts = [packed[start : start + _PART_BYTES] for start in range(0, len(packed), _PART_BYTES)]
    for i, part in enumerate(parts):
        client.key_value_set_bytes(f"{name}/{i}", part)
    client.key_value_set(f"{name}/parts", str(len(parts)))


def _hear(client: Any, name: str) -> Any:
    count = int(client.blocking_key_value_get(f"{name}/parts", _PATIENCE_MILLISECONDS))
    parts = [client.blocking_key_value_get_bytes(f"{name}/{i}", _PATIENCE_MILLISECONDS) for i in range(count)]
    return json.loads(zlib.decompress(b"".join(parts)))


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


def row_share(mesh: Mesh) -> float:
    """What a count of rows is multiplied by after it was summed over processes, of which several may feed the same."""
    return row_part(mesh)[1] / jax.process_count()


def of_first_process(values: Any, mesh: Mesh) -> Any:
    """Host values, or a tree of them, of the first of the processes that feed the same rows, on all of them.

    For what hosts compute alike but need not agree on to the last bit, such as rewards.
    """
    part, num_parts = row_part(mesh)
    if num_parts == jax.process_count():
        return values
    parts, everyone = multihost_utils.process_allgather((np.asarray(part), values))
    first = int(np.flatnonzero(np.ravel(parts) == part)[0])
    return jax.tree.map(lambda of_each: of_each[first], everyone)


def all_rows(tree: Any, mesh: Mesh) -> Any:
    """The rows of all processes from those of each, numpy, in order of parts; every process must call it."""
    if jax.process_count() == 1:
        return tree
    part, num_parts = row_part(mesh)
    parts, everyone = multihost_utils.process_allgather((np.asarray(part), tree))
    first = [int(np.flatnonzero(np.ravel(parts) == p)[0]) for p in range(num_parts)]
    return jax.tree.map(lambda rows: np.concatenate([rows[process] for process in first]), everyone)
