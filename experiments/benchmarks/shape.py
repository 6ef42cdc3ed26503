"""The model and the batch that the learners are compared on, and how they are timed. Imports nothing installed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

LAYERS, WIDTH, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 256, 1024, 8, 4, 32, 512
ROWS, PROMPT, RESPONSE, GROUP = 16, 64, 64, 4
TOKENS = ROWS * (PROMPT + RESPONSE)
"""Tokens of an update, prompts included."""


def seconds(step: Callable[[], None], repetitions: int = 3) -> float:
    """Of one step, which waits for its result."""
    started = time.perf_counter()
    for _ in range(repetitions):
        step()
    return (time.perf_counter() - started) / repetitions


def serve(step: Callable[[], None]) -> None:
    """Warms up, then measures once for every line it is sent, so that another process can take turns with this one."""
    step()
    step()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(seconds(step), flush=True)
