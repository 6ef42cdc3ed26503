"""The sampler: prefill, then a `while_loop` that decodes until every row has stopped.

The prompts of a group share one prefill. A row's random numbers are keyed by (seed,
purpose, prompt, sample, position), so its tokens do not depend on the batch it is in,
its place there, or the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from p3o_jax import sharding
from p3o_jax.models.kv_cache import KVCache
from p3o_jax.models.transformer import Transformer, TransformerConfig
from p3o_jax.precision import Precision
from p3o_jax.sampler.distributions import distribution, empty_support
from p3o_jax.sampler.weights import WeightFormat, Weights
from p3o_jax.types import FinishReason, Rollout, Support


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


class _Loop(NamedTuple):
    """The state of the decoding loop; row r has sampled `response_length[r]` tokens."""

    tokens: Int[Array, "B S"]
    log_probs: Float[Array, "B S"]
    response_length: Int[Array, " B"]
    finish_reason: Int[Array, " B"]
    done: Bool[Array, " B"]
    logits: Float[Array, "B V"]
    cache: KVCache
    support: Support | None  # as in the rollout


class Sampler:
    """Samples responses from weights that `synchronise` prepared."""

    def __init__(
        self, config: TransformerConfig, vocab_size: int, limits: SamplingLimits, precision: Precision, mesh: Mesh
    ):
        """
        Raises:
            ValueError: the limits do not fit the model.
        """
        total = limits.prompt_tokens + limits.response_tokens
        if limits.prompt_tokens < 1 or limits.response_tokens < 1:
            raise ValueError(f"sampler: limits on tokens must be positive, got {limits}")
        if total > config.context_tokens:
            raise ValueError(
                f"sampler: prompts of {limits.prompt_tokens} and responses of {limits.response_tokens} tokens exceed "
                f"model.context_tokens={config.context_tokens}"
            )
        outside = [i for i in (*limits.eos_ids, *limits.stop_ids) if not 0 <= i < vocab_size]
        if outside:
            raise ValueError(f"sampler: stop ids {outside} are outside the vocabulary of {vocab_size} tokens")
        self.limits, self.precision, self.mesh = limits, precision, mesh
        self._format = WeightFormat(config, vocab_size, precision, mesh)
        self.sample = jax.jit(self._sharded_sample, static_argnames=("num_samples", "greedy", "support"))
        """The compiled part of a call: weights, padded prompts and what they are sampled with -> rollout."""

    def synchronise(self, params: nnx.State, version: int = 0) -> Weights:
        """Learner parameters -> the sampler's own copy: adapters merged, cast or quantised, moved to its sharding.

        Nothing else outlives a call, so there is no cache that could belong to another version.
        """
        return self._format.synchronise(params, version)

    def abstract_weights(self) -> Weights:
        """Shapes, dtypes and shardings of what `synchronise` returns, for restoring a checkpoint."""
        return self._format.abstract()

    def __call__(
        self,
        weights: Weights,
        prompts: Sequence[Sequence[int]],
        prompt_indices: Sequence[int],
        *,
        key: Array,
        num_samples: int = 1,
        temperature: float = 1.0,
        greedy: bool = False,
        support: int | Literal["exact"] | None = None,
    ) -> Rollout:
        """Responses to this process's prompts, `num_samples` each, on the device.

        Args:
            weights: from `synchronise`.
            prompts: token ids; their number must divide by the devices of this process that share rows.
            prompt_indices: one id a prompt; rows are keyed by it and grouped by it.
            key: of the seed and the purpose (training step, evaluation).
            temperature: logits are divided by it; positive.
            greedy: take the most likely token instead; log-probs are then 0, those of a certain event.
            support: what to keep of every distribution sampled from besides the token's own log-prob: of the
                k most likely tokens (a number), or of the whole vocabulary ("exact").

        Returns:
            A `Rollout` of global arrays, rows ordered by prompt, then sample.

        Raises:
            ValueError: an empty or too long prompt, or a temperature that is not positive.
        """
        if greedy and support is not None:
            raise ValueError("sampler: support is of sampled distributions, and greedy=True does not sample")
        if not temperature > 0:
            raise ValueError(f"sampler: temperature must be positive, got {temperature} (for the mode use greedy=True)")
        limit = self.limits.prompt_tokens
        padded = np.zeros((len(prompts), limit), np.int32)
        lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        for i, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= limit:
                raise ValueError(
                    f"sampler: prompt {prompt_indices[i]} has {len(prompt)} tokens, allowed are 1 to {limit}"
                )
            padded[i, : len(prompt)] = prompt
        arrays = (padded, lengths, np.asarray(prompt_indices, np.int32))
        return self.sample(
            weights,
            *sharding.to_global(arrays, self.mesh),
            key,
            jnp.float32(temperature),
            num_samples=num_samples,
            greedy=greedy,
            support=support,
        )

    def _sharded_sample(self, weights, *arrays, num_samples: int, greedy: bool, support: Any) -> Rollout:
        rows, whole = sharding.batch_spec(self.mesh), PartitionSpec()
        sample = jax.shard_map(
            partial(self._local_sample, num_samples=num_samples, greedy=greedy, support=support),
            mesh=self.mesh,
            in_specs=(Weights(self._format.specs, whole), rows, rows, rows, whole, whole),
            out_specs=rows,
        )
        return sample(weights, *arrays)

    def _local_sample(
        self,
        weights,
        prompts,
        prompt_length,
        prompt_index,
        key,
        temperature,
        *,
        num_samples,
        greedy,
        support,
    ) -> Rollout:
        """What one device does with its prompts [N, P]; rows B = N x num_samples."""
        model: Transformer = nnx.merge(self._format.graphdef, weights.params)
        positions = jnp.broadcast_to(jnp.arange(prompts.shape[1], dtype=jnp.int32), prompts.shape)
        hidden, cache = model.hidden(prompts, positions)
        last = jnp.take_along_axis(hidden, (prompt_length - 1)[:, None, None], axis=1)[:, 0]

        def per_sample(array: Array, axis: int = 0) -> Array:
            return jnp.repeat(array, num_samples, axis=axis)

        def cache_slots(array: Float[Array, "L N P ..."]) -> Float[Array, "L B S ..."]:
            room = ((0, 0), (0, 0), (0, self.limits.response_tokens)) + ((0, 0),) * (array.ndim - 3)
            return per_sample(jnp.pad(array, room), axis=1)

        samples = jnp.tile(jnp.arange(num_samples), prompts.shape[0])
        groups, prompt_length = per_sample(prompt_index), per_sample(prompt_length)
        row_keys = jax.vmap(lambda prompt, sample: jax.random.fold_in(jax.random.fold_in(key, prompt), sample))(
            groups, samples
        )
        room = jnp.zeros((prompts.shape[0], self.limits.response_tokens), prompts.dtype)
        tokens = per_sample(jnp.concatenate([prompts, room], axis=1))
        rows = jnp.arange(tokens.shape[0])
        like_rows = partial(sharding.match_variance, like=prompt_length)
        state = _Loop(
            tokens=tokens,
            log_probs=like_rows(jnp.zeros(tokens.shape, jnp.float32)),
            response_length=jnp.zeros_like(prompt_length),
            finish_reason=jnp.full_like(prompt_length, FinishReason.LENGTH),
            done=jnp.zeros_like(prompt_length, jnp.bool_),
            logits=per_sample(model_logits(model, last)),
            cache=jax.tree.map(cache_slots, cache.stored_as(self.precision.kv_cache)),
            support=jax.tree.map(like_rows, empty_support(support, tokens.shape, model.vocab_size)),
        )

        def draw(state: _Loop) -> _Loop:
            """Samples one token for every row that has not stopped."""
            at = prompt_length + state.response_length
            token, log_prob = sample_token(state.logits, temperature, row_keys, state.response_length, greedy)
            kept = distribution(state.logits, temperature, support)
            write = partial(jnp.where, state.done)
            length = write(state.response_length, state.response_length + 1)
            is_eos, is_stop = is_one_of(token, self.limits.eos_ids), is_one_of(token, self.limits.stop_ids)
            reason = jnp.where(is_eos, FinishReason.EOS, jnp.where(is_stop, FinishReason.STOP, FinishReason.LENGTH))
            # A row that has stopped writes out of bounds, which drops the write.
            at = write(tokens.shape[1], at)
            kept = jax.tree.map(lambda of_all, new: of_all.at[rows, at].set(new, mode="drop"), state.support, kept)
            return state._replace(
                tokens=state.tokens.at[rows, at].set(token, mode="drop"),
                log_probs=state.log_probs.at[rows, at].set(log_prob, mode="drop"),
                response_length=length,
                finish_reason=write(state.finish_reason, reason.astype(jnp.int32)),
                done=state.done | is_eos | is_stop | (length == self.limits.response_tokens),
                support=kept,
            )

        def step(state: _Loop) -> _Loop:
            """Feeds the token drawn last, and draws the next."""
            position = prompt_length + state.response_length - 1
            hidden, cache = model.decode(state.tokens[rows, position], position, state.cache)
            return draw(state._replace(logits=model_logits(model, hidden), cache=cache))

        state = jax.lax.while_loop(lambda state: ~state.done.all(), step, draw(state))
        return Rollout(
            tokens=state.tokens,
            prompt_length=prompt_length,
            response_length=state.response_length,
            behaviour_log_probs=state.log_probs,
            temperature=like_rows(jnp.full(rows.shape, temperature)),
            policy_version=like_rows(jnp.full(rows.shape, weights.version)),
            source=jnp.zeros_like(prompt_length),
            finish_reason=state.finish_reason,
            group=groups,
            support=state.support,
        )


def model_logits(model: Transformer, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """Logits over the whole vocabulary, which the draw needs, on every device of a `tensor` group."""
    return sharding.gather_over_tensor(model.logits(hidden))


def sample_token(
    logits: Float[Array, "B V"],
    temperature: Float[Array, ""],
    row_keys: Array,
    position: Int[Array, " B"],
    greedy: bool,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """A token a row from softmax(logits / temperature), and its log-probability under it, float32."""
    if greedy:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return token, jnp.zeros_like(logits[:, 0])
    log_probs = jax.nn.log_softmax(logits / temperature, axis=-1)
    keys = jax.vmap(jax.random.fold_in)(row_keys, position)
    token = jax.vmap(jax.random.categorical)(keys, log_probs).astype(jnp.int32)
    return token, jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]


def is_one_of(tokens: Int[Array, " B"], ids: tuple[int, ...]) -> Bool[Array, " B"]:
    """Which tokens are among `ids`."""
    return (tokens[:, None] == jnp.asarray(ids, tokens.dtype)).any(axis=-1)
