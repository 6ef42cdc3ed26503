"""SIGTERM: once asks, twice ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from p3o_jax.runs.preemption import Preemption


def test_a_request_is_noticed_and_the_handler_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        assert not preemption.requested(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested(1)
        assert preemption.requested(1)
    assert signal.getsignal(signal.SIGTERM) == before


def test_in_another_thread_nothing_is_listened_to():
    before, found = signal.getsignal(signal.SIGTERM), []

    def body():
        with Preemption() as preemption:
            found.append(preemption.requested(0))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [False] and signal.getsignal(signal.SIGTERM) == before


def test_a_second_signal_ends_the_process_even_where_python_does_not_run():
    """The main thread waits in C for a lock that nobody opens, where no handler of Python's runs."""
    program = """
import ctypes, sys
from p3o_jax.runs.preemption import Preemption
with Preemption():
    libc = ctypes.PyDLL(None)  # keeps the interpreter's lock in vain: the call below blocks in C
    print("ready", flush=True)
    ctypes.CDLL(None).pause()
    while True: ctypes.CDLL(None).pause()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert "a second one ends at once" in process.stderr.readline()
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 128 + signal.SIGTERM
