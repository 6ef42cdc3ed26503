"""Scalars, histograms, text and rollouts of a run.

Every record has an explicit step. Everything is written at once and by the calling thread,
so a full disk is an error in the run and not a gap in its curves.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from p3o_jax.batch.metrics import Histogram
from p3o_jax.json_lines import read_json_lines
from p3o_jax.runs.directory import write_atomically
from p3o_jax.writers import tensorboard
from p3o_jax.writers.samples import samples_html


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
            kept = [line for line in read_json_lines(path) if line["step"] < step]
            with _naming(path):
                write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
        for rollouts in (self._dir / "rollouts").glob("step_*.jsonl"):
            if int(rollouts.stem.removeprefix("step_")) >= step:
                rollouts.unlink()
        # TensorBoard hides earlier events of steps >= that of a START.
        self._add(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def describe(self, settings: Mapping[str, bool | int | float | str]) -> None:
        """Writes what TensorBoard compares runs by: the run's settings, and the page that overlays all runs' ESS."""
        if self._enabled:
            self._add(Event(step=self._last_step, summary=tensorboard.hyperparameters(settings)))
            self._add(Event(step=self._last_step, summary=tensorboard.ess_page()))

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Writes metrics by tag: scalars, and `metrics.Histogram`s, which go to TensorBoard only.

        Returns:
            The scalars, also where nothing is written.

        Raises:
            ValueError: a step before the last one written, or a value of another kind.
        """
        self._advance(step)
        histograms = {tag: value for tag, value in metrics.items() if isinstance(value, Histogram)}
        arrays = {tag: np.asarray(value) for tag, value in metrics.items() if tag not in histograms}
        for tag, value in arrays.items():
            if value.ndim:
                raise ValueError(f"{tag}: an array of shape {value.shape} is neither a scalar nor a histogram")
        scalars = {tag: float(value) for tag, value in arrays.items()}
        if self._enabled and metrics:
            # Not `summary.scalar`, which rewrites tags: pass@1 would become pass_1.
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
            values += [tensorboard.histogram(tag, value) for tag, value in histograms.items()]
            self._add(Event(step=step, summary=Summary(value=values)))
        if self._enabled and scalars:
            self._append({"step": step} | {tag: _to_json(value) for tag, value in scalars.items()})
        return scalars

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes rollouts/step_N.jsonl, one JSON object a row, and a few of them as text to TensorBoard.

        Args:
            rows: as `rollouts.readable` makes them, those of a prompt one after another.
        """
        self._advance(step)
        if self._enabled:
            self._add(Event(step=step, summary=tensorboard.text("rollout/samples", samples_html(rows))))
            path = self._dir / "rollouts" / f"step_{step}.jsonl"
            with _naming(path):
                path.parent.mkdir(exist_ok=True)
                lines = (_json_line(row) for row in rows)
                write_atomically(path, "".join(lines))

    def flush(self) -> None:
        """Brings everything to the disk, so that a checkpoint that follows is not newer than what leads to it."""
        if self._events is not None:
            with _naming(self._dir):
                self._events.flush()
                for path in (self._metrics_path, *self._dir.glob("events.out.tfevents.*")):
                    if path.exists():
                        with open(path, "rb") as file:
                            os.fsync(file.fileno())

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
        with _naming(self._metrics_path), open(self._metrics_path, "a", encoding="utf-8") as file:
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
    lines = read_json_lines(Path(run_dir) / "metrics.jsonl")
    return [{tag: value if tag == "step" else float(value) for tag, value in line.items()} for line in lines]


def _to_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _json_line(row: Mapping[str, Any]) -> str:
    """A row of rollouts; it is only where something in it is not finite that every value has to be looked at."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=lambda value: value.tolist()) + "\n"
    except ValueError:
        return json.dumps(_json_tree(row), ensure_ascii=False) + "\n"


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
