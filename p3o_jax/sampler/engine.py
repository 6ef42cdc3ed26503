"""What generates rollouts: an engine is given parameters and asked for responses.

Training, evaluation and the probe know engines by this protocol; `Sampler` is the one in this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Key

from p3o_jax.batch.types import Rollout
from p3o_jax.sampler.sampling import AS_THEY_ARE, Sampling, is_count


@dataclass(frozen=True)
class Requests:
    """Asks for responses to this process's prompts.

    Args:
        prompts: token ids; their number must divide by the devices of this process that share rows.
        indices: one id a prompt; rows are keyed by it and grouped by it.
        key: of the seed and the purpose (training step, evaluation).
        num_samples: rows of each prompt.
        sampling: temperature and truncation, of all prompts or of each.
        response_limits: longest response of each prompt; None: the engine's own limit.
        greedy: take the most likely token instead; log-probs are then 0, those of a certain event.
        support: what to keep of every distribution sampled from besides the token's own log-prob: of the
            k most likely tokens (a number), or of the whole vocabulary ("exact"); -inf at tokens that are cut.

    Raises:
        ValueError: settings that exclude each other or do not go with the prompts.
    """

    prompts: Sequence[Sequence[int]]
    indices: Sequence[int]
    key: Key[Array, ""]
    num_samples: int = 1
    sampling: Sampling | Sequence[Sampling] = AS_THEY_ARE
    response_limits: Sequence[int] | None = None
    greedy: bool = False
    support: int | Literal["exact"] | None = None

    def __post_init__(self) -> None:
        if self.greedy and self.support is not None:
            raise ValueError("sampler: support is of sampled distributions, and greedy=True does not sample")
        if not is_count(self.num_samples):
            raise ValueError(f"sampler: num_samples must be a whole number, at least 1, got {self.num_samples!r}")
        if not (self.support is None or self.support == "exact" or is_count(self.support)):
            raise ValueError(f"sampler: support must be None, 'exact' or a number of tokens, got {self.support!r}")
        settings = None if isinstance(self.sampling, Sampling) else self.sampling
        for name, values in (
            ("indices", self.indices),
            ("sampling", settings),
            ("response_limits", self.response_limits),
        ):
            if values is not None and len(values) != len(self.prompts):
                raise ValueError(f"sampler: {len(values)} {name} for {len(self.prompts)} prompts")


@runtime_checkable
class Engine(Protocol):
    """Generates rollouts. Every process must make each call."""

    mesh: Mesh
    """Decides which rows each process asks for and reads (`processes.row_part`)."""

    def publish(self, params: nnx.State, version: int = 0) -> Any:
        """Takes the learner's parameters over and returns what `generate` draws from.

        Args:
            params: sharded as the learner has them.
            version: rollout steps that they have been trained for, recorded with every token drawn from them.
        """

    def abstract_weights(self) -> Any:
        """Shapes, dtypes and shardings of what `publish` returns, for restoring a checkpoint."""

    def generate(self, weights: Any, requests: Requests) -> Rollout:
        """Draws responses from what `publish` returned: global arrays, rows ordered by prompt, then sample.

        Raises:
            ValueError: a prompt or a setting that cannot be served, by name.
        """
