"""A thread that notices a step which hangs, and says on which host, in which phase, and who is silent."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

import jax
from jax._src import distributed

from p3o_jax.runs.stopwatch import Stopwatch

_PACKAGE = str(Path(__file__).parents[1])
_OF_COMPILATION = tuple(
    os.path.join("jax", "_src", *name)
    for name in (("interpreters", "partial_eval.py"), ("interpreters", "mlir.py"), ("compiler.py",))
)
"""Modules of JAX that trace, lower and compile, and are on the stack of a thread that does."""
_COMPILING = "compiling"
_SILENT_LOOKS = 3
"""Who has not been heard of for so many looks is silent."""


class Watchdog:
    """Watches the steps of the thread that made it. Time that any process spends compiling does not count."""

    def __init__(
        self,
        limit_seconds: float,
        *,
        end: Callable[[str], None] | None = None,
        report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ):
        """
        Args:
            limit_seconds: how long a step may take; it is reported then, and whenever that has doubled. 0: for ever.
            end: called with the line when a step is reported, in the watchdog's thread; may end the process. It is not
                called for the start, which may load or train for long.
            report: is given the line too.
        """
        self._limit, self._end, self._report = limit_seconds, end, report
        self._watched = threading.get_ident()
        self._step = 0
        self._clock: Stopwatch | None = None
        self._since, self._next = time.monotonic(), limit_seconds
        self._stopped = threading.Event()
        self._peers = _Peers(self._interval, self._stopped, self._state)

    def watch(self, step: int, clock: Stopwatch) -> None:
        """A step begins; before the first, what is watched is the start."""
        self._step, self._clock = step, clock
        self._since, self._next = time.monotonic(), self._limit

    @property
    def _phase(self) -> str:
        return "start" if self._clock is None else self._clock.phase

    def _state(self) -> str:
        compiling = _is_compiling(sys._current_frames().get(self._watched))
        return f"step {self._step}, {_COMPILING if compiling else self._phase}"

    @property
    def _interval(self) -> float:
        return max(0.05, self._limit / 10)

    def __enter__(self) -> Watchdog:
        if self._limit:
            threading.Thread(target=self._run, name="watchdog", daemon=True).start()
            if jax.process_count() > 1:
                threading.Thread(target=self._peers.run, name="watchdog peers", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(self._interval):
            now = time.monotonic()
            frame = sys._current_frames().get(self._watched)
            if _is_compiling(frame) or self._peers.one_compiles(now):
                self._since += now - last
            elif now - self._since > self._next:
                self._next *= 2
                message = self._message(now, frame)
                self._report(message)
                if self._end is not None and self._clock is not None:
                    self._end(message)
            last = now

    def _message(self, now: float, frame: FrameType | None) -> str:
        return (
            f"watchdog: process {jax.process_index()} ({platform.node()}): step {self._step} has taken "
            f"{now - self._since:.0f} s, the limit is {self._limit:g} s; phase: {self._phase}, at {_place(frame)}"
            + self._peers.silent(now)
        )


class _Peers:
    """Who else is alive, by the key-value store of jax.distributed. In a thread of its own: if process 0, which holds
    the store, hangs, so does every question to it."""

    def __init__(self, interval: float, stopped: threading.Event, state: Callable[[], str]):
        self._interval, self._stopped, self._state = interval, stopped, state
        self._heard: dict[str, tuple[str, float]] = {}
        self._answered = time.monotonic()

    def run(self) -> None:
        client, count, me = distributed.global_state.client, 0, jax.process_index()
        while client is not None and not self._stopped.wait(self._interval):
            count += 1
            try:
                client.key_value_set(
                    f"p3o_jax/alive/{me}", f"{count};{platform.node()};{self._state()}", allow_overwrite=True
                )
                entries = client.key_value_dir_get("p3o_jax/alive/")
            except jax.errors.JaxRuntimeError:
                continue  # process 0 is not there: what is silent is then everyone
            self._answered = now = time.monotonic()
            for key, value in entries:
                process = key.rsplit("/", 1)[1]
                if process != str(me) and self._heard.get(process, ("", 0.0))[0] != value:
                    self._heard[process] = (value, now)

    def one_compiles(self, now: float) -> bool:
        """Whether another process that is alive says that it is compiling: what is shared waits for it."""
        heard = self._heard.copy().values()
        return any(now - at <= _SILENT_LOOKS * self._interval and state.endswith(_COMPILING) for state, at in heard)

    def silent(self, now: float) -> str:
        """Those that have not been heard of for long, as the end of a sentence."""
        limit = _SILENT_LOOKS * self._interval
        if jax.process_count() == 1:
            return ""
        if now - self._answered > limit:
            return f"; process 0, which all depend on, has not answered for {now - self._answered:.0f} s"
        found = [
            f"process {process} ({value.split(';')[1]}) for {now - at:.0f} s, last in {value.split(';')[2]}"
            for process, (value, at) in sorted(self._heard.copy().items())
            if now - at > limit
        ]
        return "; silent: " + "; ".join(found) if found else "; all other processes are alive"


def _is_compiling(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.endswith(_OF_COMPILATION):
            return True
        frame = frame.f_back
    return False


def _place(frame: FrameType | None) -> str:
    """The innermost line of this package."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"
