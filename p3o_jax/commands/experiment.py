"""Command lines: an experiment's variants as subcommands, every field of their configuration as a flag."""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import jax
import numpy as np
import tyro

from p3o_jax import program
from p3o_jax.commands.output import closed_output_ends_quietly
from p3o_jax.config import Config
from p3o_jax.devices import processes
from p3o_jax.devices.cache import enable_compilation_cache
from p3o_jax.devices.processes import ElsewhereError
from p3o_jax.devices.profiling import parse_steps
from p3o_jax.runs.preemption import Preempted
from p3o_jax.terminal import escape_warnings, say, shown
from p3o_jax.train import train
from p3o_jax.writers import read_metrics


@dataclass(frozen=True)
class Run:
    """What to run, and where."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    run_dir: Path | None = None
    """Directory of the run. Default: runs/EXPERIMENT/VARIANT/TIME."""
    resume: bool = False
    """Continue the run in --run-dir from its newest whole checkpoint; if there is no run yet, start it."""
    distributed: bool = False
    """This process is one of several hosts (`p3o_jax.devices.processes`); needs --run-dir, the same for all."""
    profile_steps: str = ""
    """A:B: trace rollout steps A to B into the run's plugins/profile/, for Perfetto and TensorBoard."""


def run_experiment(name: str, description: str, variants: Mapping[str, Config]) -> None:
    """`python exp.py [VARIANT] [--overrides]`; without a variant, all of them, one after another.

    Exits with one line and status 1 or, if it is the command line that is wrong, 2; with status 0 if it was asked to
    end and can be continued.
    """
    escape_warnings()
    with closed_output_ends_quietly():
        _run_experiment(name, description, variants)


def _run_experiment(name: str, description: str, variants: Mapping[str, Config]) -> None:
    arguments = sys.argv[1:]
    try:
        runs = parse(_typed(), description, variants, arguments)
        if any(run.distributed for run in runs.values()):
            processes.initialize()
        enable_compilation_cache()
        for name_of_library in ("absl", "asyncio"):  # a save that fails is an error of ours, in one line
            logging.getLogger(name_of_library).setLevel(logging.CRITICAL)
        run_dirs, seconds = {}, {}
        for variant, run in runs.items():
            run_dirs[variant] = run.run_dir or Path("runs", name, variant, time.strftime("%Y-%m-%d_%H-%M-%S"))
            say(f"{name} {variant}: {run_dirs[variant]}")
            started = time.perf_counter()
            steps = parse_steps(run.profile_steps)
            train(run.config, run_dirs[variant], resume=run.resume, argv=program.command(), profile_steps=steps)
            seconds[variant] = time.perf_counter() - started
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError, FloatingPointError, ElsewhereError) as error:
        sys.exit(shown(f"error: {error}", sys.stderr))
    except Preempted as ending:
        say(ending)
        sys.exit(0)
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        # The others may be gone: nothing that would wait for them, not even at exit.
        processes.end_at_once(error)
    except KeyboardInterrupt:
        sys.exit(
            "interrupted; the same command with --resume and the run's --run-dir continues from its last checkpoint"
        )
    if jax.process_index() == 0:
        logdir = Path(os.path.commonpath([run_dir.absolute() for run_dir in run_dirs.values()]))
        print(f"\n{summary(run_dirs, seconds)}\n")
        tensorboard = os.path.relpath(Path(sys.executable).parent / "tensorboard")
        print(f"Curves: {tensorboard} --logdir {os.path.relpath(logdir)}")


def _typed() -> str:
    """Says what starts this program: `python exp.py`, `python -m experiments.NAME`."""
    typed = program.command()
    of_python = typed[1:3] if typed[1] == "-m" else typed[1:2]
    return shlex.join(["python", *of_python])


def parse(command: str, description: str, variants: Mapping[str, Config], arguments: Sequence[str]) -> dict[str, Run]:
    """The runs that the arguments of a command ask for, by variant."""
    if arguments and arguments[0] in ("-h", "--help"):
        known = "\n".join(f"  {variant:12} {describe(config)}" for variant, config in variants.items())
        print(f"{description}\n\nusage: {command} [VARIANT] [--flags]\n\nvariants (without one, all):\n{known}\n")
        print(f"flags: {command} {next(iter(variants))} --help")
        sys.exit(0)
    chosen, flags = (arguments[:1], arguments[1:]) if arguments and arguments[0] in variants else ([], arguments)
    if flags and not flags[0].startswith("-"):
        raise ValueError(f"unknown variant {flags[0]!r}; choose from {', '.join(variants)}")
    runs = {
        variant: tyro.cli(
            Run,
            default=Run(with_parts(variants[variant], flags)),
            prog=f"{command} {variant}",
            description=f"{description} This variant: {describe(variants[variant])}.",
            args=flags,
            config=(tyro.conf.AvoidSubcommands,),
        )
        for variant in chosen or variants
    }
    for run in runs.values():
        parse_steps(run.profile_steps, run.config.num_steps)
        if run.run_dir is None and (run.resume or run.distributed):
            raise ValueError("--resume and --distributed need --run-dir")
        if run.run_dir is not None and len(runs) > 1:
            raise ValueError("--run-dir needs a variant: each variant is a run of its own")
    return runs


def with_parts(of: Any, flags: Sequence[str], prefix: str = "--") -> Any:
    """The same dataclass, with those parts that are None but that a flag is about; for --help, with all it can have.

    `--sampler-mesh.tensor 4` gives a run that has no `sampler_mesh` one with `tensor` 4 and otherwise its defaults.
    """
    asked = {"-h", "--help"} & set(flags)
    hints = get_type_hints(type(of))
    for field in fields(of):
        name, part = f"{prefix}{field.name.replace('_', '-')}.", getattr(of, field.name)
        named = any(flag.replace("_", "-").startswith(name) for flag in flags)
        kinds: list[Any] = [kind for kind in get_args(hints[field.name]) if is_dataclass(kind)]
        if part is None and len(kinds) == 1 and (named or asked):
            required = [each.name for each in fields(kinds[0]) if each.default is each.default_factory is MISSING]
            part = kinds[0](**dict.fromkeys(required, tyro.MISSING))
        if is_dataclass(part):
            with suppress(*[ValueError] if asked else []):  # parts that exclude each other
                of = replace(of, **{field.name: with_parts(part, flags, name)})
    return of


def describe(config: Config) -> str:
    """A variant in a few words."""
    return (
        f"{type(config.objective).__name__} on {config.task.name}, sampled at temperature {config.sampler_temperature}"
    )


def summary(run_dirs: Mapping[str, Path], seconds: Mapping[str, float]) -> str:
    """A table of what the runs reached, from their metrics."""
    header = ("variant", "pass@1 before", "after", "greedy", "ESS mean", "ESS min", "minutes")
    rows: list[tuple[str, ...]] = [header]
    for variant, run_dir in run_dirs.items():
        lines = read_metrics(run_dir)

        def series(suffix: str, lines: list = lines) -> list[float]:
            return [value for line in lines for tag, value in line.items() if tag.endswith(suffix)] or [math.nan]

        rewards, ess = series("/pass@1"), series("policy/ess")
        values = (rewards[0], rewards[-1], series("/greedy")[-1], np.mean(ess), np.min(series("policy/ess_min")))
        rows.append((variant, *(f"{value:.3f}" for value in values), f"{seconds[variant] / 60:.1f}"))
    return "\n".join(
        "  ".join(f"{cell:>{len(title)}}" for cell, title in zip(row, header, strict=True)) for row in rows
    )
