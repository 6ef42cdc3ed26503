"""Checkpoints by Orbax: the train state and the past policies, saved in the background, committed atomically."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import orbax.checkpoint as ocp

State = TypeVar("State")


def newest_step(directory: Path) -> int:
    """The step of the newest complete checkpoint in a directory, which need not exist; 0 if there is none."""
    return max((int(path.name) for path in directory.glob("*") if path.name.isdigit()), default=0)


class Checkpoints:
    """The checkpoints of a run; the newest two are kept.

    Random numbers are functions of (seed, step), so they need no saving.
    """

    def __init__(self, directory: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def save(self, step: int, state: Any, past: Mapping[int, Any], loop: Mapping[str, Any]) -> None:
        """Copies to the host and writes in the background.

        Args:
            step: rollout steps made.
            state: the learner's.
            past: sampler weights by policy version.
            loop: what the loop holds on the host, the same on every process, as JSON values.
        """
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                past=ocp.args.StandardSave({str(version): weights for version, weights in past.items()}),
                meta=ocp.args.JsonSave({"versions": list(past), "loop": dict(loop)}),
            ),
        )

    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step; None if there is none."""
        return self._manager.latest_step()

    def restore(
        self, step: int, abstract_state: State, abstract_weights: Any
    ) -> tuple[State, dict[int, Any], dict[str, Any]]:
        """The state, the past policies and the loop's values of a step; arrays placed as the abstract ones say."""
        meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        versions = meta["versions"]
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract_state),
                past=ocp.args.StandardRestore({str(version): abstract_weights for version in versions}),
            ),
        )
        past = {version: restored["past"][str(version)] for version in versions}
        return restored["state"], past, meta["loop"]

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()
