"""One line that says how far a run is."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TextIO


class Progress:
    """One line with what matters, updated in place on a terminal, else printed at most every few seconds.

    step 12/60  reward 0.41  ess 0.93  learner 31k tok/s  sampler 33k tok/s  00:21 left
    """

    _SECONDS_BETWEEN_LINES = 5.0
    _SHOWN = (
        ("reward", "reward/mean", "{:.2f}"),
        ("ess", "policy/ess", "{:.4f}"),
        ("learner", "time/learner_tokens_per_second", "{} tok/s"),
        ("sampler", "time/sampler_tokens_per_second", "{} tok/s"),
    )

    def __init__(
        self,
        num_steps: int,
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._num_steps = num_steps
        self._enabled = enabled
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._in_place = self._stream.isatty()
        self._width = 0
        self._first: tuple[int, float] | None = None
        self._last_shown = -math.inf

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the state after a step."""
        now = self._clock()
        if self._first is None:
            # The first step compiles: what is left is estimated from those after it.
            self._first = (step, now)
        if not self._enabled:
            return
        if not self._in_place and step < self._num_steps and now - self._last_shown < self._SECONDS_BETWEEN_LINES:
            return
        self._last_shown = now
        line = "  ".join([f"step {step}/{self._num_steps}", *self._values(metrics), self._left(step, now)])
        if self._in_place:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leaves the last line on the terminal and goes to the next."""
        if self._in_place and self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _values(self, metrics: Mapping[str, float]) -> Iterator[str]:
        for label, tag, shape in self._SHOWN:
            if tag in metrics:
                value = metrics[tag]
                yield f"{label} {shape.format(_thousands(value) if shape.startswith('{}') else value)}"

    def _left(self, step: int, now: float) -> str:
        assert self._first is not None
        first_step, first_time = self._first
        if step == first_step:
            return "--:-- left"
        seconds = round((now - first_time) / (step - first_step) * (self._num_steps - step))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return (f"{hours}:" if hours else "") + f"{minutes:02d}:{seconds:02d} left"


def _thousands(value: float) -> str:
    """Three digits and a unit: 31k, 1.2M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            scaled = value / size
            return f"{scaled:.1f}{unit}" if scaled < 10 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}"
