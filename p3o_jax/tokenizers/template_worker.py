"""The process that renders chat templates: `python -m p3o_jax.tokenizers.template_worker FD`.

A template is a program of strangers. jinja2's sandbox keeps it from files and attributes, not from memory and time:
`'x' * 10**9` is computed when a template is compiled, and `10**10**10` is one instruction that nothing interrupts. So
it runs here, within the limits of `template_process`, which the kernel keeps. Requests and answers are JSON: whoever
asked need not trust this process.
"""

from __future__ import annotations

import datetime
import functools
import json
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from p3o_jax.inputs.errors import one_line
from p3o_jax.tokenizers.template_process import CPU_SECONDS, MEMORY_BYTES, ROOM_CHARACTERS

_KEPT_BYTES = 2**28
"""A process that holds so much more than at its start is not used again: what one template leaves behind is not
another's loss."""


class _Generation(Extension):
    """`{% generation %}`, with which templates mark what the assistant said: its contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """The contents, in a scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:  # jinja2's own escapes HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@functools.lru_cache(8)
def _compiled(source: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def render(source: str, variables: dict[str, Any], size: int) -> dict[str, str]:
    """{"text": a rendered chat}, or {"error": why there is none}, in a line that goes on after "the chat template".

    Args:
        source: of the template.
        variables: what it is given.
        size: characters of these.
    """
    room, pieces = 4 * size + ROOM_CHARACTERS, []
    try:
        for piece in _compiled(source).generate(variables):
            room -= len(piece)
            if room < 0:
                return {"error": f"renders more than {4 * size + ROOM_CHARACTERS} characters of {size}"}
            pieces.append(piece)
        text = "".join(pieces)
        text.encode()  # what is no Unicode could not be tokenized
        return {"text": text}
    except TemplateSyntaxError as error:
        return {"error": f"is not jinja2: line {error.lineno}: {one_line(error.message)}"}
    except TemplateError as error:
        return {"error": f"refuses the messages: {one_line(error)}"}
    except MemoryError:
        return {"error": f"takes more than {MEMORY_BYTES >> 20} MB"}
    except Exception as error:
        return {"error": f"fails on the messages: {type(error).__name__}: {one_line(error)}"}


def _held_bytes() -> int:
    """Address space that is in use; 0 where the system does not say."""
    try:  # not ru_maxrss, which begins with what the process had that started this one
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def main() -> None:
    """Answers (template, variables) with what `render` makes of them, until nobody asks any more or a limit ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks decides when this ends
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with suppress(ValueError, OSError):  # where a lower limit holds already, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    at_start = _held_bytes()
    connection = Connection(int(sys.argv[1]))
    connection.send_bytes(b"ready")
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            asked = connection.recv_bytes()
            source, variables = json.loads(asked)
            # The kernel keeps it, whatever instruction this process is in.
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            answer: dict[str, Any] = render(source, variables, len(asked) - len(source))
            answer["last"] = _held_bytes() - at_start > _KEPT_BYTES
            text = json.dumps(answer).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(text)


if __name__ == "__main__":
    main()
