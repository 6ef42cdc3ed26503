"""Questions by their digests: sets of millions of them in 8 bytes each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, UInt64


def digest_of(text: str) -> bytes:
    """8 bytes, the same for texts that differ in case and spacing only."""
    return hashlib.blake2b(" ".join(text.casefold().split()).encode(), digest_size=8).digest()


class Questions:
    """A set of questions."""

    def __init__(self, digests: UInt64[np.ndarray, " n"] | None = None):
        """
        Args:
            digests: as `digest_numbers` makes them, in any order and repeated as may be. None: no question.
        """
        self._digests = np.zeros(0, np.uint64) if digests is None else np.unique(digests)

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, text: str) -> bool:
        return bool(len(self)) and bool(self.hold(digest_numbers([text]))[0])

    def __or__(self, other: Questions) -> Questions:
        return Questions(np.concatenate([self._digests, other._digests]))

    def hold(self, digests: UInt64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Says of each digest whether its question is in the set."""
        if not len(self):
            return np.zeros(len(digests), bool)
        at = np.searchsorted(self._digests, digests)
        return self._digests[np.minimum(at, len(self) - 1)] == digests


def digest_numbers(texts: Iterable[str]) -> UInt64[np.ndarray, " n"]:
    """The digests of texts as numbers."""
    return np.frombuffer(b"".join(map(digest_of, texts)), ">u8").astype(np.uint64)
