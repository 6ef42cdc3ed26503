"""status.json: what a run is doing, for whoever looks at its directory.

    {"state": "running", "step": 12, "num_steps": 60, "reason": "", "host": "...", "pid": 123, "time": 1767225600.0}

`state` is running, finished, stopped (asked to end; --resume continues it) or failed, with the reason. A process that
is killed leaves it at running: `read` finds out.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from p3o_jax.json_lines import first_line
from p3o_jax.runs.directory import write_atomically
from p3o_jax.runs.preemption import Preempted

FILE = "status.json"
_SECONDS_BETWEEN_WRITES = 10.0
_SECONDS_OF_SILENCE = 1800.0
"""A run on another host that has not written for so long is taken for lost."""


class RunStatus:
    """Keeps a run's status.json up to date while the run is inside it; does nothing unless `enabled`."""

    def __init__(self, run_dir: Path, num_steps: int, *, enabled: bool = True):
        self._path, self._num_steps, self._enabled = Path(run_dir) / FILE, num_steps, enabled
        # One that goes on has reached what it said last, until it says more.
        self._step, self._written = _step_of(self._path), -_SECONDS_BETWEEN_WRITES

    def update(self, step: int) -> None:
        """A step is done; written at most every ten seconds."""
        self._step = step
        if time.monotonic() - self._written >= _SECONDS_BETWEEN_WRITES:
            self._write("running")

    def failed(self, reason: str) -> None:
        """The process is about to end without leaving the block."""
        with suppress(OSError):
            self._write("failed", reason)

    def __enter__(self) -> RunStatus:
        self._write("running")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # the disk may be what the run failed of
            if error is None:
                self._write("finished")
            elif isinstance(error, Preempted):
                self._write("stopped", "asked to end")
            elif isinstance(error, KeyboardInterrupt):
                self._write("stopped", "interrupted")
            else:
                self._write("failed", first_line(error))

    def _write(self, state: str, reason: str = "") -> None:
        if self._enabled:
            status = {
                "state": state, "step": self._step, "num_steps": self._num_steps, "reason": reason,
                "host": platform.node(), "pid": os.getpid(), "time": time.time(),
            }  # fmt: skip
            write_atomically(self._path, json.dumps(status) + "\n")
        self._written = time.monotonic()


def read(run_dir: Path) -> dict[str, Any]:
    """A run's status; `lost` where it says running but nothing runs, `unknown` where it says nothing."""
    try:
        status = json.loads((Path(run_dir) / FILE).read_bytes())
        state, host, pid, written = status["state"], status["host"], int(status["pid"]), float(status["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return {"state": "unknown", "step": None, "num_steps": None, "reason": f"no readable {FILE}"}
    if state == "running":
        here = host == platform.node()
        if not (_is_alive(pid) if here else time.time() - written < _SECONDS_OF_SILENCE):
            status |= {"state": "lost", "reason": "ended without a word" if here else "not heard of for long"}
    return status


def _step_of(path: Path) -> int:
    """The step that a status names; 0 if there is no status that can be read."""
    try:
        return max(int(json.loads(path.read_bytes())["step"]), 0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # On Linux, one that has ended and that nobody has waited for is still there.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or no /proc
        return True
