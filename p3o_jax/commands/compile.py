"""What a run's programs need on a TPU topology that need not be there: memory, collectives, operations."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

USAGE = "p3o compile EXPERIMENT [VARIANT] --topology v5p:4x4x4 [--num-slices 2] [--only sampler] [--overrides]"


def run(arguments: Sequence[str]) -> None:
    """Prints, for each variant asked for, what its programs need on a topology; exits with 1 if one does not fit.

    Experiments are found in the working directory.
    """
    import jax

    from p3o_jax.commands.experiment import parse
    from p3o_jax.forecast import programs as compile_lib

    options = argparse.ArgumentParser(prog="p3o compile", usage=USAGE)
    options.add_argument("experiment", help="a module of experiments/, such as quickstart or shapes")
    options.add_argument("--topology", required=True, help="such as v5e:4x4, v5p:4x4x4, v6e:16x16, tpu7x:2x2x1")
    options.add_argument("--num-slices", type=int, default=1, help="slices of that topology, joined by a network")
    options.add_argument("--only", choices=("update", "sampler"), help="compile one of the two programs")
    chosen, rest = options.parse_known_args(arguments)

    # The real device is the CPU, whatever this machine has; the described ones are only compiled for.
    jax.config.update("jax_platforms", "cpu")
    sys.path.insert(0, os.getcwd())
    module = importlib.import_module(f"experiments.{chosen.experiment}")
    runs = parse(chosen.experiment, module.__doc__.splitlines()[0], module.VARIANTS, rest)
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
