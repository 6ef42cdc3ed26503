"""The sampler: its own copy of the weights, and prompts in, rollouts out.

The prompts of a group share one prefill. A row's random numbers are keyed by (seed,
purpose, prompt, sample, position), so its tokens do not depend on the batch it is in,
its place there, or the mesh. One program is compiled for each length that prompts are
padded to (`prompt_buckets`) and each kind of truncation, whatever the prompts and their
settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int, Key

from p3o_jax.batch.types import Rollout
from p3o_jax.devices import sharding
from p3o_jax.devices.precision import Precision
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.sampler import decode
from p3o_jax.sampler.decode import OnDraw, Options, Padded
from p3o_jax.sampler.engine import Requests
from p3o_jax.sampler.sampling import NOTHING_CUT, RowSampling, Sampling, Truncation, is_count
from p3o_jax.sampler.weights import WeightFormat, Weights


@dataclass(frozen=True)
class SamplingLimits:
    """The lengths the sampler is compiled for, and where responses end."""

    prompt_tokens: int
    """Longest prompt."""
    response_tokens: int
    """Longest response, the stop token included."""
    eos_ids: tuple[int, ...]
    """The model's end-of-sequence tokens: finish reason `eos`."""
    stop_ids: tuple[int, ...] = ()
    """Other tokens that end a response: finish reason `stop`."""
    slots: int | None = None
    """Rows decoded at a time, over all devices; a slot whose row has ended takes the next row. None: all rows."""


SHORTEST_BUCKET = 16


def prompt_buckets(limit: int) -> list[int]:
    """The lengths that prompts are padded to: `limit`, and the powers of 2 from 16 below it."""
    buckets = [SHORTEST_BUCKET << i for i in range(limit.bit_length())]
    return [*(bucket for bucket in buckets if bucket < limit), limit]


