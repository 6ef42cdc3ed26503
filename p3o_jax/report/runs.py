"""Runs as they lie on disk, finished or not, and which of them are seeds of one another."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from p3o_jax.runs import status as run_status
from p3o_jax.runs.directory import MAY_DIFFER
from p3o_jax.writers import read_metrics

CLASS = "class"


@dataclass(frozen=True)
class Run:
    """One run directory, read once."""

    path: Path
    config: Mapping[str, Any]  # flat, dotted
    environment: Mapping[str, Any]  # of its last start
    metrics: Sequence[Mapping[str, float]]
    status: Mapping[str, Any]  # as `run_status.read`

    @property
    def seed(self) -> int:
        """What tells runs of a group apart."""
        return self.config.get("seed", 0)

    @property
    def num_steps(self) -> int:
        """Rollout steps that it is to make."""
        return self.config.get("num_steps", 0)

    @property
    def last_step(self) -> int:
        """The last step that it has logged."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @cached_property
    def tags(self) -> set[str]:
        """Everything it has logged."""
        return set().union(*self.metrics) - {"step"}

    def series(self, tag: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric; empty if there are none."""
        points = [(line["step"], line[tag]) for line in self.metrics if tag in line]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return np.asarray(steps, np.int64), np.asarray(values, np.float64)

    @cached_property
    def rollout_files(self) -> dict[int, Path]:
        """rollouts/step_N.jsonl by step."""
        files = {int(path.stem.removeprefix("step_")): path for path in self.path.glob("rollouts/step_*.jsonl")}
        return dict(sorted(files.items()))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    label: str
    runs: Sequence[Run]

    @property
    def config(self) -> Mapping[str, Any]:
        """That of the first."""
        return self.runs[0].config


def find(paths: Iterable[Path]) -> list[Path]:
    """The run directories among some paths and below them.

    Raises:
        FileNotFoundError: a path that is not there, or holds no run.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is not a directory: name run directories, or directories that hold some")
        below = [path] if (path / "config.json").exists() else sorted(p.parent for p in path.glob("**/config.json"))
        if not below:
            raise FileNotFoundError(f"no run in {path}: a run directory holds a config.json")
        found += [run for run in below if run not in found]
    return found


def load(path: Path) -> Run:
    """Reads a run; one that has logged nothing yet has no metrics.

    Raises:
        ValueError: a damaged file, by name.
    """
    starts = _json(path / "environment.json", [])
    metrics = read_metrics(path) if (path / "metrics.jsonl").exists() else []
    config = _flat(_json(path / "config.json", {}))
    return Run(path, config, starts[-1] if starts else {}, metrics, run_status.read(path))


def group(runs: Sequence[Run]) -> list[Group]:
    """Runs whose configurations differ in the seed only, or in what a resumed run may change, together."""
    by_config: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps({name: value for name, value in sorted(run.config.items()) if name not in _NOT_THE_RUN})
        by_config.setdefault(key, []).append(run)
    members = [sorted(group, key=lambda run: (run.seed, str(run.path))) for group in by_config.values()]
    return [Group(label, of) for label, of in zip(_labels([of[0].config for of in members]), members, strict=True)]


_NOT_THE_RUN = {"seed", *MAY_DIFFER}
_ABSENT = "–"


def differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Fields in which groups differ, with each group's value as text."""
    names = dict.fromkeys(name for group in groups for name in group.config)
    shown = {name: [_text(group.config.get(name, _ABSENT)) for group in groups] for name in names}
    return {name: values for name, values in shown.items() if len(set(values)) > 1 and name not in _NOT_THE_RUN}


def _labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A short name each, of the objective and then of as many differing fields as tell them apart."""
    labels = [_text(config.get("objective", "run")) for config in configs]
    names = dict.fromkeys(name for config in configs for name in config)
    for name in names:
        if len(set(labels)) == len(labels):
            break
        values = [config.get(name, _ABSENT) for config in configs]
        # A field helps if it splits runs that are still called alike.
        if name not in _NOT_THE_RUN and len({*zip(labels, map(_text, values), strict=True)}) > len(set(labels)):
            alike = [labels.count(label) > 1 for label in labels]
            short = name.rpartition(".")[2]
            labels = [
                f"{label}, {short} {_text(value)}" if is_alike and value != _ABSENT else label
                for label, value, is_alike in zip(labels, values, alike, strict=True)
            ]
    return labels


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """`{"objective": {"class": "m:P3O", "kl": "k3"}}` as `{"objective": "P3O", "objective.kl": "k3"}`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix if key == CLASS and prefix else f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            found |= _flat(value, name)
        elif isinstance(value, list):
            found[name] = json.dumps(value)
        else:
            found[name] = value.rpartition(":")[2] if key == CLASS else value
    return found


def _json(path: Path, default: Any) -> Any:
    if not path.exists():
        return default
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
