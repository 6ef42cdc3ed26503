"""Checkpoints by Orbax: saved in the background, committed atomically, checked before they are believed.

A checkpoint is a folder named by its step with up to three items: `state`, the learner's (parameters and adapters,
moments, counts), `past`, the older policies that may still sample, and `meta`, what the loop holds on the host. Random
numbers are functions of (seed, step, prompt, sample), so no generator is saved; rollouts never outlive their step, so
neither are they; the sampler's newest weights are made anew from the state.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from p3o_jax.devices.processes import agreed, fail_together
from p3o_jax.runs import integrity
from p3o_jax.terminal import say

_OVERHEAD_BYTES = 2**18
"""Of a checkpoint's many small files."""
COMMIT_SECONDS = 300
"""How long hosts wait for each other's part of a checkpoint."""


class Restored(NamedTuple):
    """A checkpoint's contents."""

    step: int
    state: Any
    past: dict[int, Any]  # by policy version
    loop: dict[str, Any]


class CheckpointError(OSError):
    """A checkpoint could not be written."""


def steps_in(directory: Path) -> list[int]:
    """The steps of the checkpoints in a directory, which need not exist; ascending."""
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit() and path.is_dir())


def newest_step(directory: Path) -> int:
    """The step of the newest complete checkpoint in a directory, which need not exist; 0 if there is none."""
    return max(steps_in(directory), default=0)


def newest_whole_step(directory: Path) -> int:
    """The step of the newest checkpoint in a directory whose files are what was written; 0 if there is none."""
    steps = reversed(steps_in(directory))
    return next((step for step in steps if integrity.damage(directory / str(step)) is None), 0)


def best_step(directory: Path) -> int | None:
    """The step of the checkpoint with the highest score in a directory; None if none has one."""
    scores = {step: _score(directory / str(step)) for step in steps_in(directory)}
    return max((step for step in scores if not math.isnan(scores[step])), key=scores.__getitem__, default=None)