class Sampler:
    """Samples responses from weights that `publish` prepared."""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        limits: SamplingLimits,
        precision: Precision,
        mesh: Mesh,
        learner_mesh: Mesh | None = None,
    ):
        """
        Raises:
            ValueError: the limits do not fit the model.
        """
        total = limits.prompt_tokens + limits.response_tokens
        if not (is_count(limits.prompt_tokens) and is_count(limits.response_tokens)):
            raise ValueError(f"sampler: limits on tokens must be positive, got {limits}")
        if total > config.context_tokens:
            raise ValueError(
                f"sampler: prompts of {limits.prompt_tokens} and responses of {limits.response_tokens} tokens exceed "
                f"model.context_tokens={config.context_tokens}"
            )
        shards = sharding.num_batch_shards(mesh)
        if limits.slots is not None and (not is_count(limits.slots) or limits.slots % shards):
            raise ValueError(f"sampler: slots={limits.slots} must be a positive multiple of the {shards} row shards")
        outside = [i for i in (*limits.eos_ids, *limits.stop_ids) if not (is_count(i, 0) and i < vocab_size)]
        if outside:
            raise ValueError(f"sampler: stop ids {outside} are outside the vocabulary of {vocab_size} tokens")
        self.limits, self.precision, self.mesh = limits, precision, mesh
        self._vocab_size = vocab_size
        self._format = WeightFormat(config, vocab_size, precision, mesh, learner_mesh)
        self._decode_limits = decode.DecodeLimits(
            limits.eos_ids,
            limits.stop_ids,
            limits.response_tokens,
            total,
            None if limits.slots is None else limits.slots // shards,
            precision.kv_cache,
        )
        self.program = jax.jit(self._sharded, static_argnames="options")
        """The compiled part of a call: weights, requests and key -> rollout."""

    def publish(self, params: nnx.State, version: int = 0) -> Weights:
        """Learner parameters -> the sampler's own copy: adapters merged, cast or quantised, moved to its sharding.

        Nothing else outlives a call, so there is no cache that could belong to another version.
        """
        return self._format.convert(params, version)

    def abstract_weights(self) -> Any:
        """`Weights` of shapes, dtypes and shardings of what `publish` returns, for restoring a checkpoint."""
        return self._format.abstract()

    def generate(self, weights: Weights, requests: Requests, on_draw: OnDraw | None = None) -> Rollout:
        """Draws responses to this process's prompts, on the device.

        Args:
            weights: from `publish`.
            requests: what is asked; a response limit is at most `limits.response_tokens`, which is the default.
            on_draw: is told of every token as it is drawn, for a person who waits; compiled for this function.

        Returns:
            A `Rollout` of global arrays, rows ordered by prompt, then sample.

        Raises:
            ValueError: an empty or too long prompt, a token outside the vocabulary, or prompts that do not divide over
                the devices.
        """
        shards, processes, asked = sharding.num_batch_shards(self.mesh), jax.process_count(), requests
        if len(asked.prompts) == 0 or len(asked.prompts) * processes % shards:
            raise ValueError(
                f"sampler: {len(asked.prompts)} prompts of each of {processes} processes do not divide over {shards} "
                "devices"
            )
        padded, truncation = self.padded(asked)
        truncation = NOTHING_CUT if asked.greedy else truncation
        options = Options(asked.num_samples, asked.greedy, truncation, asked.support, on_draw)
        return self.program(weights, sharding.to_global(padded, self.mesh), asked.key, options=options)

    def padded(self, asked: Requests) -> tuple[Padded, Truncation]:
        """Checks and pads the prompts, on the host, to the width and truncation that all processes' prompts need."""
        longest, room, prompts = self.limits.prompt_tokens, self.limits.response_tokens, asked.prompts
        settings = [asked.sampling] * len(prompts) if isinstance(asked.sampling, Sampling) else list(asked.sampling)
        limits = [room] * len(prompts) if asked.response_limits is None else asked.response_limits
        indices = _int32(asked.indices, 0, 2**31 - 1, "prompt index")
        room_of = _int32(limits, 1, room, "response limit")
        tokens = []
        for index, prompt in zip(asked.indices, prompts, strict=True):
            if not 0 < len(prompt) <= longest:
                raise ValueError(f"sampler: prompt {index} has {len(prompt)} tokens, allowed are 1 to {longest}")
            tokens.append(_int32(prompt, 0, self._vocab_size - 1, f"token of prompt {index}"))
        mine = Truncation.of(settings)
        top_k, top_p, min_p, used = sharding.gather_over_processes(
            np.asarray([mine.top_k or 0, mine.top_p, mine.min_p, max(map(len, prompts))])
        ).max(axis=0)
        width = next(bucket for bucket in prompt_buckets(longest) if used <= bucket)
        padded = np.zeros((len(prompts), width), np.int32)
        for row, ids in zip(padded, tokens, strict=True):
            row[: len(ids)] = ids
        requests = Padded(
            padded,
            np.asarray([len(ids) for ids in tokens], np.int32),
            indices,
            room_of,
            RowSampling.of(settings),
        )
        return requests, Truncation(int(top_k) or None, bool(top_p), bool(min_p))

    def _sharded(self, weights: Weights, requests: Padded, key: Key[Array, ""], *, options: Options) -> Rollout:
        rows, whole = sharding.batch_spec(self.mesh), PartitionSpec()

        def local(weights: Weights, requests: Padded, key: Key[Array, ""]) -> Rollout:
            model = nnx.merge(self._format.graphdef, weights.params)
            return decode.draw_responses(model, requests, key, weights.version, options, self._decode_limits)

        in_specs = (Weights._make((self._format.specs, whole)), rows, whole)
        return jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=rows)(weights, requests, key)


def _int32(values: Sequence[int], least: int, most: int, name: str) -> Int[np.ndarray, " N"]:
    """Whole numbers within bounds, or an error that names the first that is none."""
    array = np.asarray(values)
    if array.dtype.kind in "iu" and bool in set(map(type, values)):
        array = array.astype(bool)  # which numpy counts as 0 and 1 beside numbers
    if array.dtype.kind not in "iu":
        raise ValueError(f"sampler: {name} must be a whole number, got {array.ravel()[0]!r} among {array.dtype} values")
    outside = (array < least) | (array > most)
    if outside.any():
        raise ValueError(f"sampler: {name} is {array[outside][0]}, allowed are {least} to {most}")
    return array.astype(np.int32)
