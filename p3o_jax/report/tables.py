"""The report's tables, as HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from p3o_jax.report.figures import accuracies, style, task_and_name
from p3o_jax.report.runs import Group, Run, differences
from p3o_jax.report.statistics import LAST_PART, Estimate, final_of_group

_COLUMNS = (
    ("reward", ("reward/mean",)),
    ("ESS", ("policy/ess",)),
    ("capped or clipped", ("policy/cap_fraction", "policy/clip_fraction")),
    ("KL to behaviour", ("policy/behaviour_kl_proxy",)),
    ("precision gap", ("policy/precision_gap_kl",)),
    ("mean ratio", ("policy/ratio_mean",)),
    ("entropy", ("policy/entropy",)),
    ("response tokens", ("rollout/response_tokens_mean",)),
)


def key(index: int) -> str:
    """A group's colour and dashes, as an image beside its name."""
    colour, dashes = style(index)
    pattern = {"-": "", "--": "6 3", ":": "2 2", "-.": "6 2 2 2"}[dashes]
    return (
        '<svg width="26" height="10" aria-hidden="true"><line x1="1" x2="25" y1="5" y2="5" '
        f'stroke="{colour}" stroke-width="3" stroke-dasharray="{pattern}"/></svg>'
    )


def final_values(groups: Sequence[Group]) -> str:
    """Means over seeds with standard errors; intervals and each seed's value are in the cells' titles."""
    evaluations = accuracies(set().union(*(run.tags for group in groups for run in group.runs)))
    columns = [("{1}\n{0}".format(*task_and_name(tag)), (tag,)) for tag in evaluations] + list(_COLUMNS)
    cells = [[_first(group, names) for _, names in columns] for group in groups]
    kept = [i for i in range(len(columns)) if any(row[i] is not None for row in cells)]
    head = ["variant", "seeds", *(columns[i][0] for i in kept)]
    body = [
        [key(index) + html.escape(group.label), str(len(group.runs)), *(_estimate(cells[index][i]) for i in kept)]
        for index, group in enumerate(groups)
    ]
    alone = " With one seed there is no error to state." if any(len(group.runs) == 1 for group in groups) else ""
    note = (
        "Mean over seeds ± its standard error; rest the pointer on a cell for the 95 % interval (Student's t) and the "
        f"seeds. Evaluations: the last one. Everything else: the last {LAST_PART:.0%} of the steps.{alone}"
    )
    return f'<p class="quiet">{note}</p>' + table(head, body)


def configuration(groups: Sequence[Group]) -> str:
    """The fields in which groups differ; all others are folded away."""
    differing = differences(groups)
    parts = []
    if differing:
        head = ["field", *(group.label for group in groups)]
        parts.append(table(head, [[_code(name), *map(html.escape, row)] for name, row in differing.items()], "text"))
    elif len(groups) > 1:
        parts.append("<p>The variants' configurations are the same.</p>")
    same = {name: value for name, value in groups[0].config.items() if name not in differing and name != "seed"}
    rows = table(["field", "value"], [[_code(name), html.escape(str(value))] for name, value in same.items()], "text")
    what = f"{len(same)} fields that all runs share" if len(groups) > 1 else f"all {len(same)} fields"
    return "".join(parts) + f"<details><summary>{what}</summary>{rows}</details>"


def runs(groups: Sequence[Group]) -> str:
    """Where each run is, how far it got, on what."""
    head = [
        "variant",
        "seed",
        "state",
        "steps",
        "skipped updates",
        "dropped rows",
        "devices",
        "started",
        "commit",
        "directory",
    ]
    body = []
    for index, group in enumerate(groups):
        for run in group.runs:
            devices, commit = run.environment.get("devices", {}), run.environment.get("commit") or {}
            body.append(
                [
                    key(index) + html.escape(group.label),
                    str(run.seed),
                    html.escape(run.status["state"]),
                    f"{run.last_step} of {run.num_steps}",
                    f"{total(run, 'optim/skipped_updates'):.0f}",
                    f"{sum(total(run, tag) for tag in run.tags if tag.startswith('rollout/dropped/')):.0f}",
                    html.escape(f"{devices.get('count', '?')} × {devices.get('kind', '?')}"),
                    html.escape(str(run.environment.get("time", "?"))[:16].replace("T", " ")),
                    _code(str(commit.get("hash", "?"))[:9] + (" + changes" if commit.get("dirty") else "")),
                    _code(str(run.path)),
                ]
            )
    return table(head, body, "text")


def total(run: Run, tag: str) -> float:
    """The sum of a count over the steps of a run."""
    values = run.series(tag)[1]
    return float(values.sum())


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Cells are HTML, with or without their `<td>`; the first of a row names it."""
    titles = "".join(f'<th scope="col">{html.escape(cell).replace(chr(10), "<br>")}</th>' for cell in head)
    body = ""
    for first, *rest in rows:
        cells = "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in rest)
        body += f'<tr><th scope="row">{first}</th>{cells}</tr>'
    name = f' class="{kind}"' if kind else ""
    return f'<div class="scroll"><table{name}><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _first(group: Group, tags: Sequence[str]) -> Estimate | None:
    return next((found for found in (final_of_group(group, tag) for tag in tags) if found is not None), None)


def _estimate(found: Estimate | None) -> str:
    if found is None:
        return "–"
    seeds = ", ".join(f"{value:.4g}" for value in found.values)
    if math.isnan(found.error):
        return f'<td title="{seeds}">{_number(found.mean, 3)}</td>'
    # As many digits as the error leaves, and two of its own.
    digits = 3 if found.error == 0 or not math.isfinite(found.error) else 1 - math.floor(math.log10(found.error))
    digits = min(max(digits, 0), 6)
    low, high = found.interval
    title = f"95 % interval {low:.4g} to {high:.4g}; seeds {seeds}"
    return (
        f'<td title="{title}">{_number(found.mean, digits)}'
        f'<span class="error"> ± {_number(found.error, digits)}</span></td>'
    )


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.2g}"


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"
