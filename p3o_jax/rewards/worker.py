"""A verifier process: `python -m p3o_jax.rewards.worker FD`, which grades what it is sent until it is killed.

It knows no model and no device: JAX, should a reward import it, sees the CPU only.
"""

from __future__ import annotations

import contextlib
import pickle
import resource
import signal
import sys
from multiprocessing.connection import Connection

from p3o_jax.rewards.base import Graded, judge

_MEMORY_BYTES = 8 * 2**30
"""Address space of a verifier: `"9" * 10**12` is a MemoryError in it, not the end of the host."""

_MAX_MESSAGE_CHARACTERS = 300  # sympy's quote the whole completion


def main() -> None:
    """Reads a reward and its time limit, says "ready", then answers each (prompt, completion) with what it is worth.

    An answer is `Graded`, or the text of an error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides when it ends
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):  # where a lower limit holds already, or the system has none
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    connection = Connection(int(sys.argv[1]))
    try:
        try:
            reward, limit_seconds = pickle.loads(connection.recv_bytes())
            reward.warm_up()
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")
            return
        connection.send("ready")
        while True:
            prompt, completion = pickle.loads(connection.recv_bytes())
            # Ends this process even where the run was killed and nobody else will: by the kernel, so that it works
            # in the middle of one long instruction.
            signal.setitimer(signal.ITIMER_REAL, limit_seconds)
            answer: Graded | str
            try:
                answer = judge(reward, prompt, completion)
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARACTERS]
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the run has ended


if __name__ == "__main__":
    main()
