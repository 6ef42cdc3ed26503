"""The report's figures, by matplotlib, as SVG text or as files."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from p3o_jax.report.runs import Group
from p3o_jax.report.statistics import Curve, curve, final_of_group, in_bins

# Okabe and Ito's colours, which no common colour blindness confuses; dashes take over where they end.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", ":", "-.")

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "svg.fonttype": "none",  # text stays text: selectable, and small
    "svg.hashsalt": "p3o",  # the same runs give the same file
    "savefig.dpi": 160,
}


@dataclass(frozen=True)
class Panel:
    """A chart of one metric, or of the first of several that a run has."""

    title: str
    tags: tuple[str, ...]
    note: str
    level: float | None = None  # a value to compare with, drawn as a line
    optional: bool = False  # left out where it is 0 throughout


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel("Reward", ("reward/mean",), "of the rollouts of a step, at the sampler's temperature"),
        Panel("Entropy", ("policy/entropy", "policy/entropy_proxy"), "of the policy, nats a token"),
        Panel("Response length", ("rollout/response_tokens_mean",), "tokens"),
        Panel("Groups without variance", ("reward/zero_variance_group_fraction",), "which teach nothing"),
    ),
    "Off-policyness": (
        Panel("ESS", ("policy/ess",), "of one optimizer batch; 1: on-policy", 1.0),
        Panel("Smallest ESS of a step", ("policy/ess_min",), "over its updates", 1.0),
        Panel("Capped or clipped", ("policy/cap_fraction", "policy/clip_fraction"), "share of tokens"),
        Panel("Mean ratio", ("policy/ratio_mean",), "1 is expected of samples of μ", 1.0),
        Panel("KL to the behaviour policy", ("policy/behaviour_kl_proxy",), "nats a token"),
        Panel("Precision gap", ("policy/precision_gap_kl",), "KL at the parameters that sampled, nats a token"),
        Panel("Staleness", ("rollout/staleness_mean",), "rollout steps", optional=True),
    ),
    "Optimizer and speed": (
        Panel("Gradient norm", ("optim/grad_norm",), "before clipping"),
        Panel("Loss", ("loss/total",), "of the objective; not comparable between objectives"),
        Panel("Sampler", ("time/sampler_tokens_per_second",), "tokens a second"),
        Panel("Learner", ("time/learner_tokens_per_second",), "tokens a second"),
        Panel("MFU", ("time/mfu",), "of the devices' bfloat16 peak, while learning"),
    ),
}


@dataclass(frozen=True)
class Drawn:
    """A figure and what it says."""

    name: str  # of its file
    title: str
    note: str
    figure: Figure

    def __post_init__(self) -> None:
        # The layout is found once; a second search would start from the first's result, and end a little elsewhere.
        self.figure.draw_without_rendering()
        self.figure.set_layout_engine("none")

    def svg(self) -> str:
        """The figure as an element of an HTML page; its ids are its own."""
        with mpl.rc_context(_STYLE):
            buffer = io.StringIO()
            self.figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
        svg = buffer.getvalue()
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", svg)
        return re.sub(
            r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 xmlns:xlink="http://www.w3.org/1999/xlink">', svg
        )

    def save(self, directory: Path) -> None:
        """NAME.svg and NAME.png."""
        directory.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(_STYLE):
            for suffix in ("svg", "png"):
                metadata = {"Date": None} if suffix == "svg" else {}
                self.figure.savefig(directory / f"{self.name}.{suffix}", metadata=metadata, facecolor="white")


def sections(groups: Sequence[Group]) -> dict[str, list[Drawn]]:
    """Every chart for which there are data, by section."""
    tags = set().union(*(run.tags for group in groups for run in group.runs))
    evaluations = tuple(
        Panel("{1} on {0}".format(*task_and_name(tag)), (tag,), "held-out prompts") for tag in accuracies(tags)
    )
    found = {}
    for section, panels in SECTIONS.items():
        panels = (*evaluations, *panels) if section == "Learning" else panels
        drawn = [figure for figure in (_over_steps(groups, panel) for panel in panels) if figure]
        if section == "Off-policyness":
            parts = (ess_of_parts(groups, part, label) for part, label in PARTS.items())
            drawn += [figure for figure in (*parts, ess_against_reward(groups)) if figure]
        if drawn:
            found[section] = drawn
    return found


def accuracies(tags: Iterable[str]) -> list[str]:
    """Of evaluations, what is drawn and tabulated: `eval/TASK/pass@K` and its like, by task."""
    kinds = ("pass", "majority", "greedy")

    def key(tag: str) -> tuple[str, int, int]:
        task, name = task_and_name(tag)
        kind, _, k = name.partition("@")
        return task, kinds.index(kind), int(k or 0)

    return sorted((tag for tag in tags if re.fullmatch(r"eval/.+/(pass@\d+|majority@\d+|greedy)", tag)), key=key)


def task_and_name(tag: str) -> tuple[str, str]:
    """`eval/TASK/NAME` taken apart."""
    task, _, name = tag.removeprefix("eval/").rpartition("/")
    return task, name


def style(index: int) -> tuple[str, str]:
    """Colour and dashes of a group."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]


