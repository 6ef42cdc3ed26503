"""Where chat templates are rendered: one process beside this one, which is killed when a template takes too much.

It starts with the first template, serves all of them in turn, and is
started again when one has ended it. In this process a template is a text, and so is what comes of it.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from p3o_jax.inputs.errors import one_line

MEMORY_BYTES = 2**30
"""Address space of the process that renders, of which Python takes a tenth."""
CPU_SECONDS = 2
"""Computing time of one rendering. A published template takes a thousandth of a second, and 50 of them to compile."""
ROOM_CHARACTERS = 2**20
"""A rendered chat has four times the characters of its messages and variables, and this many more, at most."""
_START_SECONDS = 120.0
_WALL_SECONDS = 120.0
"""The limit is on computing time, so that a busy machine refuses nothing; this is for a process that is stuck."""
_MAX_ANSWER_BYTES = 2**31 - 1


class TemplateError(ValueError):
    """What is wrong with a template: a line that goes on after "the chat template"."""


class _Process:
    """A running `template_worker`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "p3o_jax.tokenizers.template_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process
            )
        self._connection = Connection(ours.detach())
        self.owner = os.getpid()
        try:
            if not self._connection.poll(_START_SECONDS):
                raise EOFError
            self._connection.recv_bytes(_MAX_ANSWER_BYTES)
        except (EOFError, OSError) as error:
            self.close()
            raise ChildProcessError("the process that renders chat templates did not start") from error

    def ask(self, request: bytes) -> Any:
        """Its answer, as JSON.

        Raises:
            EOFError: it has ended, or is stuck.
        """
        try:
            self._connection.send_bytes(request)
            if not self._connection.poll(_WALL_SECONDS):
                raise EOFError
            return json.loads(self._connection.recv_bytes(_MAX_ANSWER_BYTES))
        except (OSError, ValueError) as error:
            raise EOFError from error

    def ended(self) -> str:
        """Why it has."""
        code = self._process.poll()
        if code is None:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(1.0)
        if code is None:
            return f"does not end within {_WALL_SECONDS:.0f} s"
        if code == -signal.SIGPROF:
            return f"takes more than {CPU_SECONDS} s of computing time"
        return f"ended its process ({signal.Signals(-code).name if code < 0 else f'status {code}'}): it takes too much"

    def close(self) -> None:
        """Ends it, if it is of this process and not of the one that this was forked from."""
        self._connection.close()
        if self.owner == os.getpid():
            self._process.kill()
            self._process.wait()


_lock = threading.Lock()
_process: _Process | None = None


def render(source: str, variables: Mapping[str, Any]) -> str:
    """A template's text. Safe to call from several threads, which take turns.

    Raises:
        ImportError: jinja2 is not installed.
        TemplateError: the template does not compile, refuses what it is given, or takes too much.
        ChildProcessError: the process that renders does not start.
    """
    global _process
    request = json.dumps([source, dict(variables)]).encode()
    with _lock:
        if _process is None or _process.owner != os.getpid():
            if importlib.util.find_spec("jinja2") is None:
                raise ImportError("No module named 'jinja2': chat templates need: pip install 'p3o_jax[models]'")
            _process = _Process()
        try:
            answer = _process.ask(request)
        except BaseException as error:  # whatever it answers later must not be taken for another's
            ended = _process.ended() if isinstance(error, EOFError) else ""
            _close()
            if ended:
                raise TemplateError(ended) from None
            raise
        if not isinstance(answer, dict) or answer.get("last"):
            _close()
    if not isinstance(answer, dict) or not isinstance(answer.get("text", answer.get("error")), str):
        raise TemplateError("gave no text")
    if "text" not in answer:
        raise TemplateError(one_line(answer["error"], 300))
    return answer["text"]


def _close() -> None:
    global _process
    if _process is not None:
        _process.close()
    _process = None


atexit.register(_close)
