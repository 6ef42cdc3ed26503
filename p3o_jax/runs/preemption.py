"""Being asked to end: SIGTERM, and the notice that a TPU is about to be taken away."""

from __future__ import annotations

import os
import signal
import threading
from types import TracebackType

import jax
from jax.experimental import multihost_utils

from p3o_jax.devices.processes import agreed_any


class Preempted(Exception):
    """The run was asked to end and has; started again with --resume, it continues."""


class Preemption:
    """Notices requests to end. A second SIGTERM ends the process at once, whatever it is doing."""

    def __init__(self) -> None:
        self._asked = False

    def requested(self, step: int) -> bool:
        """Whether any process was asked to end: the same answer on all of them, which must all call it.

        Args:
            step: never lower than in the call before. Under jax.distributed it tells the service for preemption notices
                where this process is.
        """
        noticed = jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)
        return agreed_any(self._asked or noticed)

    def __enter__(self) -> Preemption:
        """Only the main thread can listen to signals; in another, none is noticed."""
        self._listening = threading.current_thread() is threading.main_thread()
        if self._listening:
            # The handler runs when the main thread is in Python again; the pipe is written to at once.
            read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._write_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._handler_before = signal.signal(signal.SIGTERM, self._ask)
            threading.Thread(target=_end_at_second, args=(read,), name="sigterm", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listening:
            # None: it was not set by Python; jax.distributed sets one.
            signal.signal(signal.SIGTERM, self._handler_before or signal.SIG_DFL)
            signal.set_wakeup_fd(self._write_before)
            os.close(self._write)

    def _ask(self, number: int, frame: object) -> None:
        self._asked = True


def _end_at_second(read: int) -> None:
    count = 0
    while number := os.read(read, 1):
        count += number[0] == signal.SIGTERM
        if count == 1 and number[0] == signal.SIGTERM:
            os.write(2, b"SIGTERM: ending after a checkpoint; a second one ends at once\n")
        if count == 2:
            os._exit(128 + signal.SIGTERM)
    os.close(read)
