"""`p3o`: the command line for models and runs. Each verb is a module of `p3o_jax.commands`."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from p3o_jax.commands.output import closed_output_ends_quietly
from p3o_jax.terminal import escape_warnings, shown

VERBS = ("compile", "convert", "eval", "export", "init", "probe", "report", "runs", "sample")


def _module(verb: str) -> ModuleType:
    return importlib.import_module(f"p3o_jax.commands.{verb}")


def usage() -> str:
    """Every verb, with the first line of its module."""
    about = {name: _module(name).__doc__.splitlines()[0] for name in VERBS}
    verbs = "\n".join(f"  {name:9} {line}" for name, line in about.items())
    return f"usage: p3o VERB ...\n\n{verbs}\n\np3o VERB --help says what a verb takes."


def main() -> None:
    """Entry of `p3o`; exits with one line if it cannot do what it is asked."""
    escape_warnings()
    with closed_output_ends_quietly():
        _main()


def _main() -> None:
    verb, *arguments = sys.argv[1:] or ["--help"]
    if verb in ("-h", "--help"):
        print(usage())
        return
    if verb not in VERBS:
        sys.exit(f"error: unknown verb {verb!r}\n{usage()}")
    try:
        _module(verb).run(arguments)
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        sys.exit(shown(f"error: {error}", sys.stderr))
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    main()
