"""The policies that may still sample: the learner's newest, and as many older ones as `staleness` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flax import nnx


class PastPolicy(NamedTuple):
    """What is kept of a policy until it is too old to sample."""

    weights: Any
    """What the engine draws from, as its `publish` returned it."""
    params: nnx.State | None = None
    """What the learner trains, at full precision and sharded as it is, for a snapshot of the parameters that sampled:
    another 4 bytes a trained parameter and version. None: the objective asks for no snapshot, or the learner still has
    these parameters."""

    def stored(self) -> dict[str, Any]:
        """Returns the tree that a checkpoint holds."""
        return {"sampler": self.weights} | ({} if self.params is None else {"learner": self.params})

    @classmethod
    def of_stored(cls, tree: Mapping[str, Any]) -> PastPolicy:
        """Inverts `stored`."""
        return cls(tree["sampler"], tree.get("learner"))


class PolicyRing:
    """The policies of the last `staleness` + 1 rollout steps by version; the oldest of them samples."""

    def __init__(self, staleness: int, past: Mapping[int, PastPolicy]):
        self.past = dict(past)
        self._size = staleness + 1

    def push(self, version: int, policy: PastPolicy) -> None:
        """Adds the newest policy and drops those that are too old to sample."""
        self.past[version] = policy
        while len(self.past) > self._size:
            del self.past[min(self.past)]

    @property
    def behaviour(self) -> PastPolicy:
        """The policy that samples now: `staleness` steps old, or the first while there are fewer."""
        return self.past[min(self.past)]

    @property
    def newest(self) -> PastPolicy:
        """The learner's current policy."""
        return self.past[max(self.past)]