def _axes(size: tuple[float, float] = (4.2, 2.6)) -> tuple[Figure, Axes]:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
    return figure, axes


def _over_steps(groups: Sequence[Group], panel: Panel) -> Drawn | None:
    """Mean over seeds, a band of one standard error, and each seed as a thin line."""
    curves: list[Curve | None] = []
    for group in groups:
        found = (curve(group, tag) for tag in panel.tags)
        curves.append(next((one for one in found if one is not None), None))
    values = np.concatenate([one.mean for one in curves if one is not None] or [np.zeros(0)])
    if not np.isfinite(values).any() or (panel.optional and not values.any()):
        return None
    figure, axes = _axes()
    if panel.level is not None:
        axes.axhline(panel.level, color="#999999", linewidth=0.8, dashes=(4, 3))
    for index, one in enumerate(curves):
        if one is None:
            continue
        colour, dashes = style(index)
        if len(one.seeds) > 1:
            for steps, values in one.seeds:
                axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.3)
            band = one.mean - one.error, one.mean + one.error
            axes.fill_between(one.steps, *band, color=colour, alpha=0.18, linewidth=0)
        marker = "o" if len(one.steps) < 8 else None
        axes.plot(one.steps, one.mean, color=colour, linestyle=dashes, linewidth=1.6, marker=marker, markersize=3.5)
    axes.set_xlabel("rollout step")
    axes.margins(x=0.02)
    return Drawn(_name(panel.tags[0]), panel.title, panel.note, figure)


PARTS = {
    "position": "token of the response",
    "staleness": "rollout steps since its policy",
    "source": "task of the mixture",
}
"""By what the ESS is taken apart, and what its axis is called."""


def ess_of_parts(groups: Sequence[Group], part: str, label: str) -> Drawn | None:
    """Which tokens' ratios spread; None if there is but one part."""
    prefix = f"policy/ess/{part}="
    tags = {tag for group in groups for run in group.runs for tag in run.tags if tag.startswith(prefix)}
    tags_in_order = sorted(tags, key=lambda tag: int(tag.removeprefix(prefix).split("-")[0]))
    if len(tags_in_order) < 2:
        return None
    figure, axes = _axes()
    for index, group in enumerate(groups):
        estimates = [final_of_group(group, tag) for tag in tags_in_order]
        points = [(i, one.mean, one.error) for i, one in enumerate(estimates) if one is not None]
        if points:
            x, mean, error = np.asarray(points).T
            colour, dashes = style(index)
            bars = np.nan_to_num(error)
            axes.errorbar(x, mean, bars, color=colour, linestyle=dashes, marker="o", markersize=4, capsize=2)
    axes.set_xticks(range(len(tags_in_order)), [tag.removeprefix(prefix).replace("-", "–") for tag in tags_in_order])
    axes.margins(x=0.1)
    axes.set_xlabel(label)
    return Drawn(f"ess_by_{part}", f"ESS by {part}", "at the end of the run; bars: standard error", figure)


def ess_against_reward(groups: Sequence[Group]) -> Drawn | None:
    """Every step of every run as a point; the path of the means runs from the hollow mark to the full one."""
    figure, axes = _axes()
    drawn = False
    for index, group in enumerate(groups):
        colour, dashes = style(index)
        means = []
        for run in group.runs:
            (steps, ess), (reward_steps, reward) = run.series("policy/ess"), run.series("reward/mean")
            common = np.intersect1d(steps, reward_steps)
            x, y = ess[np.isin(steps, common)], reward[np.isin(reward_steps, common)]
            axes.scatter(in_bins(common, x)[1], in_bins(common, y)[1], s=7, color=colour, alpha=0.25, linewidths=0)
            means.append(dict(zip(common.tolist(), zip(x, y, strict=True), strict=True)))
        shared = sorted(set(means[0]).intersection(*means[1:]))
        if not shared:
            continue
        drawn = True
        path = np.asarray([np.mean([of_run[step] for of_run in means], axis=0) for step in shared])
        parts = np.array_split(path, min(12, len(path)))
        path = np.asarray([part.mean(axis=0) for part in parts])
        axes.plot(*path.T, color=colour, linestyle=dashes, linewidth=1.3)
        axes.plot(*path[0], "o", color=colour, markerfacecolor="white", markersize=6)
        axes.plot(*path[-1], "o", color=colour, markersize=6)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("ESS")
    axes.set_ylabel("reward")
    note = "of each step; lines run from the start (hollow) to the end"
    return Drawn("ess_against_reward", "ESS against reward", note, figure) if drawn else None


def _name(tag: str) -> str:
    return re.sub(r"\W+", "_", tag)
