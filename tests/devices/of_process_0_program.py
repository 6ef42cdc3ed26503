"""What process 0 finds is known to the other, whatever its size, and so is its failure."""

import sys
import time

import jax

import tests.annotations  # noqa: F401  # isort: skip  # before the package
from p3o_jax.devices import processes
from p3o_jax.devices.processes import ElsewhereError, of_process_0

processes.initialize()
me = jax.process_index()


def slow(value):
    assert me == 0, "only process 0 looks"
    time.sleep(1)
    return value


def fails():
    raise ValueError("row 3 of d.jsonl")


assert of_process_0(lambda: slow([1, "a"])) == [1, "a"]
assert len(of_process_0(lambda: slow([f"{i * 7919 % 100003}" for i in range(1_000_000)]))) == 1_000_000
try:
    of_process_0(fails)
except (ValueError, ElsewhereError) as error:
    print(f"told {type(error).__name__}: {error}", flush=True)
sys.exit(0)
