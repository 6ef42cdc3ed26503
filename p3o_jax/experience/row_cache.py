"""What was found out about the rows of files, kept under the user's cache directory.

It is kept by everything that it depends on: the contents of the files, the columns, the tokenizer or the reward with
its settings, the versions of the packages, and this package's own code. It is JSON, and nothing in it is run.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from p3o_jax.devices.cache import cache_directory
from p3o_jax.rewards.base import Reward
from p3o_jax.runs.directory import write_atomically
from p3o_jax.tasks import Dataset
from p3o_jax.tasks.base import Split
from p3o_jax.tokenizers.text import ByteTokenizer, CharTokenizer, Tokenizer

_PACKAGE = Path(__file__).parents[1]
_OWN_CODE = ("rewards", "tasks", "tokenizers", "experience")
_LIBRARIES = ("math-verify", "latex2sympy2_extended", "sympy", "tokenizers", "jinja2", "reasoning-gym")


def kept(key: str | None, find: Callable[[], Any]) -> Any:
    """What is kept under a key, or else what `find` returns, JSON values, which is then kept. None: nothing is kept."""
    if key is None:
        return find()
    path = cache_directory() / "rows" / f"{key}.json"
    try:
        return json.loads(path.read_bytes())["found"]
    except (OSError, ValueError, KeyError, TypeError):
        found = find()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"found": found}))
    except OSError:  # it will be found out again
        pass
    return found


def key(what: str, dataset: Dataset, split: Split, of: Any, settings: Any) -> str | None:
    """The name of what is found about the rows of a split; None: it cannot be named.

    Args:
        of: what looks at them, as `of_tokenizer` or `of_reward` describes it; None: it cannot be described.
        settings: what else it depends on.
    """
    if of is None:
        return None
    rows = dataset.index[split]
    columns = [dataset.prompt, dataset.answer, dataset.before, dataset.after, dataset.unusable_rows]
    contents = [_digest(path) for file in rows.files for path in file.paths]
    described = [what, split, len(rows.number), columns, contents, of, settings, _code(), _versions()]
    text = json.dumps(described, sort_keys=True)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def of_tokenizer(tokenizer: Tokenizer) -> Any:
    """What a tokenizer's ids depend on; None: unknown."""
    if isinstance(tokenizer, CharTokenizer | ByteTokenizer):
        return repr(tokenizer)
    return getattr(tokenizer, "identity", None)


def of_reward(reward: Reward) -> Any:
    """What a reward's judgements depend on; None: unknown, as of a function that is not this package's."""
    found = list(_parts(reward))
    if any(not type(part).__module__.startswith("p3o_jax.") or type(part).__name__ == "Function" for part in found):
        return None
    return repr(reward)


def _parts(value: Any) -> Iterator[Reward]:
    """The rewards that a reward is made of."""
    if isinstance(value, Reward):
        yield value
    if is_dataclass(value):
        for field in fields(value):
            yield from _parts(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _parts(item)


def _digest(path: Path) -> str:
    status = path.stat()
    return _digest_of(path, status.st_size, status.st_mtime_ns)


@cache
def _digest_of(path: Path, size: int, modified: int) -> str:
    """Once a process: a file of gigabytes takes seconds."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


@cache
def _code() -> str:
    files = [path for folder in _OWN_CODE for path in sorted((_PACKAGE / folder).glob("*.py"))]
    return hashlib.blake2b(b"".join(path.read_bytes() for path in files), digest_size=16).hexdigest()


@cache
def _versions() -> list[str]:
    found = [sys.version.split()[0]]
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return found
