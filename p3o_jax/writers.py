"""What a run writes while it runs: TensorBoard events, metrics.jsonl, rollouts, a progress line.

Every record has an explicit step. Everything is written at once and by the calling thread,
so a full disk is an error in the run and not a gap in its curves.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from p3o_jax.run_directory import write_atomically
from p3o_jax.stats import LOG_RATIO_EDGES


class Writer:
    """Writes the metrics of a run into its directory; does nothing unless `enabled`.

    metrics.jsonl has one JSON object a `write`: `{"step": 3, "policy/ess": 0.98, ...}`; values that are not
    finite are the strings "nan", "inf" and "-inf".
    """

    def __init__(self, run_dir: Path, enabled: bool = True):
        self._dir = Path(run_dir)
        self._enabled = enabled
        self._last_step = 0
        self._events: EventsWriter | None = None

    def resume_at(self, step: int) -> None:
        """Forgets what was written of steps >= `step` by an interrupted run, whose steps will be made again."""
        self._last_step = max(step - 1, 0)
        if not self._enabled:
            return
        path = self._metrics_path
        if path.exists():
            kept = [line for line in _read_lines(path) if line["step"] < step]
            with _naming(path):
                write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
        for rollouts in (self._dir / "rollouts").glob("step_*.jsonl"):
            if int(rollouts.stem.removeprefix("step_")) >= step:
                rollouts.unlink()
        # TensorBoard hides earlier events of steps >= that of a START.
        self._add(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Writes scalars by tag. Vectors are counts over the bins of `stats.LOG_RATIO_EDGES`: TensorBoard only.

        Returns:
            The scalars, also where nothing is written.

        Raises:
            ValueError: a step before the last one written, or a value of another shape.
        """
        self._advance(step)
        arrays = {tag: np.asarray(value) for tag, value in metrics.items()}
        scalars = {tag: float(value) for tag, value in arrays.items() if value.ndim == 0}
        for tag, value in arrays.items():
            if value.ndim:
                self.histogram(step, tag, LOG_RATIO_EDGES, value)
        if self._enabled and scalars:
            # Not `summary.scalar`, which rewrites tags: pass@1 would become pass_1.
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
            self._add(Event(step=step, summary=Summary(value=values)))
            self._append({"step": step} | {tag: _to_json(value) for tag, value in scalars.items()})
        return scalars

    def histogram(self, step: int, tag: str, edges: np.ndarray, counts: np.ndarray) -> None:
        """Writes the counts of len(edges) + 1 bins, of which the first and the last are open-ended."""
        self._advance(step)
        edges, counts = np.asarray(edges, np.float64), np.asarray(counts, np.float64)
        if counts.shape != (len(edges) + 1,):
            raise ValueError(f"{tag}: counts of shape {counts.shape} do not fit {len(edges)} edges")
        if self._enabled:
            # Open bins are drawn as wide as their neighbours.
            limits = np.concatenate([[2 * edges[0] - edges[1]], edges, [2 * edges[-1] - edges[-2]]])
            middles = (limits[1:] + limits[:-1]) / 2
            record = summary.histogram_raw(
                tag,
                min=limits[0],
                max=limits[-1],
                num=counts.sum(),
                sum=counts @ middles,
                sum_squares=counts @ middles**2,
                bucket_limits=limits[1:].tolist(),
                bucket_counts=counts.tolist(),
            )
            self._add(Event(step=step, summary=record))

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Writes a text to TensorBoard."""
        self._advance(step)
        if self._enabled:
            self._add(Event(step=step, summary=summary.text(tag, markdown)))

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes rollouts/step_N.jsonl, one JSON object a row."""
        self._advance(step)
        if self._enabled:
            path = self._dir / "rollouts" / f"step_{step}.jsonl"
            with _naming(path):
                path.parent.mkdir(exist_ok=True)
                lines = (json.dumps(_json_tree(row), ensure_ascii=False) + "\n" for row in rows)
                write_atomically(path, "".join(lines))

    def flush(self) -> None:
        """Hands all events to the operating system."""
        if self._events is not None:
            with _naming(self._dir):
                self._events.flush()

    def close(self) -> None:
        """Flushes and closes."""
        if self._events is not None:
            with _naming(self._dir):
                self._events.close()
            self._events = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _metrics_path(self) -> Path:
        return self._dir / "metrics.jsonl"

    def _advance(self, step: int) -> None:
        if step < self._last_step:
            raise ValueError(f"step {step} is written after step {self._last_step}")
        self._last_step = step

    def _append(self, line: Mapping[str, Any]) -> None:
        with _naming(self._metrics_path), open(self._metrics_path, "a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def _add(self, event: Event) -> None:
        with _naming(self._dir):
            if self._events is None:
                # File names have a resolution of seconds; a run resumed within one must not overwrite its own.
                unique = f".{time.time_ns() % 10**9:09d}"
                self._events = EventsWriter(str(self._dir / "events"), filename_suffix=unique)
            event.wall_time = time.time()
            self._events.write_event(event)
            self._events.flush()


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl, all values as floats but `step`, an int.

    Raises:
        FileNotFoundError: the run has written none.
        ValueError: a damaged line, other than an unfinished last one, which is left out.
    """
    lines = _read_lines(Path(run_dir) / "metrics.jsonl")
    return [{tag: value if tag == "step" else float(value) for tag, value in line.items()} for line in lines]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # the process ended while it wrote it
            raise ValueError(f"{path}, line {number} is damaged: {error}") from error
    return records


def _to_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _json_tree(value: Any) -> Any:
    """A tree of JSON values in which floats that are not finite are strings, and numpy values Python's."""
    if isinstance(value, Mapping):
        return {key: _json_tree(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _json_tree(value.tolist())
    if isinstance(value, list | tuple):
        return [_json_tree(item) for item in value]
    return _to_json(value) if isinstance(value, float) else value


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of the disk name what could not be written."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, f"cannot write {path}: {error.strerror or error}") from error


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
