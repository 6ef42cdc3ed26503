r"""Starts an experiment as several processes on this machine: a rehearsal of a pod, without one.

    python launch/local_processes.py --processes 2 --devices 4 \
        python -m experiments.quickstart p3o --run-dir runs/rehearsal

Every process gets `--devices` CPU devices and finds the others through jax.distributed; `--distributed` is added to
the command. Output is prefixed with the process it comes from. If a process fails, the others are ended.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
import time


def main() -> int:
    """Runs the command in every process.

    Returns:
        The exit status of the first process that failed, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=4, help="CPU devices of a process")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("no command given")

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    processes = []
    for index in range(arguments.processes):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(arguments.devices),
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": str(arguments.processes),
            "JAX_PROCESS_ID": str(index),
        }
        process = subprocess.Popen(
            [*arguments.command, "--distributed"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=_relay, args=(index, process), daemon=True).start()
        processes.append(process)
    return _wait(processes)


def _relay(index: int, process: subprocess.Popen) -> None:
    for line in process.stdout:
        sys.stdout.write(f"[{index}] {line}")
        sys.stdout.flush()


def _wait(processes: list[subprocess.Popen], grace_seconds: float = 10.0) -> int:
    """Until all have ended; after a failure the others have `grace_seconds` to end by themselves."""
    deadline = None
    try:
        while any(process.poll() is None for process in processes):
            if deadline is None and any(process.poll() for process in processes):
                deadline = time.monotonic() + grace_seconds
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return next((process.returncode for process in processes if process.returncode), 0)


if __name__ == "__main__":
    sys.exit(main())
