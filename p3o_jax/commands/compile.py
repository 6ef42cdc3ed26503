"""What a run's programs need on a TPU topology that need not be there: memory, collectives, operations."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

USAGE = "p3o compile EXPERIMENT [VARIANT] --topology v5p:4x4x4 [--num-slices 2] [--only sampler] [--overrides]"


def run(arguments: Sequence[str]) -> None:
    """Prints, for each variant asked for, what its programs need on a topology; exits with 1 if one does not fit."""
    import jax

    from p3o_jax.commands.experiment import parse
    from p3o_jax.commands.lookup import find_experiment
    from p3o_jax.forecast import programs as compile_lib

    options = argparse.ArgumentParser(prog="p3o compile", usage=USAGE, allow_abbrev=False)
    options.add_argument(
        "experiment", help="a file, or a name in experiments: mine, mine.py, quickstart", metavar="EXPERIMENT"
    )
    options.add_argument(
        "--topology", required=True, help="such as v5e:4x4, v5p:4x4x4, v6e:16x16, tpu7x:2x2x1", metavar="KIND:SHAPE"
    )
    options.add_argument(
        "--num-slices", type=int, default=1, help="slices of that topology, joined by a network", metavar="N"
    )
    options.add_argument("--only", choices=("update", "sampler"), help="compile one of the two programs")
    if arguments and arguments[0].startswith("-") and arguments[0] not in ("-h", "--help"):
        raise ValueError(f"compile: EXPERIMENT comes before {arguments[0]}, since a flag may be the experiment's own")
    chosen, rest = options.parse_known_args(arguments)

    # The real device is the CPU, whatever this machine has; the described ones are only compiled for.
    jax.config.update("jax_platforms", "cpu")
    found = find_experiment(chosen.experiment)
    runs = parse(f"p3o compile {chosen.experiment}", found.description, found.variants, rest)
    devices = compile_lib.topology(chosen.topology, chosen.num_slices)
    programs: list[compile_lib.Program] = [chosen.only] if chosen.only else ["update", "sampler"]
    fits = True
    for variant, asked in runs.items():
        print(f"{chosen.experiment} {variant} on {chosen.num_slices} x {chosen.topology}")
        for line in compile_lib.report(asked.config, devices, programs):
            print(line, flush=True)
            fits &= "does not fit" not in line
        print()
    if not fits:
        sys.exit(1)
