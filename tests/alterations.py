"""Alterations of good files, as a broken transfer, another program or a stranger makes them, and what comes of them.

An altered file loads, or is refused in one short line that names it; within memory and time. `python -m
tests.alterations KIND DIRECTORY SEED COUNT` tries them, in a process whose memory is limited, and writes what came.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MEMORY_BYTES = 3 * 2**30
SECONDS = 10
VALUES: list[Any] = [
    None, True, False, "", "text", "a\nb", "x" * 5000, [], [[]], [1, "a", None], {}, {"a": {"b": 1}}, 0, 1, -1, 3, 0.5,
    -0.0, 1e30, 1e-30, 1e308, float("nan"), float("inf"), -float("inf"), 2**31, 2**63, -(2**63), 10**4000,
    "\ud800", "\0",
]  # fmt: skip


def of_bytes(data: bytes, rng: random.Random) -> bytes:
    """Cut, flipped, overwritten, repeated, or with another length."""
    changed = bytearray(data)
    at = rng.randrange(min(len(data), 4096) if rng.random() < 0.8 else len(data))
    match rng.randrange(8):
        case 0:
            return data[:at]
        case 1:
            changed[at] ^= 1 << rng.randrange(8)
        case 2:
            changed[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**40, 2**60, 2**63, 2**64 - 1]))
        case 3:
            changed[at : at + 4] = struct.pack("<I", rng.choice([0, 7, 8, 9, 13, 2**16, 2**31, 2**32 - 1]))
        case 4:
            changed[at:at] = rng.randbytes(rng.randrange(1, 64))
        case 5:
            del changed[at : at + rng.randrange(1, 64)]
        case 6:
            changed[at : at + 64] = rng.randbytes(64)
        case 7:
            for _ in range(20):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def of_json(value: Any, rng: random.Random) -> bytes:
    """With another value somewhere, a name less, more or twice, deep, or as bytes are altered."""
    changed = copy.deepcopy(value)
    places = list(_places(changed))
    whole = json.dumps(value).encode()
    kind = rng.randrange(12)
    if kind == 0 or not places:
        return of_bytes(whole, rng)
    if kind == 1:
        return rng.choice(
            [b"[" * 200_000, b'{"a":' * 200_000, whole + b"}", b"", b"null", b"[]", b"{}", b"1", b"\xff\xfe"]
        )
    parent, key = rng.choice(places)
    if kind == 2 and isinstance(parent, dict):
        del parent[key]
    elif kind == 3 and isinstance(parent, dict):
        parent[rng.choice(["", "a\nb", "x" * 5000, "model_type"])] = parent.pop(key)
    elif kind == 4 and isinstance(parent, dict):
        text = json.dumps(value)
        return text.replace("{", "{" + json.dumps(key) + ": " + json.dumps(rng.choice(VALUES)) + ", ", 1).encode()
    elif kind == 5:
        parent[key] = "DEEP"
        return json.dumps(changed).replace('"DEEP"', "[" * 100_000 + "]" * 100_000).encode()
    else:
        parent[key] = rng.choice(VALUES)
    return json.dumps(changed).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items)[:200]:
        yield value, key
        yield from _places(item)


def of_file(file: Path, rng: random.Random) -> bytes:
    """An alteration of a file of any kind that is read."""
    data = file.read_bytes()
    if file.suffix == ".json":
        return of_json(json.loads(data), rng)
    if file.suffix == ".jsonl":
        lines = data.splitlines()
        at = rng.randrange(len(lines))
        lines[at] = of_json(json.loads(lines[at]), rng)
        return b"\n".join(lines) if rng.random() < 0.8 else of_bytes(data, rng)
    if file.suffix == ".safetensors" and rng.random() < 0.7:
        length = struct.unpack("<Q", data[:8])[0]
        header = of_json(json.loads(data[8 : 8 + length]), rng)
        return struct.pack("<Q", len(header)) + header + data[8 + length :]
    return of_bytes(data, rng)


def outcomes(kind: str, directory: Path, seed: int, count: int) -> list[dict[str, Any]]:
    """What came of so many alterations of the files in a directory, made in a process of limited memory."""
    command = [sys.executable, "-m", "tests.alterations", kind, str(directory), str(seed), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    assert done.returncode == 0, f"ended by {done.returncode} after {lines[-1:]}: {done.stderr[-2000:]}"
    assert len(lines) == count
    return lines


def check(lines: list[dict[str, Any]]) -> None:
    """Every alteration loaded, or was refused as it should be, and both happened."""
    for line in lines:
        assert line["seconds"] < SECONDS, line
        if line["error"] is not None:
            assert line["type"] in ("ValueError", "FileNotFoundError", "OSError", "ImportError"), line
            assert "\n" not in line["error"], line
            assert len(line["error"].replace(line["directory"], "")) < 600, line
            assert line["directory"] in line["error"], line
    refused = sum(line["error"] is not None for line in lines)
    assert 0 < refused < len(lines)


def _load_model(directory: Path) -> None:
    from p3o_jax.devices.sharding import make_mesh
    from p3o_jax.models.stored.families import read_config
    from p3o_jax.models.stored.load import load_params
    from p3o_jax.models.stored.pretrained import open_model

    single = sorted(directory.glob("*.gguf"))
    stored = open_model(str(single[0] if single else directory))
    load_params(stored, read_config(stored.config, stored.path), make_mesh())


def _load_tokenizer(directory: Path) -> None:
    from p3o_jax.models.stored.pretrained import Pretrained

    single = sorted(directory.glob("*.gguf"))
    pretrained = Pretrained(str(single[0] if single else directory), chat=not single)
    tokenizer = pretrained.tokenizer(pretrained.open())
    tokenizer.decode(tokenizer.encode("1=2"))


def _load_records(directory: Path) -> None:
    from p3o_jax.tasks.records import column, open_records, text_of

    for file in sorted(directory.glob("*")):
        for records in open_records(str(file)):
            for row in range(min(len(records), 20)):
                text_of(column(records[row], "question", records.where(row)), "question", records.where(row))
            list(records.scan(["question"]))


LOADERS: dict[str, Callable[[Path], None]] = {
    "model": _load_model,
    "tokenizer": _load_tokenizer,
    "records": _load_records,
}


def _main(kind: str, directory: Path, seed: int, count: int) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    LOADERS[kind](directory)  # everything is imported and started
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    files = sorted(file for file in directory.iterdir() if file.name not in ("golden.npz", "README.md"))
    altered = directory.with_name("altered")
    for i in range(count):
        rng = random.Random(f"{seed} {i}")
        shutil.rmtree(altered, ignore_errors=True)
        shutil.copytree(directory, altered)
        file = files[i % len(files)]
        (altered / file.name).write_bytes(of_file(file, rng))
        line: dict[str, Any] = {"i": i, "file": file.name, "directory": str(altered), "error": None}
        signal.alarm(4 * SECONDS)
        start = time.perf_counter()
        try:
            LOADERS[kind](altered)
        except BaseException as error:
            line |= {"error": str(error), "type": type(error).__name__}
        signal.alarm(0)
        print(json.dumps(line | {"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
