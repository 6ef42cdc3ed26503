"""Verifiers in processes of their own, which are killed when they take too long.

A verifier that evaluates what a model wrote can hang in one instruction (`9**9**9**9`), where no exception and no
thread reaches it; an alarm does not work off the main thread. So each is a process: started afresh (never forked from
one that holds devices), with the reward imported before the first time-out runs, killed at its time-out and replaced.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import FunctionType, TracebackType
from typing import Any

from p3o_jax import program
from p3o_jax.rewards.base import Graded, Prompt, Reward, import_function

_START_SECONDS = 120.0
"""A verifier that has not imported its reward by then is broken, not slow."""


class TimedOut(str):
    """The failure of a verifier that was killed at its time-out."""


class Failed(str):
    """The failure of a verifier that raised, or whose process died: what it said."""


@dataclass(frozen=True)
class Verifiers:
    """The processes that rewards are computed in, and what becomes of a row whose reward could not be."""

    processes: int | None = None
    """How many; None: one a core."""
    timeout_seconds: float = 5.0
    """A verifier that takes longer is killed, and counted."""
    failed_reward: float | None = None
    """The reward of a row whose verifier raised or was killed. None: the row has none and is left out, of its group's
    mean and deviation and of the loss. Either way it is counted: reward/verifier_errors, reward/verifier_timeouts."""

    def __post_init__(self) -> None:
        if self.processes is not None and self.processes < 1:
            raise ValueError(f"verifiers.processes must be at least 1, got {self.processes}")
        if not 0 < self.timeout_seconds < float("inf"):
            raise ValueError(f"verifiers.timeout_seconds must be positive, got {self.timeout_seconds}")


class VerifierPool:
    """Grades rows in parallel. Its processes start at once and in the background; `close`, or `with`, ends them."""

    def __init__(self, reward: Reward, settings: Verifiers):
        self._timeout = settings.timeout_seconds
        self._payload = _dumps((reward, 2 * self._timeout + 1))
        self._workers = [_Worker(self._payload) for _ in range(settings.processes or _num_cores())]

    def __call__(self, rows: Sequence[tuple[Prompt, str]]) -> list[Graded | TimedOut | Failed]:
        """What each row is worth, in their order.

        Raises:
            ChildProcessError: the processes do not start, with the reason.
        """
        results: list[Any] = [None] * len(rows)
        waiting = list(reversed(range(len(rows))))
        try:
            while waiting or any(worker.row is not None for worker in self._workers):
                for worker in list(self._workers):
                    if not waiting or not worker.ready or worker.row is not None:
                        continue
                    if worker.give(waiting[-1], rows, self._timeout):
                        waiting.pop()
                    else:  # it died while it had nothing to do
                        self._replace(worker)
                self._listen(results)
        finally:
            for worker in list(self._workers):
                if worker.row is not None:  # interrupted: what it answers must not be taken for another row's
                    self._replace(worker)
        return results

    def _listen(self, results: list[Any]) -> None:
        """Waits until some worker has something to say, or is late."""
        busy = [worker for worker in self._workers if worker.row is not None or not worker.ready]
        until = min(worker.deadline for worker in busy)
        heard = set(wait([worker.connection for worker in busy], max(until - time.monotonic(), 0)))
        for worker in busy:
            row = worker.row
            if worker.connection in heard:
                said: Any
                try:
                    said = worker.connection.recv()
                except (EOFError, OSError):
                    said = Failed(f"its process ended with {worker.ended()}")
                    if not worker.ready:
                        raise ChildProcessError(f"a verifier did not start: {said}") from None
                    self._replace(worker)
                if row is not None:
                    results[row] = said if isinstance(said, Graded) else Failed(said)
                    worker.row = None
                elif said == "ready":
                    worker.ready = True
                else:
                    raise ChildProcessError(f"a verifier did not start: {said}")
            elif time.monotonic() >= worker.deadline:
                if row is None:
                    raise ChildProcessError(f"a verifier did not start within {_START_SECONDS:.0f} s")
                results[row] = TimedOut(f"killed after {self._timeout:g} s")
                self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = _Worker(self._payload)

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _num_cores() -> int:
    """Of this process; of the machine where a process cannot be bound to some."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """One verifier process."""

    def __init__(self, payload: bytes):
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "JAX_PLATFORMS": "cpu",  # the devices are the run's
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "p3o_jax.rewards.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # killed with whatever it has started
            )
        self.connection = Connection(ours.detach())
        self.ready = False
        self.row: int | None = None
        self.deadline = time.monotonic() + _START_SECONDS
        self._send(payload)

    def give(self, row: int, rows: Sequence[tuple[Prompt, str]], timeout: float) -> bool:
        """Hands it a row; whether it still lives."""
        self.row, self.deadline = row, time.monotonic() + timeout
        return self._send(_dumps(rows[row]))

    def _send(self, payload: bytes) -> bool:
        try:
            self.connection.send_bytes(payload)
        except OSError:
            return False
        return True

    def ended(self) -> str:
        """How the process ended."""
        code = self._process.wait()
        return signal.Signals(-code).name if code < 0 else f"status {code}"

    def kill(self) -> None:
        """Kills it and what it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.connection.close()


class _Pickler(pickle.Pickler):
    """What an experiment defines is pickled under the experiment's own name, not `__main__`."""

    def reducer_override(self, thing: Any) -> Any:
        """How classes and functions of the main program are found again."""
        if getattr(thing, "__module__", None) == "__main__" and isinstance(thing, type | FunctionType):
            name = program.module_name()
            if name is not None:
                return import_function, (f"{name}:{thing.__qualname__}",)
        return NotImplemented


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
