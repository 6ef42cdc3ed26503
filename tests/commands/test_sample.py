"""`p3o sample`: what is printed as it is drawn is what the sampler returns."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from p3o_jax.commands.sample import Typed, run
from p3o_jax.tokenizers.text import CharTokenizer


def test_text_comes_in_order_once_and_without_the_end(capsys):
    """Slots of two devices that hold the same row, out of order; rows besides, and slots without one."""
    pieces: list[str] = []
    typed = Typed(CharTokenizer("abc"), {0}, pieces.append)

    def told(rows, places, tokens):
        typed(*(np.array(values) for values in (rows, places, tokens, [0.0] * len(rows))))

    told([1, 0], [0, 0], [3, 1])
    told([0, 9], [2, 0], [3, 1])  # the second token is late
    assert "".join(pieces) == "a"
    for _ in range(2):
        told([0], [1], [2])
    told([0], [3], [0])
    typed.finish()
    assert "".join(pieces) == "abc\n"


def sampled(capsys, *arguments: str) -> str:
    run(["random:quickstart", "012=", "--response-tokens", "6", *arguments])
    return capsys.readouterr().out


def test_a_streamed_completion_is_the_one_of_the_sampler(capsys):
    """Alone and streamed, or the first of two that are not; on one device or two that share the model."""
    streamed = sampled(capsys, "--log-probs", "--temperature", "2", "--top-k", "5")
    text, heading, *tokens = streamed.rstrip("\n").split("\n")
    shown = [re.fullmatch(r" *(-?[\d.]+) +([\d.]+)% +(\d+)  '(.*)'", line) for line in tokens]
    assert "".join(match[4] for match in shown) == text
    assert heading.startswith(f"--- {len(shown)} tokens, ended by ")
    log_probs = [float(match[1]) for match in shown]
    assert float(heading.rpartition(" ")[2]) == pytest.approx(sum(log_probs), abs=1e-3)
    np.testing.assert_allclose([float(match[2]) / 100 for match in shown], np.exp(log_probs), atol=1e-4)
    both = sampled(capsys, "--samples-per-prompt", "2", "--temperature", "2", "--top-k", "5")
    first, second = (part.split("\n")[1] for part in both.split("--- ")[1:])
    assert first == text != second


@pytest.mark.parametrize("ended", ["closed output", "Ctrl-C"])
def test_a_stream_that_is_not_wanted_any_more_ends_quietly(ended):
    command = [
        sys.executable,
        "-m",
        "p3o_jax.commands.main",
        "sample",
        "random:quickstart",
        "012=",
        "--response-tokens",
        "4000",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, "--top-k", "1"], env=os.environ | {"XLA_FLAGS": ""}, **pipes) as process:
        assert len(process.stdout.read(3)) == 3
        if ended == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) in (-signal.SIGINT, -signal.SIGPIPE)


def test_an_empty_prompt_is_not_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    for prompt in ([], [""]):
        with pytest.raises(ValueError, match="the prompt is empty: give it as an argument, or on standard input"):
            run(["random:quickstart", *prompt])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "0"], "temperature must be positive"),
        (["--top-p", "0"], "top_p must be above 0"),
        (["--top-k", "0"], "top_k must be a whole number, at least 1"),
        (["--precision", "int7"], "precision.weights must be one of"),
        (["--stop-ids", "100000"], r"stop ids \[100000\] are outside the vocabulary"),
        (["--response-tokens", "5000"], "the prompt has 4 tokens: .* context of 4096; give fewer"),
        (["--samples-per-prompt", "0"], "samples_per_prompt=0"),
        (["--seed", "4294967296"], "seed must be at least 0 and below"),
        (["--greedy", "--temperature", "2"], "--greedy draws nothing: leave out temperature"),
        (["--mesh.tensor", "3"], "tensor=3 does not divide"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        run(["random:quickstart", "012=", *arguments])
    assert "\n" not in str(error.value)