class Checkpoints:
    """The checkpoints of a run. Every process must make each call.

    Kept are the newest few, those of every so many steps, and the one with the highest score. An older one is removed
    after a newer one is committed.
    """

    def __init__(self, directory: Path, *, keep: int = 2, keep_every: int = 0):
        """
        Args:
            directory: made if it does not exist.
            keep: how many of the newest are kept; two, so that one is left if the newest is damaged.
            keep_every: checkpoints at multiples of it are kept too. 0: none.
        """
        self.directory = directory.absolute()
        self._keep, self._keep_every = keep, keep_every
        self._scores = {step: _score(self.directory / str(step)) for step in steps_in(self.directory)}
        self._saving: int | None = None
        self.newest: int | None = None
        """The step of what was last saved, begun to be, or restored."""
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self,  # see should_preserve
            cleanup_tmp_directories=True,  # of saves that were cut short
            lightweight_initialize=True,  # reads nothing of checkpoints that may be damaged
            async_options=ocp.AsyncOptions(timeout_secs=COMMIT_SECONDS, post_finalization_callback=self._before_commit),
        )
        with fail_together():
            try:
                self._manager = ocp.CheckpointManager(self.directory, options=options)
            except OSError as error:
                raise CheckpointError(f"cannot use {self.directory}: {error.strerror or error}") from error

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Which checkpoints are kept, of all there are, ascending: Orbax's `PreservationPolicy`."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        wanted = set(steps[-self._keep :])
        if self._keep_every:
            wanted |= {step for step in steps if step % self._keep_every == 0}
        scored = [step for step in steps if not math.isnan(self._scores.get(step, math.nan))]
        wanted |= set(sorted(scored, key=lambda step: (self._scores[step], step))[-1:])
        return [step in wanted for step in steps]

    def save(self, step: int, state: Any, past: Mapping[int, Any], loop: Mapping[str, Any], score: float) -> None:
        """Copies to the host and writes in the background; waits only for a save that is still being written.

        Args:
            step: rollout steps made.
            state: the learner's.
            past: what is remembered of older policies, by version.
            loop: what the loop holds on the host, the same on every process, as JSON values.
            score: of an evaluation at this step, the higher the better; NaN: there was none.

        Raises:
            CheckpointError: this one, or the one before, cannot be written.
        """
        self.wait()
        self._check_space(step, sum(leaf.nbytes for leaf in jax.tree.leaves((state, past))))
        meta = {
            "loop": dict(loop),
            "score": None if math.isnan(score) else score,
            "state": integrity.fingerprints(state),
            "past": {str(version): integrity.fingerprints(weights) for version, weights in past.items()},
        }
        self._scores[step] = score
        self.newest = self._saving = step
        items = {"state": ocp.args.StandardSave(state), "meta": ocp.args.JsonSave(meta)}
        if past:
            items["past"] = ocp.args.StandardSave({str(version): weights for version, weights in past.items()})
        with self._naming():
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    @property
    def busy(self) -> bool:
        """Whether a save is still being written, as this process sees it."""
        return self._saving is not None and self._manager.is_saving_in_progress()

    def check(self) -> None:
        """Raises CheckpointError if a save that has ended in the background failed; does not wait."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        """Until everything is committed.

        Raises:
            CheckpointError: what is being saved cannot be written.
        """
        with self._naming():
            self._manager.wait_until_finished()
        self._saving = None

    def restore(
        self,
        abstract_state: Any,
        abstract_weights: Any,
        good: Callable[[Mapping[str, Any]], bool] = lambda loop: True,
    ) -> Restored | None:
        """The newest checkpoint that is whole, its arrays placed as the abstract ones say; None if there is none.

        One that is not whole is said to be so, and put aside as `STEP.damaged`. Those newer than the one that is
        restored are otherwise removed: their steps will be made again.

        Args:
            abstract_state: shapes, dtypes and shardings of the state.
            abstract_weights: those of what is remembered of one policy.
            good: which are wanted, by what the loop held.

        Raises:
            CheckpointError: there are checkpoints, but none that is whole.
        """
        self.wait()
        damaged: dict[int, str] = {}
        seen = json.dumps(steps_in(self.directory)) if jax.process_index() == 0 else None
        for step in reversed(json.loads(agreed(seen) or "[]")):  # what process 0 sees, where file systems lag
            found = self._try(step, abstract_state, abstract_weights, good)
            if isinstance(found, Restored):
                self._abandon(found.step, damaged)
                return found
            if found is not None:
                damaged[step] = found
                self._say(f"warning: checkpoint {self.directory / str(step)} is damaged: {found}")
        if damaged:
            looked = "; ".join(f"{step}: {reason}" for step, reason in damaged.items())
            raise CheckpointError(f"no checkpoint in {self.directory} can be restored ({looked})")
        return None

    def _try(self, step: int, abstract_state: Any, abstract_weights: Any, good: Callable) -> Restored | str | None:
        """A checkpoint's contents, what is wrong with them, or None if it is not wanted."""
        directory = self.directory / str(step)
        problem = agreed(integrity.damage(directory, jax.process_index(), jax.process_count()))
        if problem is not None:
            return problem
        state: Any = None
        past: dict[str, Any] = {}
        meta: dict[str, Any] = {}
        # By handlers rather than the manager, which waits for the other processes: one may fail where another does not.
        try:
            meta = _read_meta(directory)
            if good(meta["loop"]):
                arrays = ocp.StandardCheckpointHandler()
                state = arrays.restore(directory / "state", args=ocp.args.StandardRestore(abstract_state))
                versions = {version: abstract_weights for version in meta["past"]}
                wanted = ocp.args.StandardRestore(versions)
                past = arrays.restore(directory / "past", args=wanted) if versions else {}
        except Exception as error:  # of several libraries; whatever it is, this one is no use
            problem = _one_line(error)
        problem = agreed(problem)
        if problem is not None or state is None:
            return problem
        for item, tree, recorded in [("state", state, meta["state"])] + [
            (f"past policy {version}", past[version], prints) for version, prints in meta["past"].items()
        ]:
            different = integrity.difference(recorded, tree)
            if different is not None:
                return f"{item}: {different} is not what was saved"
        return Restored(step, state, {int(version): weights for version, weights in past.items()}, meta["loop"])

    def _abandon(self, step: int, damaged: Mapping[int, str]) -> None:
        """Puts the damaged checkpoints newer than `step` aside and removes the others."""
        with fail_together():
            if jax.process_index() == 0:
                for newer in damaged:
                    os.replace(self.directory / str(newer), _free_name(self.directory / f"{newer}.damaged"))
        self.newest = step
        self._manager.reload()
        for newer in [newer for newer in self._manager.all_steps() if newer > step]:
            self._manager.delete(newer)
        self._scores = {kept: score for kept, score in self._scores.items() if kept <= step}
        if damaged:
            self._say(f"warning: continuing from {self.directory / str(step)}")

    def _check_space(self, step: int, size: int) -> None:
        """Raises CheckpointError where a checkpoint will not fit: before it is begun, since a save that fails in its
        middle is reported by each of its many parts."""
        with fail_together():
            if jax.process_index() == 0:
                free, wanted = shutil.disk_usage(self.directory).free, size + size // 20 + _OVERHEAD_BYTES
                if free < wanted:
                    raise CheckpointError(
                        f"cannot write checkpoint {self.directory / str(step)}: {os.strerror(errno.ENOSPC)}: it needs "
                        f"about {wanted / 2**20:.1f} MiB of {free / 2**20:.1f} MiB; {self._left(step)}"
                    )

    def _left(self, step: int | None) -> str:
        whole = [other for other in steps_in(self.directory) if other != step]
        return f"the newest whole one is that of step {whole[-1]}" if whole else "there is none before it"

    def _before_commit(self) -> None:
        """On process 0, when all parts of a checkpoint are written and before it gets its name."""
        (unfinished,) = self.directory.glob(f"{self._saving}.orbax-checkpoint-tmp*")
        integrity.write_manifest(unfinished)

    def _say(self, line: str) -> None:
        if jax.process_index() == 0:
            say(line, sys.stderr)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Errors of a save as one line, with the checkpoint and the one that is left."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # of several libraries
            step, self._saving = self._saving, None
            path = self.directory / str(step)
            for unfinished in self.directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(unfinished, ignore_errors=True)  # others may need the space
            self._manager.reload()
            raise CheckpointError(f"cannot write checkpoint {path}: {_reason(error)}; {self._left(step)}") from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for what is being written, unless another process is lost, for which it would wait in vain."""
        if isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
            return
        try:
            self.wait()
            self._manager.close()
        except CheckpointError as second:
            if error is None:
                raise
            say(f"error: {second}", sys.stderr)  # and the first error is raised


def _reason(error: BaseException) -> str:
    """What a library's long message comes to: the operating system's words if it has them."""
    text = str(error)
    for number in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EIO):
        if os.strerror(number) in text:
            return os.strerror(number)
    return _one_line(error)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _read_meta(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "meta" / "metadata").read_text())


def _score(directory: Path) -> float:
    """A checkpoint's score; NaN if it has none, or cannot be read."""
    try:
        score = _read_meta(directory)["score"]
    except Exception:  # a damaged one; whoever restores it says so
        return math.nan
    return math.nan if score is None else float(score)


def _free_name(path: Path) -> Path:
    """The path, or the first of path.2, path.3, ... that does not exist."""
    candidates = (path if i == 1 else path.with_name(f"{path.name}.{i}") for i in range(1, 10_000))
    return next(candidate for candidate in candidates if not candidate.exists())
