"""What a probe found, for people and for programs: a table with what it means, JSON, and a heat map."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from p3o_jax.probe.findings import Cell, Mismatch, Report

# Where the words for an ESS change; docs/probe.md says why there.
NONE, SLIGHT, MARKED, HEAVY = 0.9999, 0.99, 0.9, 0.5
# Leaving that prompt out moves the ESS by up to a ninth, a whole level from "slight" to "marked"; of ratios without a
# heavy tail no prompt has as much, so that the warning is not false. There may be a tail without it: not yet sampled.
_LARGEST_SHARE = 0.1
_STANDARD_ERRORS = 5.0  # of the mean ratio from 1, before it is called wrong
_SEQUENCE_ESS = 0.5
_CLIPPED = 0.05

_COLUMNS = (
    ("precision", ""),
    ("T", "g"),
    ("lag", "d"),
    ("ESS", ".5f"),
    ("+-", ".1e"),
    ("top prompt", ".1%"),
    ("seq. ESS", ".3f"),
    ("KL", ".1e"),
    ("k3", ".1e"),
    ("chi2", ".1e"),
    ("mean |lr|", ".1e"),
    ("max |lr|", ".1e"),
    ("outside 0.2", ".2%"),
)


def table(report: Report) -> str:
    """One line a cell, and the noise floor above them."""
    floor = report.equal_precision
    rows = [
        ("learner, other batch shape", report.learner_temperature, 0, *_numbers(report.batch_shape)),
        (f"{floor.precision} (the learner's)", floor.temperature, 0, *_numbers(floor.mismatch)),
        *((cell.precision, cell.temperature, cell.staleness, *_numbers(cell.mismatch)) for cell in report.cells),
    ]
    texts = [[title for title, _ in _COLUMNS]] + [
        ["-" if value is None else format(value, how) for value, (_, how) in zip(row, _COLUMNS, strict=True)]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join(
        "  ".join(
            f"{text:<{width}}" if i == 0 else f"{text:>{width}}"
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in texts
    )


def _numbers(found: Mismatch) -> tuple[float | None, ...]:
    return (
        found.ess,
        found.ess_error,
        found.largest_prompt_share,
        found.sequence_ess,
        found.kl,
        found.k3,
        found.chi2,
        found.log_ratio_abs_mean,
        found.log_ratio_abs_max,
        found.outside_fraction,
    )


def meaning(found: Mismatch, floor: float = 1.0) -> str:
    """What a mismatch means for training, in words; `floor` is the ESS of sampler and learner at equal precision."""
    if found.nonfinite:
        return f"{found.nonfinite} log-ratios are not finite: every update on such a batch is skipped; not usable"
    ess, lost = found.ess, 1.0 - found.ess
    level = _level(ess, floor)
    words = {
        "rounding": "rounding; as good as on-policy",
        "slight": f"slight: {lost:.2%} of the batch is lost to uneven weights, and P3O's KL weighs {lost:.1g}",
        "marked": f"marked: {lost:.1%} of the batch is lost, and P3O caps weights at {ess:.3f}; train on the sampler's "
        "own log-probs, never on recomputed ones",
        "heavy": f"heavy: {lost:.0%} of the batch is lost, and P3O's KL to the sampler weighs {lost:.2f}",
        "too far": f"too far: few tokens carry the batch (as many as {ess:.0%} of it); look for another setting",
    }[level]
    notes = []
    if not math.isfinite(found.ess_error):
        notes.append("of one prompt there is no error: take more")
    else:
        lower, upper = (_level(ess + side * found.ess_error, floor) for side in (-2.0, 2.0))
        if lower != upper:
            notes.append(
                f"within twice its error of {found.ess_error:.1g} it may be {upper} or {lower}: take more prompts, or "
                "go by the KL"
            )
        if found.largest_prompt_share > _LARGEST_SHARE and level != "rounding":
            notes.append(
                f"one prompt has {found.largest_prompt_share:.0%} of the squared ratios that the ESS divides by: "
                "neither it nor its error is to be trusted; go by the KL"
            )
    if found.outside_fraction >= _CLIPPED:
        notes.append(f"a clip of 0.2 takes {found.outside_fraction:.0%} of the tokens for a policy that has moved")
    # The variance of the ratios by their ESS, as the difference of their moments would cancel.
    error = found.ratio_mean * math.sqrt(max(1.0 / ess - 1.0, 0.0) / max(found.num_tokens, 1))
    if abs(found.ratio_mean - 1.0) > _STANDARD_ERRORS * error + 1e-5:
        notes.append(
            f"mean ratio {found.ratio_mean:.4g}, not 1: the ratios have a tail that was not sampled (the ESS is then "
            "too high), or the log-probs are not those of what was drawn"
        )
    if found.sequence_ess < _SEQUENCE_ESS:
        notes.append(f"do not weigh whole responses: their ESS is {found.sequence_ess:.2g}")
    return "; ".join([words, *notes])


def name(cell: Cell) -> str:
    """A cell in a few words."""
    return f"{cell.precision}, T={cell.temperature:g}, lag {cell.staleness}"


def _level(ess: float, floor: float) -> str:
    """The word for an ESS."""
    levels = {"rounding": min(NONE, 1.0 - 2.0 * (1.0 - floor)), "slight": SLIGHT, "marked": MARKED, "heavy": HEAVY}
    return next((word for word, least in levels.items() if ess >= least), "too far")


def explanation(report: Report) -> Iterator[str]:
    """Lines that say what the table means."""
    floor = report.equal_precision.mismatch
    learner = report.learner_precision.split("/")[0]
    yield (
        f"Ratios are learner / sampler; the learner computes in {learner}, at temperature "
        f"{report.learner_temperature:g}. KL(learner, sampler) is "
        + ("exact." if report.kl == "exact" else "of the sampler's most likely tokens and one bucket: a lower bound.")
    )
    yield (
        f"Noise floor: 1 - ESS is {1 - report.batch_shape.ess:.1e} between two batch shapes of the learner, and "
        f"{1 - floor.ess:.1e} between learner and sampler at equal precision."
    )
    if floor.ess < NONE and report.learner_precision.startswith("float32"):
        yield "At equal float32 precision it should be below 1e-4: sampler and learner do not compute the same model."
    for cell in report.cells:
        yield f"{name(cell)}: {meaning(cell.mismatch, floor.ess)}"


def offenders(cell: Cell) -> Iterator[str]:
    """The tokens of a cell on which the two sides disagree most, with what stands before them."""
    for token in cell.top:
        yield (
            f"{token.log_prob - token.behaviour_log_prob:+8.4f}  learner {token.log_prob:9.4f}  sampler "
            f"{token.behaviour_log_prob:9.4f}  prompt {token.prompt_index}, token {token.position}: "
            f"{token.context[-48:]!r} -> {token.token!r}"
        )


def to_json(report: Report, about: dict[str, Any]) -> str:
    """Everything, with what it means; a number that is not finite is null."""
    as_dict = dataclasses.asdict(report)
    for cell, data in zip(report.cells, as_dict["cells"], strict=True):
        data["meaning"] = meaning(cell.mismatch, report.equal_precision.mismatch.ess)
    return json.dumps(_finite({"about": about, **as_dict}), indent=2, ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def heat_map(report: Report, path: Path, title: str) -> None:
    """Writes a PNG: precisions down, temperatures across, a panel for each staleness; colour is log10(1 - ESS)."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import numpy as np

    lags, precisions, temperatures = (
        list(dict.fromkeys(getattr(cell, name) for cell in report.cells))
        for name in ("staleness", "precision", "temperature")
    )
    found = {(cell.staleness, cell.precision, cell.temperature): cell.mismatch.ess for cell in report.cells}
    size = (3.2 + len(lags) * max(1.6, 1.0 * len(temperatures)), 1.8 + 0.42 * len(precisions))
    figure, axes = plt.subplots(1, len(lags), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axis, lag in zip(axes[0], lags, strict=True):
        ess = np.array([[found[lag, precision, t] for t in temperatures] for precision in precisions])
        lost = np.log10(np.clip(1.0 - ess, 1e-7, 1.0))
        image = axis.imshow(lost, cmap="cividis", vmin=-6, vmax=0, aspect="auto")
        for (row, column), value in np.ndenumerate(ess):
            colour = "black" if lost[row, column] > -2.5 else "white"
            axis.text(column, row, _short(value), ha="center", va="center", fontsize=8, color=colour)
        axis.set_xticks(range(len(temperatures)), [f"T={t:g}" for t in temperatures])
        axis.set_yticks(range(len(precisions)), precisions)
        axis.set_title("same weights" if lag == 0 else f"{lag} step{'s' * (lag > 1)} old", fontsize=9)
    figure.colorbar(image, ax=axes, label="log10(1 - ESS)", shrink=0.9)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _short(ess: float) -> str:
    """An ESS with the digits that tell it from 1."""
    if not math.isfinite(ess):
        return "nan"
    digits = 3 if ess < 0.995 else min(6, 1 + math.ceil(-math.log10(max(1.0 - ess, 1e-6))))
    return f"{ess:.{digits}f}".replace("0.", ".", 1) if ess < 1 - 1e-6 else "1"
