"""A few completions for TensorBoard's text page: reward, and every token marked by how its probability has moved."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from typing import Any

NUM_PROMPTS = 3
SAMPLES_OF_A_PROMPT = 4
LONGEST = 512
"""Tokens of a completion that are shown."""

_MARKS = ((0.5, "🟦"), (0.8, "🔹"), (1.25, ""), (2.0, "🔸"), (math.inf, "🟧"))
_LEGEND = (
    "Each token is marked by ρ = π/μ as its update saw it: 🟦 below 0.5, 🔹 below 0.8, 🔸 above 1.25, 🟧 above 2. "
    "Rest the pointer on a token for its numbers."
)


def samples_html(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first completions to the first prompts, as HTML within what TensorBoard lets through: no styles, no colours.

    Args:
        rows: as `rollouts.readable` makes them, those of a prompt one after another.
    """
    shaded = any("log_ratios" in row for row in rows)
    parts = [f"<p>{_LEGEND}</p>"] if shaded else []
    for prompt, of_prompt in islice(groupby(rows, key=lambda row: row.get("prompt_index")), NUM_PROMPTS):
        group = list(islice(of_prompt, SAMPLES_OF_A_PROMPT))
        parts.append(f"<h4>prompt {prompt}</h4><pre>{html.escape(group[0]['prompt'])}</pre>")
        parts.append(
            "<table><thead><tr><th>reward</th><th>advantage</th><th>completion</th><th>ended by</th></tr></thead>"
        )
        parts += [
            f"<tr><td>{row['reward']:.3g}</td><td>{row['advantage']:+.2f}</td><td>{_completion(row)}</td>"
            f"<td>{row['finish_reason']}</td></tr>"
            for row in group
        ]
        parts.append("</table>")
    return "".join(parts)


def _completion(row: Mapping[str, Any]) -> str:
    tokens = row["tokens"][:LONGEST]
    ratios = row.get("log_ratios", [None] * len(tokens))
    shown = "".join(map(_token, tokens, row["behaviour_log_probs"], ratios))
    rest = len(row["tokens"]) - len(tokens)
    return shown + (f" <em>… {rest} more tokens</em>" if rest else "")


def _token(token: str, behaviour_log_prob: float, log_ratio: float | None) -> str:
    text = html.escape(token).replace("\n", "⏎<br>") or "∅"
    if log_ratio is None:
        return text
    ratio = math.exp(min(log_ratio, 700.0))
    mark = next((mark for limit, mark in _MARKS if ratio <= limit), "❗")  # a NaN is below nothing
    return f'<a title="ρ {ratio:.3g}, log μ {behaviour_log_prob:.2f}">{text}</a>{mark}'
