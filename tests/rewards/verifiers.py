"""Verifiers of all kinds, good and bad, for the tests of what happens to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time


def obedient(prompt, completion, weight=1.0):
    """Does what the completion says."""
    what, _, value = completion.partition(" ")
    if what == "raise":
        raise RuntimeError(f"as asked\n{'x' * 10_000}")
    if what == "evaluate":
        return float(bool(eval(value)))
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "exit":
        os._exit(3)
    if what == "child":  # which would live on, and hold the pipe
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({value})"]).wait()
    if what == "sleep":
        time.sleep(float(value))
    return weight * float(value)


def surroundings(prompt, completion):
    """1 if the process is as a verifier needs it: a main thread, no JAX, the CPU only."""
    threading.Thread(target=lambda: None).start()
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))  # fails off the main thread
    return float("jax" not in sys.modules and os.environ["JAX_PLATFORMS"] == "cpu" and completion.num_tokens == 7)


def sorted_or_else(prompt, completion):
    """Sorting digits; a 9 in a completion makes it hang, a 0 makes it fail."""
    if "9" in completion:
        return float(9**9**9 > 0)
    if "0" in completion:
        raise RuntimeError("a zero is no reward")
    return sum(a == b for a, b in zip(completion, prompt.answer, strict=False)) / len(prompt.answer)
