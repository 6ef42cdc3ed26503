"""What a model or a file wrote is shown on a terminal, not obeyed by it; into a pipe it goes as it is."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import subprocess
import sys

import pytest

from p3o_jax.terminal import escape_warnings, escaped, say

NASTY = "\x1b]0;title\x07\x1b[2J\x9b31m\rover\x08\x7f\u202e"
SHOWN = "\\x1b]0;title\\x07\\x1b[2J\\x9b31m\\x0dover\\x08\\x7f\\u202e"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_controls_are_escaped_and_text_is_not():
    assert escaped(NASTY) == SHOWN
    assert escaped("a\tb\nπ é 漢字 🟦 \u200f") == "a\tb\nπ é 漢字 🟦 \u200f"
    assert all(ord(c) >= 32 or c in "\n\t" for c in escaped("".join(map(chr, range(0x3000)))))


def test_only_a_terminal_is_spared():
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        say(NASTY, stream)
    assert (terminal.getvalue(), pipe.getvalue()) == (SHOWN + "\n", NASTY + "\n")


def test_what_is_logged(monkeypatch):
    factory = logging.getLogRecordFactory()
    try:
        escape_warnings()
        monkeypatch.setattr(sys, "stderr", Terminal())
        made = logging.getLogger("p3o_jax.x").makeRecord("p3o_jax.x", 30, "f", 1, "a %s", (NASTY,), None)
        assert made.getMessage() == f"a {SHOWN}"
        assert logging.getLogger("x").makeRecord("x", 30, "f", 1, "%s", (NASTY,), None).getMessage() == NASTY
    finally:
        logging.setLogRecordFactory(factory)


def on_a_terminal(*command: str) -> tuple[str, int]:
    """What a command writes to a terminal, and its status."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "p3o_jax.commands.main", *command],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"XLA_FLAGS": ""},
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        said += part
    os.close(ours)
    return said.decode(), process.wait()


@pytest.mark.slow
def test_runs_and_errors_on_a_terminal(tmp_path):
    run = tmp_path / "runs" / f"a{NASTY}"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    status = {"state": "failed", "reason": NASTY, "step": 3, "num_steps": 9, "host": "a", "pid": 1, "time": 0.0}
    (run / "status.json").write_text(json.dumps(status))
    said, code = on_a_terminal("runs", str(tmp_path / "runs"))
    assert code == 0 and said.count(SHOWN) == 2 and "\x1b" not in said
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"question": NASTY, "answer": NASTY}) + "\n")
    said, code = on_a_terminal("convert", "gsm8k", str(data), str(tmp_path / f"{NASTY}.jsonl"))
    assert code == 1 and said.startswith("error: ") and "\x1b" not in said
