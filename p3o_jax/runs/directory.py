"""The directory of a run: what was run, where, and its results.

config.json        the complete configuration
tokenizer.json     the tokenizer of a model that is trained from scratch, of characters or bytes
command.txt        the command of every start, one a line
environment.json   versions, devices, commit, where the program's modules are; one record a start
status.json        what the run is doing (`runs.status`)
lock               held by the process that writes (by the first of several hosts)
metrics.jsonl, events.out.tfevents.*, rollouts/, evaluations/, checkpoints/, nonfinite/     as the run writes them
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import jax

from p3o_jax import program

MAY_DIFFER = (
    "num_steps", "evaluate_every", "save_every", "keep_checkpoints", "keep_every", "write_rollouts_every",
    "watchdog_seconds", "watchdog_ends", "max_skipped_updates", "roll_back",
    "mesh", "sampler_mesh", "sampler_devices", "micro_batches",
)  # fmt: skip
"""Fields that a resumed run may change: how long it is, what it writes when, what it does when things go wrong, and how
its devices share the work, which changes results by rounding only."""


@dataclass(frozen=True)
class RunDirectory:
    """A run directory; one that was opened is held against other processes until its block, or the process, ends."""

    path: Path
    lock: IO[str] | None = None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        return self.path / "checkpoints"

    def nonfinite_batch(self, step: int) -> Path:
        """Where the batch of a step goes that has an update which was skipped (`nonfinite.read_dump`)."""
        return self.path / "nonfinite" / f"step_{step}.npz"

    def evaluation(self, step: int) -> Path:
        """Where the evaluations of a step go."""
        return self.path / "evaluations" / f"step_{step}"

    @classmethod
    def open(
        cls,
        path: Path,
        config: Mapping[str, Any],
        argv: Sequence[str],
        *,
        resume: bool = False,
        may_differ: Sequence[str] = MAY_DIFFER,
        tokenizer: Mapping[str, Any] | None = None,
        as_written_now: Callable[[Any], Any] = lambda stored: stored,
    ) -> RunDirectory:
        """Starts a run in a new directory, or continues the one in it.

        Called by all processes, after `jax.distributed.initialize`; only process 0 looks and writes.

        Args:
            path: the directory; it must not exist or be empty, unless resumed.
            config: the complete configuration, as JSON values.
            argv: the command line.
            resume: whether to continue; if there is no run yet, one is started, so that the command that starts a
                run can be the one that continues it.
            may_differ: fields, by dotted name, in which, and in what is below which, a resumed run's configuration may
                differ.
            tokenizer: as JSON values, if it is no published one.
            as_written_now: rewrites a configuration that an earlier version stored.

        Raises:
            FileExistsError: the directory holds a run, or something else.
            BlockingIOError: another process is writing it.
            ValueError: the run to be resumed has another configuration, or its records are damaged.
        """
        directory = cls(Path(path))
        if jax.process_index() != 0:
            return directory
        if resume and (directory.path / "config.json").exists():
            directory._check_same_run(config, may_differ, as_written_now)
        else:
            directory._check_free()
        try:
            directory.path.mkdir(parents=True, exist_ok=True)
            directory = cls(directory.path, _lock(directory.path))
            directory._record(config, argv, tokenizer)
        except BlockingIOError:
            raise
        except OSError as error:
            raise type(error)(f"cannot write the run directory {path}: {error}") from error
        return directory

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.lock is not None:
            self.lock.close()

    def _check_free(self) -> None:
        if (self.path / "config.json").exists():
            raise FileExistsError(
                f"{self.path} holds another run: continue it with --resume, or give another --run-dir"
            )
        if self.path.exists() and not (
            self.path.is_dir() and all(path.name in _OF_A_START for path in self.path.iterdir())
        ):
            raise FileExistsError(f"{self.path} exists and is not a run: give another --run-dir")

    def _check_same_run(
        self, config: Mapping[str, Any], may_differ: Sequence[str], as_written_now: Callable[[Any], Any]
    ) -> None:
        path = self.path / "config.json"
        try:
            before = json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        # As JSON, so that tuples are lists on both sides.
        before, now = (json.loads(json.dumps(values)) for values in (as_written_now(before), config))
        changes = [
            f"{name} (was {old!r}, now {new!r})"
            for name, old, new in _differences(before, now)
            if not any(f"{name}.".startswith(f"{free}.") for free in may_differ)
        ]
        if changes:
            raise ValueError(
                f"{self.path} was started with another configuration: {', '.join(changes)}; resume it with the same "
                "one, or give another --run-dir"
            )

    def _record(self, config: Mapping[str, Any], argv: Sequence[str], tokenizer: Mapping[str, Any] | None) -> None:
        as_json = json.dumps(config, indent=2, allow_nan=False) + "\n"  # before anything is written
        with open(self.path / "command.txt", "a", encoding="utf-8") as file:
            file.write(shlex.join(argv) + "\n")
        starts_path = self.path / "environment.json"
        try:
            starts = json.loads(starts_path.read_bytes()) if starts_path.exists() else []
        except ValueError as error:
            raise ValueError(f"{starts_path} is damaged: {error}; move it away to go on without it") from error
        write_atomically(starts_path, json.dumps([*starts, environment()], indent=2) + "\n")
        if tokenizer is not None:
            write_atomically(self.path / "tokenizer.json", json.dumps(tokenizer) + "\n")
        # Last: a directory with a config.json is a run.
        write_atomically(self.path / "config.json", as_json)


def _lock(path: Path) -> IO[str]:
    """A file of a directory, locked until it is closed or the process ends, however it ends."""
    file = open(path / "lock", "a")  # noqa: SIM115 -- it stays open
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        message = (
            f"{path} is being written by another process, which its status.json names: stop it, or let it end; if its "
            f"host is gone, remove {path / 'lock'}"
        )
        raise BlockingIOError(error.errno, message) from error
    except OSError:
        pass  # a file system without locks
    return file


_OF_A_START = (
    "lock",
    "command.txt",
    "environment.json",
    "environment.json.tmp",
    "config.json.tmp",
    "tokenizer.json",
    "tokenizer.json.tmp",
)
"""What a start that was cut short leaves: not a run yet."""
_ABSENT = "absent"


def _differences(before: Any, now: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted names of the values that differ, with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            name = f"{prefix}.{key}" if prefix else key
            yield from _differences(before.get(key, _ABSENT), now.get(key, _ABSENT), name)
    elif before != now:
        yield prefix, before, now


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that a crash leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def environment() -> dict[str, Any]:
    """What a result can depend on besides the configuration. Starts the JAX backend."""
    devices, directory = jax.devices(), program.module_directory()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "commit": _commit(),
        "program": {
            "module": program.module_name(),
            "directory": None if directory is None else str(directory),  # that its modules are found from
            "working_directory": os.getcwd(),
        },
        "backend": jax.default_backend(),
        "devices": {"kind": devices[0].device_kind, "count": len(devices), "processes": jax.process_count()},
        "variables": {
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(("JAX_", "XLA_", "LIBTPU_", "NCCL_"))
        },
        "packages": _packages(),
    }


def module_directory_of(run_dir: Path) -> str | None:
    """Reads where the modules of a run's last start were found; None: it does not say, or not of this machine."""
    try:
        directory = json.loads((run_dir / "environment.json").read_bytes())[-1]["program"]["directory"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return directory if isinstance(directory, str) and os.path.isabs(directory) and os.path.isdir(directory) else None


@cache
def _packages() -> dict[str, str]:
    """Versions by name. Reading them takes a while: every package's description is parsed."""
    described = [distribution.metadata for distribution in metadata.distributions()]
    return dict(sorted((each["Name"], each["Version"]) for each in described if each["Name"]))


def _commit() -> dict[str, Any] | None:
    """The commit this package was run from; None outside a repository."""
    package = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # not some repository around site-packages
        return {"hash": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None
