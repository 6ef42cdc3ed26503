"""Whether a checkpoint holds what was saved: a manifest of its files, and fingerprints of its arrays.

The manifest is written before a checkpoint is committed and costs next to nothing at any size: of each file its length
and a checksum of its two ends. It finds what is missing, cut off or overwritten, before anything is restored. The
fingerprints find the rest: a sum over all elements, so exact and the same on every mesh.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from p3o_jax.runs.directory import write_atomically

MANIFEST = "files.json"
_END_BYTES = 65_536


def write_manifest(directory: Path) -> None:
    """Records the files under a directory's folders in it."""
    found = {str(path.relative_to(directory)): _digest(path) for path in _files(directory)}
    write_atomically(directory / MANIFEST, json.dumps(found, indent=0) + "\n")


def damage(directory: Path, share: int = 0, num_shares: int = 1) -> str | None:
    """What is wrong with the files of a directory, in a few words; None if nothing is.

    Args:
        directory: with a manifest.
        share, num_shares: look at every `num_shares`-th file only, so that processes can share the work.
    """
    try:
        recorded = json.loads((directory / MANIFEST).read_text())
        files = [(directory / name, name, (int(length), int(crc))) for name, (length, crc) in sorted(recorded.items())]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, AttributeError, TypeError):
        return f"{MANIFEST} is damaged"
    for path, name, (length, crc) in files[share::num_shares]:
        try:
            found = _digest(path)
        except OSError as error:
            return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"
        if found[0] != length:
            return f"{name} has {found[0]} bytes of {length}"
        if found[1] != crc:
            return f"{name} is not what was written"
    return None


def _files(directory: Path) -> list[Path]:
    """What is in the folders of a directory; files directly in it are the checkpoint library's, and change later."""
    return [path for path in sorted(directory.glob("*/**/*")) if path.is_file()]


def _digest(path: Path) -> tuple[int, int]:
    """Length, and CRC-32 of the first and last 64 KiB."""
    length = path.stat().st_size
    with open(path, "rb") as file:
        crc = zlib.crc32(file.read(_END_BYTES))
        if length > _END_BYTES:
            file.seek(max(_END_BYTES, length - _END_BYTES))
            crc = zlib.crc32(file.read(), crc)
    return length, crc


@jax.jit
def _fingerprints(leaves: list[Array]) -> list[UInt32[Array, ""]]:
    return [_fingerprint(leaf) for leaf in leaves]


def _fingerprint(leaf: Array) -> UInt32[Array, ""]:
    """sum_i (bits of element i) (2 i m + 1) mod 2^32, i the position in the whole array, m odd: any single element
    that differs changes it, two that change places do too, and the order of summation does not matter."""
    width = jnp.iinfo(leaf.dtype).bits if jnp.issubdtype(leaf.dtype, jnp.integer) else jnp.finfo(leaf.dtype).bits
    bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{width}")).astype(jnp.uint32)
    weight = jnp.zeros(leaf.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(leaf.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        weight += along * np.uint32(2 * 2_654_435_761 * stride % 2**32)
        stride *= leaf.shape[axis]
    return jnp.sum(bits * (weight + np.uint32(1)), dtype=jnp.uint32)


def fingerprints(tree: Any) -> list[int]:
    """Of every array of a tree, in the order of its leaves; waits for the arrays. The same on every mesh."""
    leaves = jax.tree.leaves(tree)
    by_devices: dict[Any, list[int]] = {}  # the learner and the sampler may have devices of their own
    for i, leaf in enumerate(leaves):
        by_devices.setdefault(frozenset(leaf.devices()) if isinstance(leaf, jax.Array) else None, []).append(i)
    found: dict[int, Any] = {}
    for group in by_devices.values():
        found |= zip(group, _fingerprints([leaves[i] for i in group]), strict=True)
    return [int(value) for _, value in sorted(jax.device_get(found).items())]


def difference(recorded: list[int], tree: Any) -> str | None:
    """Which array of a tree is not what was fingerprinted, by its path; None if all are."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    for path, now, before in zip(paths, fingerprints(tree), recorded, strict=True):
        if now != before:
            return path
    return None
