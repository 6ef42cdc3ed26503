"""Traces of chosen steps, for TensorBoard's profile plugin, Perfetto and XProf."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType

import jax


def parse_steps(text: str, num_steps: int | None = None) -> range:
    """`A:B`, rollout steps A to B, both of them traced; nothing for no text.

    Raises:
        ValueError: anything else, or steps that a run of `num_steps` does not make.
    """
    if not text:
        return range(0)
    match = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(f"--profile-steps {text}: give A:B, rollout steps from 1 with A <= B, such as 3:5")
    if num_steps is not None and last > num_steps:
        raise ValueError(f"--profile-steps {text}: the run has {num_steps} steps")
    return range(first, last + 1)


class Profiler:
    """Traces some steps of a run into RUN_DIR/plugins/profile/TIME: HOST.xplane.pb, which TensorBoard's profile plugin
    opens (pip install xprof), and HOST.trace.json.gz, which ui.perfetto.dev opens.

    Every process traces its own host and devices. Python calls are left out, which would swamp the phases of a step.
    """

    def __init__(self, run_dir: Path, steps: range):
        self._dir, self._steps, self._running = run_dir, steps, False

    def before(self, step: int) -> None:
        """Called before each step."""
        if step in self._steps and not self._running:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(self._dir, profiler_options=options)
            self._running = True

    def after(self, step: int) -> None:
        """Called after each step, when nothing of it is left to do on the devices."""
        if self._running and step + 1 not in self._steps:
            self._stop()

    def _stop(self) -> None:
        self._running = False
        jax.profiler.stop_trace()

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Writes what was traced of a run that ends early."""
        if self._running:
            self._stop()
