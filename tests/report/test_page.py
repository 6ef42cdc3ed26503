"""The page as text; `tests/test_pages.py` opens it in a browser."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from p3o_jax.commands.main import main
from p3o_jax.config import Config
from p3o_jax.objectives import P3O, Grpo
from p3o_jax.report.figures import sections
from p3o_jax.report.page import notices, page
from p3o_jax.report.runs import group, load
from tests.made_runs import make_run

CONFIG = Config(objective=P3O(), num_steps=20)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two variants of two seeds, of which one run is not done."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        make_run(root / f"p3o_{seed}", replace(CONFIG, seed=seed), steps=20, off_policy=0.05)
        clipped = replace(CONFIG, seed=seed, objective=Grpo())
        make_run(root / f"grpo_{seed}", clipped, steps=20 - 5 * seed, off_policy=0.2)
    return root


@pytest.fixture(scope="module")
def html(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    arguments = ["p3o", "report", str(runs), "--out", str(out / "deep/er.html"), "--figures", str(out / "figures")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        main()
    return (out / "deep/er.html").read_text(), out / "figures"


class Collector(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.open, self.outside = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.outside += [value for name in ("src", "href") if (value := attributes.get(name, "#"))[0] != "#"]
        if tag not in ("meta", "br", "input", "link", "path", "use", "rect", "line", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag in self.open[-1:]:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag


def test_the_page_needs_nothing_else_and_is_well_formed(html):
    found = Collector(html[0])
    assert found.outside == []
    assert not re.search(r"@import|url\((?!#)|https?://(?!www\.w3\.org/)", html[0])
    assert len(found.ids) == len(set(found.ids))
    assert found.open == []


def test_final_values_have_their_errors(html):
    # pass@1 of the finished P3O runs: 0.2 + 20 / 50 + seed / 100; GRPO's second seed stopped at 15.
    assert '0.6050<span class="error"> ± 0.0050</span>' in html[0]
    assert "95 % interval 0.5415 to 0.6685; seeds 0.6, 0.61" in html[0]
    assert "seeds 0.6, 0.51" in html[0]


def test_both_variants_are_in_every_chart(runs):
    groups = group([load(path) for path in sorted(runs.iterdir())])
    drawn = {each.name: each for section in sections(groups).values() for each in section}
    assert {
        "policy_ess",
        "reward_mean",
        "eval_sort_digits_pass_1",
        "ess_against_reward",
        "ess_by_position",
    } <= drawn.keys()
    assert not {"rollout_staleness_mean", "ess_by_staleness", "ess_by_source"} & drawn.keys()  # nothing to tell apart
    svg = drawn["policy_ess"].svg()
    ElementTree.fromstring(svg)
    assert "#0072b2" in svg.lower() and "#d55e00" in svg.lower()
    assert "rollout step</text>" in svg
    assert svg == drawn["policy_ess"].svg()


def test_figures_are_files_too(html):
    names = {path.stem for path in html[1].iterdir()}
    for name in names:
        ElementTree.parse(html[1] / f"{name}.svg")
        assert (html[1] / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "ess_against_reward" in names


def test_rollouts_are_in_the_page_and_do_not_end_its_script(html):
    data = html[0].split('id="rollout-data">')[1].split("</script>")[0]
    runs = json.loads(data)
    assert [run["label"] for run in runs] == ["Grpo, seed 0", "Grpo, seed 1", "P3O, seed 0", "P3O, seed 1"]
    assert [step["step"] for step in runs[1]["steps"]] == [5, 10, 15]
    (first, second) = runs[0]["steps"][0]["prompts"]
    assert first["prompt"] == "50=</script>" and second["index"] == 51
    assert first["rows"][1]["tokens"] == ["1", " <b>", "\n", ""] and first["rows"][1]["ratio"] == [0, -2, 0.7, 0.125]


def test_rollouts_beyond_the_limit_are_left_out(runs):
    groups = group([load(runs / "p3o_0")])
    # 4 steps x 2 prompts x 2 rows x 4 tokens = 64: with 32 one prompt a step is left, with 1 still one.
    for limit, kept in ((64, 2), (32, 1), (1, 1)):
        text = page(groups, {}, title="t", most_tokens=limit)
        (run,) = json.loads(text.split('id="rollout-data">')[1].split("</script>")[0])
        assert [(len(step["prompts"]), step["total"]) for step in run["steps"]] == [(kept, 2)] * 4


def test_what_stands_out_is_said(tmp_path):
    extra = {step: {"policy/ratio_mean": 1.5, "policy/ess": 0.3, "optim/skipped_updates": 2.0} for step in (1, 2)}
    made = make_run(tmp_path / "run", CONFIG, steps=2, off_policy=0.1, extra=extra)
    text = "\n".join(notices(group([load(made)])))
    assert "has made 2 of 20 steps; its state: stopped (asked to end)" in text
    assert "skipped 4 updates" in text
    assert "a mean ratio of 1.50" in text
    assert "an ESS of 0.30 at step 1" in text


def test_a_run_that_has_just_begun(tmp_path):
    path = make_run(tmp_path / "run", CONFIG, steps=0, off_policy=0.1)
    (path / "metrics.jsonl").unlink()
    text = page(groups := group([load(path)]), sections(groups), title="a & b", most_tokens=10)
    assert "has logged nothing yet" in text and "has written rollouts" in text and "a &amp; b" in text


def test_nothing_named_is_an_error(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["p3o", "report"])
    with pytest.raises(SystemExit, match="name at least one run directory"):
        main()
    monkeypatch.setattr(sys, "argv", ["p3o", "report", str(tmp_path / "missing")])
    with pytest.raises(SystemExit, match="missing is not a directory"):
        main()
