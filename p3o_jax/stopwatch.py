"""How long the phases of a step take."""

from __future__ import annotations

import time

from p3o_jax.types import Rollout


class Stopwatch:
    """Seconds of the phases of a step."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Ends a phase."""
        now = time.perf_counter()
        self.seconds[phase], self._last = now - self._last, now

    def metrics(self, rollout: Rollout, epochs: int) -> dict[str, float]:
        """Phase times, and response tokens a second on this process."""
        tokens = int(rollout.response_length.sum())
        return {f"time/{phase}_seconds": seconds for phase, seconds in self.seconds.items()} | {
            "time/sampler_tokens_per_second": tokens / self.seconds["sample"],
            "time/learner_tokens_per_second": tokens * epochs / self.seconds["learn"],
        }
