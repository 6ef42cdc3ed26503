"""What is left of the samples after TensorBoard has sanitised them."""

from __future__ import annotations

import math

from tensorboard.plugin_util import markdown_to_safe_html

from p3o_jax.writers.samples import LONGEST, samples_html


def row(**changes):
    return {
        "prompt_index": 7,
        "prompt": "2 < 3?",
        "reward": 1.0,
        "advantage": -0.5,
        "finish_reason": "eos",
        "tokens": ["yes", "*", "|", "\n", ""],
        "behaviour_log_probs": [-0.5, -1.0, -0.1, -0.1, -0.2],
        "log_ratios": [0.0, -0.1, 0.3, 1.0, -2.0],
    } | changes


def shown(*rows) -> str:
    return markdown_to_safe_html(samples_html(rows))


def test_every_token_is_marked_by_its_ratio():
    text = shown(row())
    assert 'title="ρ 1, log μ -0.50">yes</a><a' in text  # no mark
    assert 'title="ρ 0.905, log μ -1.00">*</a><a' in text
    assert 'title="ρ 1.35, log μ -0.10">|</a>🔸' in text
    assert 'title="ρ 2.72, log μ -0.10">⏎<br></a>🟧' in text
    assert 'title="ρ 0.135, log μ -0.20">∅</a>🟦' in text
    assert "<pre>2 &lt; 3?</pre>" in text
    assert "<td>1</td><td>-0.50</td>" in text


def test_markup_in_a_completion_is_text():
    text = shown(row(prompt="<script>x</script>\n\n| a | b |\n|---|---|\n", tokens=["</td>", "<b>", "**", "_", "`"]))
    assert "&lt;script&gt;" in text and "&lt;/td&gt;" in text and "&lt;b&gt;" in text
    assert "<strong>" not in text and "<code>" not in text
    assert text.count("<table>") == text.count("</table>") == 1


def test_ratios_that_are_not_numbers_stand_out():
    text = shown(row(log_ratios=[math.nan, math.inf, -math.inf, 0.0, 0.0]))
    assert 'title="ρ nan, log μ -0.50">yes</a>❗' in text
    assert ">*</a>🟧" in text and ">|</a>🟦" in text


def test_long_completions_and_large_steps_are_cut():
    rows = [row(prompt_index=i // 8, tokens=["a"] * (LONGEST + 5), behaviour_log_probs=[0.0] * 600) for i in range(64)]
    for each in rows:
        del each["log_ratios"]
    text = shown(*rows)
    assert text.count("<h4>") == 3 and text.count("<em>… 5 more tokens</em>") == 12
    assert "pointer" not in text  # no legend for what is not there
    assert shown() == ""
