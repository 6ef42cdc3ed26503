"""What a command line owes to whoever reads its output."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def closed_output_ends_quietly() -> Iterator[None]:
    """A block whose output may be closed before it ends, as by `| head`: it then ends too, with status 141."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # What is still in the buffer goes nowhere, rather than into an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
