"""Verifiers that hang, crash and lie: bounded time, the others' answers, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from p3o_jax.rewards import Completion, Function, Graded, MathVerify, Prompt
from p3o_jax.rewards.pool import Failed, TimedOut, VerifierPool, Verifiers, _dumps

PROMPT = Prompt(0, "?", "42", {})
OBEDIENT = Function("tests.rewards.verifiers:obedient")


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(OBEDIENT, Verifiers(processes=2, timeout_seconds=1)) as pool:
        yield pool


def ask(pool, *completions):
    return pool([(PROMPT, Completion(text)) for text in completions])


def test_order_is_kept_whoever_is_first(pool):
    found = ask(pool, "sleep 0.3", *(f"say {i}" for i in range(50)))
    assert [one.reward for one in found] == [0.3, *range(50)]
    assert found[2] == Graded(1.0, True, "say 1")
    assert ask(pool) == []


def test_one_that_hangs_in_one_instruction_is_killed_and_the_others_answer(pool):
    started = time.monotonic()
    found = ask(pool, "say 1", "evaluate 9**9**9**9", "say 2", "evaluate 9**9**9", "say 3")
    assert time.monotonic() - started < 8
    assert [one.reward for one in found[::2]] == [1, 2, 3]
    assert found[1::2] == [TimedOut("killed after 1 s")] * 2
    assert all(type(one) is TimedOut for one in found[1::2])


def test_errors_are_errors_and_never_rewards(pool):
    found = ask(pool, "raise", "say nan", "say inf", "say what", "evaluate '9' * 10**12", "crash", "exit", "say 1")
    assert [type(one) for one in found] == [Failed] * 7 + [Graded]
    messages = ("RuntimeError: as asked", "the reward is nan", "the reward is inf", "could not convert", "MemoryError",
                "SIGSEGV", "status 3")  # fmt: skip
    for one, message in zip(found, messages, strict=False):
        assert message in one
        assert len(one) <= 300


def test_what_a_verifier_started_dies_with_it(pool):
    marker = 1000 + os.getpid() / 1e6
    started = time.monotonic()
    assert ask(pool, f"child {marker}") == [TimedOut("killed after 1 s")]
    assert time.monotonic() - started < 5
    assert not running(f"time.sleep({marker})")


def test_an_interruption_does_not_shift_answers(pool, monkeypatch):
    listen, calls = pool._listen, []

    def interrupted(results):
        calls.append(results)
        if len(calls) == 2:
            raise KeyboardInterrupt
        listen(results)

    monkeypatch.setattr(pool, "_listen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(pool, *(f"say {i}" for i in range(10)))
    monkeypatch.undo()
    assert [one.reward for one in ask(pool, "say 7", "say 8")] == [7, 8]


def test_a_verifier_inherits_no_device_and_has_a_main_thread():
    with VerifierPool(Function("tests.rewards.verifiers:surroundings"), Verifiers(processes=1)) as pool:
        assert pool([(PROMPT, Completion("", num_tokens=7))]) == [Graded(1.0, True, "")]


def test_a_verifier_that_cannot_start_says_why():
    broken = object.__new__(Function)
    object.__setattr__(broken, "path", "no_such_module:f")
    object.__setattr__(broken, "arguments", {})
    with (
        VerifierPool(broken, Verifiers(processes=1)) as pool,
        pytest.raises(ChildProcessError, match=r"a verifier did not start: .*cannot import no_such_module"),
    ):
        pool([(PROMPT, "1")])


def test_verifiers_end_with_the_run_that_was_killed(tmp_path):
    """Also one that hangs, which never learns that its run is gone."""
    program = """
import os, signal, sys, threading
from p3o_jax.rewards.pool import VerifierPool, Verifiers
from p3o_jax.rewards import Function, Prompt
pool = VerifierPool(Function("tests.rewards.verifiers:obedient"), Verifiers(processes=2, timeout_seconds=0.5))
pool([(Prompt(0, "", "", {}), "say 1")] * 4)
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
print([worker._process.pid for worker in pool._workers], flush=True)
pool([(Prompt(0, "", "", {}), "evaluate 9**9**9")])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    processes = eval(result.stdout)
    assert len(processes) == 2, result.stderr
    until = time.monotonic() + 10  # one ends at once, the other at twice its time-out and a second
    while any(Path(f"/proc/{process}").exists() for process in processes) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [process for process in processes if Path(f"/proc/{process}").exists()]


def test_what_the_main_program_defines_is_found_under_its_own_name(tmp_path):
    (tmp_path / "program.py").write_text(
        "from dataclasses import dataclass\n"
        "from p3o_jax.rewards import Prompt, Reward\n"
        "from p3o_jax.rewards.pool import VerifierPool, Verifiers\n"
        "@dataclass(frozen=True)\n"
        "class Own(Reward):\n"
        "    def __call__(self, prompt, completion):\n"
        "        return float(completion)\n"
        "if __name__ == '__main__':\n"
        "    with VerifierPool(Own(), Verifiers(processes=1)) as pool:\n"
        "        print(pool([(Prompt(0, '', '', {}), '7')])[0].reward)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "program"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
    assert result.stdout == "7.0\n", result.stderr


def test_mathematics_that_is_meant_to_hurt():
    """Bounded time, every row accounted for, and the verifiers work on."""
    pytest.importorskip("math_verify", reason="needs the extra 'tasks'")
    fractions = "\\frac{1}{" * 10_000 + "2" + "}" * 10_000
    rows = [
        (PROMPT, "\\boxed{(10^{9})!}"),
        (PROMPT, "\\boxed{9^{9^{9^9}}}"),
        (PROMPT, f"\\boxed{{{fractions}}}"),
        (PROMPT, fractions),
        (PROMPT, ""),
        (PROMPT._replace(answer="\\frac{1}{"), "42"),
        (PROMPT._replace(answer=""), "42"),
        (PROMPT, "\\boxed{42}"),
    ]
    with VerifierPool(MathVerify(), Verifiers(processes=2, timeout_seconds=2)) as pool:
        pool(rows[-1:])  # started
        started = time.monotonic()
        found = pool(rows)
        assert time.monotonic() - started < 15
    assert [type(one) for one in found] == [TimedOut, TimedOut, Graded, Graded, Graded, Failed, Failed, Graded]
    assert [one.reward for one in (found[3], found[4], found[7])] == [0, 0, 1]
    assert found[4].answer == ""
    assert not found[2].readable  # longer than any answer
    assert "cannot be read" in found[5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"processes": 0}, "verifiers.processes must be at least 1"), ({"timeout_seconds": 0}, "must be positive")],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        Verifiers(**settings)


def test_what_is_sent_to_a_verifier_is_small():
    assert len(_dumps(OBEDIENT)) < 300


def running(words: str) -> bool:
    commands = [path / "cmdline" for path in Path("/proc").iterdir() if path.name.isdecimal()]
    found = []
    for command in commands:
        try:
            found.append(command.read_bytes())
        except OSError:
            continue
    return any(words.encode() in command for command in found)
