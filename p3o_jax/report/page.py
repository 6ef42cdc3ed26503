"""The page: one HTML file with everything in it."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template

import numpy as np

from p3o_jax.report import tables
from p3o_jax.report.figures import Drawn, sections
from p3o_jax.report.runs import Group
from p3o_jax.report.samples import rollouts

_PARTS = Path(__file__).parent


def page(groups: Sequence[Group], figures: dict[str, list[Drawn]], *, title: str, most_tokens: int) -> str:
    """The report on some groups of runs.

    Args:
        figures: as `figures.sections` draws them.
        most_tokens: of rollouts, in the page.
    """
    samples = rollouts(groups, most_tokens)
    num_runs = sum(len(group.runs) for group in groups)
    links = {"final": "final values"} | {_anchor(section): section.lower() for section in figures}
    links |= {"differences": "configuration", "runs": "runs", "rollouts": "rollouts"}
    return Template(_part("page.html")).substitute(
        title=html.escape(title),
        subtitle=f"{_count(num_runs, 'run')} in {_count(len(groups), 'variant')}; runs of a variant differ in their "
        "seed. Curves: mean over seeds, band of one standard error, each seed thin.",
        style=_part("style.css"),
        navigation="".join(f'<a href="#{anchor}">{name}</a>' for anchor, name in links.items()),
        legend="".join(_legend(index, group) for index, group in enumerate(groups)),
        notices=_notices(groups),
        final=tables.final_values(groups),
        curves="".join(_section(name, drawn) for name, drawn in figures.items()),
        differences=tables.configuration(groups),
        runs=tables.runs(groups),
        browser=_part("browser.html") if samples else "<p>None of the runs has written rollouts.</p>",
        rollouts=json.dumps(samples, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        script=_part("browser.js") if samples else "",
        written=time.strftime("%Y-%m-%d %H:%M"),
    )


def write(groups: Sequence[Group], out: Path, *, title: str, most_tokens: int, figures_dir: Path | None) -> int:
    """Writes the page and, if asked, every figure as NAME.svg and NAME.png.

    Returns:
        The number of figures.
    """
    figures = sections(groups)
    text = page(groups, figures, title=title, most_tokens=most_tokens)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    drawn = [each for section in figures.values() for each in section]
    if figures_dir is not None:
        for each in drawn:
            each.save(figures_dir)
    return len(drawn)


def notices(groups: Sequence[Group]) -> Iterator[str]:
    """What a reader should know before looking at curves."""
    for group in groups:
        for run in group.runs:
            name = f"{group.label}, seed {run.seed}"
            if not run.metrics:
                yield f"{name} has logged nothing yet."
                continue
            if run.last_step < run.num_steps:
                state = run.status["state"] + (f" ({run.status['reason']})" if run.status["reason"] else "")
                yield f"{name} has made {run.last_step} of {run.num_steps} steps; its state: {state}."
            skipped = tables.total(run, "optim/skipped_updates")
            if skipped:
                yield f"{name} skipped {skipped:.0f} updates whose loss or gradient was not finite."
            ratio = run.series("policy/ratio_mean")[1]
            if len(ratio) and abs(np.nanmean(ratio) - 1) > 0.1:
                yield (
                    f"{name} has a mean ratio of {np.nanmean(ratio):.2f}, where 1 is expected of samples of μ: its "
                    "stored log-probs may not be those of what was sampled, or the policy has left μ's support. "
                    "The ESS does not see such a shift."
                )
            ess = run.series("policy/ess")[1]
            if len(ess) and np.nanmin(ess) < 0.5:
                step = int(run.series("policy/ess")[0][np.nanargmin(ess)])
                yield f"{name} was down to an ESS of {np.nanmin(ess):.2f} at step {step}."


def _notices(groups: Sequence[Group]) -> str:
    found = "".join(f"<li>{html.escape(notice)}</li>" for notice in notices(groups))
    return f'<ul class="notices" aria-label="what stands out">{found}</ul>' if found else ""


def _legend(index: int, group: Group) -> str:
    seeds = ", ".join(str(run.seed) for run in group.runs)
    seeds = html.escape(f"{'seed' if len(group.runs) == 1 else 'seeds'} {seeds}")
    return f'<li>{tables.key(index)}<b>{html.escape(group.label)}</b><span class="quiet">{seeds}</span></li>'


def _section(name: str, drawn: Sequence[Drawn]) -> str:
    figures = "".join(
        f'<figure role="group" aria-label="{html.escape(each.title)}"><figcaption>{html.escape(each.title)}'
        f"<span>{html.escape(each.note)}</span></figcaption>{each.svg()}</figure>"
        for each in drawn
    )
    anchor = _anchor(name)
    return (
        f'<section id="{anchor}" aria-labelledby="{anchor}-h"><h2 id="{anchor}-h">{html.escape(name)}</h2>'
        f'<div class="figures">{figures}</div></section>'
    )


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _part(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")
