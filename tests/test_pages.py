"""TensorBoard's pages and the report, opened in a headless Chromium; what was seen is kept as pictures.

The pictures go to $P3O_SCREENSHOTS, or to a directory that pytest keeps (its name is printed with -rA).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from p3o_jax.config import Config
from p3o_jax.objectives import P3O, Grpo
from p3o_jax.report.page import write
from p3o_jax.report.runs import find, group, load
from tests.browser import EXECUTABLE, Browser
from tests.made_runs import make_run

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(EXECUTABLE is None, reason="NO BROWSER: nobody has looked at the pages; apt install chromium"),
]

NUM_STEPS = 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two variants, one of two seeds and one still going."""
    root = tmp_path_factory.mktemp("runs")
    config = Config(objective=P3O(), num_steps=NUM_STEPS)
    for seed in (0, 1):
        make_run(root / f"p3o_{seed}", replace(config, seed=seed), steps=NUM_STEPS, off_policy=0.05)
    make_run(root / "grpo", replace(config, objective=Grpo()), steps=10, off_policy=0.2)
    return root


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    path = Path(os.environ.get("P3O_SCREENSHOTS") or tmp_path_factory.mktemp("pictures"))
    path.mkdir(parents=True, exist_ok=True)
    print(f"pictures: {path}")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def tensorboard(runs):
    """The address of a TensorBoard that has read the runs."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # Without --load_fast=false a second program reads the events, which not every platform has.
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(runs),
        "--port",
        str(port),
        "--load_fast=false",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        address = f"http://localhost:{port}"
        try:
            until = time.monotonic() + 120
            while True:
                try:
                    with urllib.request.urlopen(f"{address}/data/runs", timeout=10) as reply:
                        if reply.read().count(b"p3o_") == 2:
                            break
                except OSError:
                    pass
                assert time.monotonic() < until, "TensorBoard does not serve the runs"
                assert process.poll() is None, "TensorBoard has ended"
                time.sleep(0.5)
            yield address
        finally:
            process.terminate()


def opened(browser: Browser, address: str, page: str, *parts: str) -> str:
    """The text of a page of TensorBoard, once it shows all parts."""
    browser.open("about:blank")
    browser.open(f"{address}#{page}")
    return browser.wait_for_text(*parts, seconds=90)


def test_scalars(browser, tensorboard, pictures):
    # Groups of more than ten charts are folded: the filter unfolds them.
    address = f"{tensorboard}/?tagFilter=policy/ess"
    text = opened(browser, address, "timeseries", "policy /ess ", "policy/ess /position=4-15")
    assert all(run in text for run in ("p3o_0", "p3o_1", "grpo"))
    browser.screenshot(pictures / "tensorboard_scalars.png")


def test_the_ess_of_all_runs_is_on_one_chart(browser, tensorboard, pictures):
    opened(
        browser, tensorboard, "custom_scalars", "ESS of the optimizer batch", "policy/ess (grpo)", "policy/ess (p3o_1)"
    )
    # The chart's own list of lines: three runs of one tag in the first chart of the page, and as many lines drawn.
    names = browser.wait(
        "(() => { const chart = deep('tf-custom-scalar-multi-line-chart-card')[0];"
        " return chart && deep('.match-list-entry', chart.shadowRoot || chart).map((e) => e.textContent.trim()); })()"
    )
    for run in ("p3o_0", "p3o_1", "grpo"):
        assert sum(f"policy/ess ({run})" in name for name in names) == 1
    for title in (
        "share of tokens capped or clipped",
        "KL to the behaviour policy",
        "precision gap (KL)",
        "staleness (rollout steps)",
        "reward",
    ):
        assert title in browser.text()
    browser.screenshot(pictures / "tensorboard_ess.png")


def test_histograms(browser, tensorboard, pictures):
    opened(browser, tensorboard, "histograms", "policy/log_ratio_histogram", "p3o_1")
    assert browser.wait("deep('vz-histogram-timeseries, tf-histogram-loader').length > 0")
    browser.screenshot(pictures / "tensorboard_histograms.png")


def test_completions_with_marked_tokens(browser, tensorboard, pictures):
    opened(browser, tensorboard, "text", "rollout/samples", "Each token is marked", "200=</script>", "🟦", "🔸")
    titles = browser.evaluate("deep('a[title]').map((token) => token.title)")
    assert "ρ 0.135, log μ -1.00" in titles
    browser.screenshot(pictures / "tensorboard_text.png")


def test_settings_of_all_runs_are_compared(browser, tensorboard, pictures):
    text = opened(browser, tensorboard, "hparams", "Trial ID", "p3o_0", "grpo", "Grpo", "P3O", "objective.clip_low")
    assert text.index("objective") < text.index("advantages")  # what differs comes first
    browser.screenshot(pictures / "tensorboard_hparams.png")


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("report") / "report.html"
    groups = group([load(path) for path in find([runs / "p3o_0", runs])])
    write(groups, out, title="P3O and GRPO", most_tokens=10_000, figures_dir=None)
    return out


def test_the_report(browser, report, pictures):
    browser.open("about:blank")
    browser.open(report.as_uri())
    text = browser.wait_for_text("Final values", "seeds 0, 1", "Completions")
    assert "Grpo, seed 0 has made 10 of 20 steps; its state: stopped (asked to end)." in text
    assert browser.evaluate("document.querySelectorAll('figure svg').length") > 10
    # Nothing is wider than the page, and nothing comes from elsewhere.
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert browser.evaluate("performance.getEntriesByType('resource').length") == 0
    height = browser.evaluate("document.documentElement.scrollHeight")
    browser.size(1400, height)
    browser.screenshot(pictures / "report.png")
    browser.size(1400, 1000)
    assert browser.console == []


def test_the_reports_browser_of_rollouts(browser, report, pictures):
    browser.open("about:blank")
    browser.open(report.as_uri())
    browser.wait("document.querySelectorAll('#completions li').length === 2")
    assert browser.evaluate("document.getElementById('step').selectedOptions[0].textContent") == "20"
    assert browser.evaluate("document.getElementById('prompt-text').textContent") == "200=</script>"
    # Ratios below 1 are blue, above orange, at 1 not shaded.
    colours = browser.evaluate(
        "[...document.querySelector('.tokens').children].map((token) => getComputedStyle(token).backgroundColor)"
    )
    assert colours == [
        "rgba(230, 139, 0, 0)",
        "rgba(0, 114, 178, 0.75)",
        "rgba(230, 139, 0, 0.525)",
        "rgba(230, 139, 0, 0.094)",
    ]
    browser.evaluate("document.getElementById('next').click()")
    assert browser.evaluate("document.getElementById('prompt-text').textContent") == "201=</script>"
    assert browser.evaluate("document.getElementById('next').disabled") is True
    browser.evaluate(
        "(() => { const run = document.getElementById('run'); run.selectedIndex = 2;"
        " run.dispatchEvent(new Event('change')); })()"
    )
    assert browser.evaluate("document.getElementById('step').selectedOptions[0].textContent") == "10"  # its last
    browser.evaluate("document.getElementById('rollouts').scrollIntoView()")
    browser.screenshot(pictures / "report_rollouts.png")
    browser.size(400, 800)
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    browser.screenshot(pictures / "report_narrow.png")
    browser.size(1400, 1000)
    assert browser.console == []
