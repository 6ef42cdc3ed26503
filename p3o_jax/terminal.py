r"""Text that a model, a file or another program wrote, as it may be shown: a terminal obeys what stands in it.

Control sequences in a completion or in a row of data can move the cursor, rename the window or, in some terminals, type
for the user. Where the output is a terminal they are shown escaped (`\x1b[2J`); into a file or a pipe they go as they
are.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

_KEPT = "\n\t"
_CONTROLS = [
    *range(0x20),  # C0, of which ESC begins the sequences, and a carriage return writes over the line
    *range(0x7F, 0xA0),  # DEL, and C1, with a CSI of one character
    *range(0x202A, 0x202F),  # changes of the direction of writing, which show another text than there is
    *range(0x2066, 0x206A),
]
_ESCAPES = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS if chr(code) not in _KEPT
}


def escaped(text: str) -> str:
    """A text with its control characters, other than new lines and tabs, as Python writes them."""
    return text.translate(_ESCAPES)


def shown(text: object, stream: TextIO | None = None) -> str:
    """What of a text goes to a stream: escaped if that is a terminal. Default: standard output."""
    stream = sys.stdout if stream is None else stream
    return escaped(str(text)) if stream is not None and stream.isatty() else str(text)


def say(text: object, stream: TextIO | None = None) -> None:
    """Prints a line, or several, at once."""
    stream = sys.stdout if stream is None else stream
    print(shown(text, stream), file=stream, flush=True)


def escape_warnings() -> None:
    """Makes what this package logs go to a terminal escaped, whichever handler shows it."""
    before = logging.getLogRecordFactory()

    def record(*arguments: Any, **options: Any) -> logging.LogRecord:
        made = before(*arguments, **options)
        if made.name.startswith("p3o_jax"):
            made.msg, made.args = shown(made.getMessage(), sys.stderr), ()
        return made

    logging.setLogRecordFactory(record)
