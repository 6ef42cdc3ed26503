"""`p3o`: the command line for models and runs. Its verbs are the modules of `p3o_jax.commands`."""

from __future__ import annotations

import importlib
import pkgutil
import sys

from p3o_jax import commands
from p3o_jax.output import closed_output_ends_quietly


def usage() -> str:
    """Every verb, with the first line of its module."""
    names = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    about = {name: importlib.import_module(f"{commands.__name__}.{name}").__doc__.splitlines()[0] for name in names}
    verbs = "\n".join(f"  {name:9} {line}" for name, line in about.items())
    return f"usage: p3o VERB ...\n\n{verbs}\n\np3o VERB --help says what a verb takes."


def main() -> None:
    """Entry of `p3o`; exits with one line if it cannot do what it is asked."""
    with closed_output_ends_quietly():
        _main()


def _main() -> None:
    verb, *arguments = sys.argv[1:] or ["--help"]
    if verb in ("-h", "--help"):
        print(usage())
        return
    if verb not in [module.name for module in pkgutil.iter_modules(commands.__path__)]:
        sys.exit(f"error: unknown verb {verb!r}\n{usage()}")
    try:
        importlib.import_module(f"{commands.__name__}.{verb}").run(arguments)
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    main()
