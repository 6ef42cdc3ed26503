"""The decoding loop on one device: prefill, then a `while_loop` that draws until every row has ended.

Rows are decoded in slots. With as many slots as rows each row has its own. With fewer, a
slot whose row has ended takes the next one that waits: its prompt's keys and values, made
once for all rows of the prompt, are copied into the slot, and its first token is drawn
together with the next tokens of the others. No slot is idle while a row waits, everything
stays in one program, and the host hears of nothing until the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from p3o_jax.batch.types import AnyArray, FinishReason, Rollout, Support
from p3o_jax.devices import sharding
from p3o_jax.models.kv_cache import KVCache
from p3o_jax.models.transformer import Transformer
from p3o_jax.sampler.distributions import distribution, empty_support
from p3o_jax.sampler.sampling import RowSampling, Truncation, draw, sampled_log_probs

OnDraw = Callable[[Int[np.ndarray, " B"], Int[np.ndarray, " B"], Int[np.ndarray, " B"], Float[np.ndarray, " B"]], None]
"""Is given, for each slot: which row it decodes (none: the number of rows), the place of the token in the response,
the token, and its log-prob. Called by every device that has the slot, possibly out of order."""


class Padded(NamedTuple):
    """What is asked of the sampler: N prompts, right-padded to the same length, and how to answer them."""

    tokens: Int[AnyArray, "N P"]
    length: Int[AnyArray, " N"]
    prompt_index: Int[AnyArray, " N"]  # rows are keyed by it and grouped by it
    response_limit: Int[AnyArray, " N"]  # tokens
    sampling: RowSampling  # [N]


class Options(NamedTuple):
    """What the loop is compiled for, besides shapes."""

    num_samples: int  # rows of each prompt
    greedy: bool
    truncation: Truncation
    support: int | str | None  # what is kept of every distribution
    on_draw: OnDraw | None = None  # told of every token as it is drawn, on the host


class DecodeLimits(NamedTuple):
    """What the loop is compiled for, whatever it is asked."""

    eos_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    response_tokens: int
    total_tokens: int  # columns of a rollout
    slots: int | None  # on this device; None: as many as rows
    cache_format: str


class _Rows(NamedTuple):
    """What has been drawn for each of the R rows; becomes the rollout."""

    tokens: Int[Array, "R S"]
    log_probs: Float[Array, "R S"]
    response_length: Int[Array, " R"]
    finish_reason: Int[Array, " R"]
    support: Support | None


class _Loop(NamedTuple):
    """The state of the loop: B slots, and all rows."""

    row: Int[Array, " B"]  # which row a slot decodes; R: none
    drawn: Int[Array, " B"]  # how many tokens of it
    token: Int[Array, " B"]  # the last of them
    logits: Float[Array, "B V"]
    cache: KVCache | list[KVCache]
    next_row: Int[Array, ""]  # the first that still waits
    rows: _Rows


def draw_responses(
    model: Transformer,
    requests: Padded,
    key: Key[Array, ""],
    policy_version: Int[Array, ""],
    options: Options,
    limits: DecodeLimits,
) -> Rollout:
    """Responses of one device's rows, ordered by prompt, then sample.

    Args:
        model: the policy.
        requests: this device's prompts.
        key: of the seed and the purpose; a row's random numbers are keyed by it, prompt, sample and position.
        policy_version: recorded with the rows.
        options: what is asked.
        limits: lengths and stop tokens.
    """
    num_prompts = len(requests.tokens)
    prompt_of = np.repeat(np.arange(num_prompts, dtype=np.int32), options.num_samples)
    sample_of = np.tile(np.arange(options.num_samples, dtype=np.int32), num_prompts)
    num_rows = len(prompt_of)
    slots = num_rows if limits.slots is None else min(limits.slots, num_rows)
    length, limit, index = (
        array[prompt_of] for array in (requests.length, requests.response_limit, requests.prompt_index)
    )
    settings = jax.tree.map(lambda array: array[prompt_of], requests.sampling)
    row_keys = _row_keys(key, index, sample_of)
    like_rows = partial(sharding.match_variance, like=length)

    prompt_logits, prompt_cache = _prefill(model, requests, slots, limits.cache_format)
    in_slot = prompt_of[:slots]
    slot_cache = jax.tree.map(lambda array: array[:, in_slot], prompt_cache).with_room(limits.response_tokens)
    layers: list | None = None
    caches: tuple[Any, Any] = (slot_cache, prompt_cache)
    if sharding.platform() == "cpu":
        # There XLA copies a layer's part of stacked arrays before it multiplies with them, at every token.
        layers, caches = model.unstacked_layers(), (slot_cache.unstacked(), prompt_cache.unstacked())
    state = _Loop(
        row=like_rows(jnp.arange(slots, dtype=jnp.int32)),
        drawn=jnp.zeros_like(length[:slots]),
        token=jnp.zeros_like(length[:slots]),
        logits=prompt_logits[in_slot],
        cache=caches[0],
        next_row=like_rows(jnp.int32(slots)),
        rows=_empty_rows(requests, prompt_of, options, limits, model.vocab_size),
    )

    @jax.named_scope("decode")
    def step(state: _Loop) -> _Loop:
        """Feeds the tokens drawn last, fills slots that are free, and draws the next tokens."""
        row = jnp.minimum(state.row, num_rows - 1)
        position = jnp.where(state.row < num_rows, length[row] + state.drawn - 1, 0)
        hidden, cache = model.decode(state.token, position, state.cache, layers)
        state = state._replace(logits=model_logits(model, hidden), cache=cache)
        if slots < num_rows:
            state = _refill(state, jnp.asarray(prompt_of), prompt_logits, caches[1])
        return draw_next(state)

    draw_next = partial(
        _draw, length=length, limit=limit, settings=settings, row_keys=row_keys, options=options, limits=limits
    )
    state = jax.lax.while_loop(
        lambda state: (state.row < num_rows).any() | (state.next_row < num_rows), step, draw_next(state)
    )
    total = length + state.rows.response_length
    at = jnp.arange(limits.total_tokens, dtype=jnp.int32)
    return Rollout(
        tokens=state.rows.tokens,
        length=total,
        action_mask=(at >= length[:, None]) & (at < total[:, None]),
        behaviour_log_probs=state.rows.log_probs,
        temperature=settings.temperature,
        policy_version=like_rows(jnp.full((num_rows, limits.total_tokens), policy_version)),
        source=jnp.zeros_like(length),
        finish_reason=state.rows.finish_reason,
        group=index,
        task=jnp.zeros_like(length),
        support=state.rows.support,
    )


def _row_keys(key: Key[Array, ""], prompt: Int[AnyArray, " R"], sample: Int[AnyArray, " R"]) -> Key[Array, " R"]:
    """The key of every row: whatever else is in the batch, its random numbers are the same."""
    return jax.vmap(lambda prompt, sample: jax.random.fold_in(jax.random.fold_in(key, prompt), sample))(
        prompt, jnp.asarray(sample)
    )


@jax.named_scope("prefill")
def _prefill(
    model: Transformer, requests: Padded, slots: int, cache_format: str
) -> tuple[Float[Array, "N V"], KVCache]:
    """Every prompt through the model, `slots` at a time: the logits after it, and its keys and values [L N K P H]."""

    def forward(tokens: Int[AnyArray, "N P"], length: Int[AnyArray, " N"]) -> tuple[Float[Array, "N V"], KVCache]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        hidden, cache = model.hidden(jnp.asarray(tokens), positions)
        last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]
        return model_logits(model, last), cache.stored_as(cache_format)

    num_prompts = len(requests.tokens)
    num_parts = -(-num_prompts // slots)
    if num_parts == 1:
        return forward(requests.tokens, requests.length)
    size = -(-num_prompts // num_parts)
    last = np.minimum(np.arange(num_parts * size), num_prompts - 1).reshape(num_parts, size)  # which fills the parts up
    logits, cache = jax.lax.map(lambda part: forward(*part), (requests.tokens[last], requests.length[last]))

    def whole(array: Float[Array, "parts L n ..."]) -> Float[Array, "L N ..."]:
        array = jnp.moveaxis(array, 0, 1)
        return array.reshape(array.shape[0], -1, *array.shape[3:])[:, :num_prompts]

    return logits.reshape(-1, logits.shape[-1])[:num_prompts], jax.tree.map(whole, cache)


def _empty_rows(
    requests: Padded, prompt_of: Int[np.ndarray, " R"], options: Options, limits: DecodeLimits, vocab_size: int
) -> _Rows:
    """The prompts, with room for the responses."""
    like_rows = partial(sharding.match_variance, like=requests.length)
    room = ((0, 0), (0, limits.total_tokens - requests.tokens.shape[1]))
    tokens = jnp.pad(requests.tokens, room)[prompt_of]
    length = requests.length[prompt_of]
    return _Rows(
        tokens=tokens,
        log_probs=like_rows(jnp.zeros(tokens.shape, jnp.float32)),
        response_length=jnp.zeros_like(length),
        finish_reason=jnp.full_like(length, FinishReason.LENGTH),
        support=jax.tree.map(like_rows, empty_support(options.support, tokens.shape, vocab_size)),
    )


def _draw(
    state: _Loop,
    *,
    length: Int[AnyArray, " R"],
    limit: Int[AnyArray, " R"],
    settings: RowSampling,
    row_keys: Key[Array, " R"],
    options: Options,
    limits: DecodeLimits,
) -> _Loop:
    """Draws a token for every slot that works; a slot whose row ends with it is free."""
    num_rows = len(length)
    works = state.row < num_rows
    row = jnp.minimum(state.row, num_rows - 1)  # to look up; what a free slot writes is dropped
    if options.greedy:
        token = jnp.argmax(state.logits, axis=-1).astype(jnp.int32)
        # That of a certain event, if it is one.
        log_prob, kept = jnp.where(jnp.isfinite(state.logits.max(axis=-1)), 0.0, jnp.nan), None
    else:
        of_slot = jax.tree.map(lambda array: array[row], settings)
        log_probs = sampled_log_probs(state.logits, of_slot, options.truncation)
        token = draw(log_probs, jax.vmap(jax.random.fold_in)(row_keys[row], state.drawn))
        log_prob = jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]
        kept = distribution(log_probs, options.support)
    if options.on_draw is not None:
        on_host = partial(_on_host, options.on_draw)
        jax.debug.callback(on_host, state.row, state.drawn, token, log_prob)
    at, drawn = length[row] + state.drawn, state.drawn + 1
    is_eos, is_stop = _is_one_of(token, limits.eos_ids), _is_one_of(token, limits.stop_ids)
    reason = jnp.where(is_eos, FinishReason.EOS, jnp.where(is_stop, FinishReason.STOP, FinishReason.LENGTH))
    ends = is_eos | is_stop | (drawn >= limit[row])

    def write(of_rows: Array, new: Array) -> Array:
        place = (state.row, at) if of_rows.ndim > 1 else state.row
        return of_rows.at[place].set(new, mode="drop")

    rows = _Rows(
        tokens=write(state.rows.tokens, token),
        log_probs=write(state.rows.log_probs, log_prob),
        response_length=write(state.rows.response_length, drawn),
        finish_reason=write(state.rows.finish_reason, reason.astype(jnp.int32)),
        support=jax.tree.map(write, state.rows.support, kept),
    )
    return state._replace(row=jnp.where(works & ~ends, row, num_rows), drawn=drawn, token=token, rows=rows)


def _on_host(on_draw: OnDraw, *drawn: Array) -> None:
    """Hands over numpy arrays, where JAX gives its own."""
    on_draw(*map(np.asarray, drawn))


def _refill(
    state: _Loop,
    prompt_of: Int[Array, " R"],
    prompt_logits: Float[Array, "N V"],
    prompt_cache: KVCache | list[KVCache],
) -> _Loop:
    """Gives free slots the rows that wait, in their order: a loop over as many as there are, mostly none.

    A loop rather than a condition, since XLA updates what a loop carries in place.
    """
    num_rows = len(prompt_of)
    free = state.row >= num_rows
    count = jnp.minimum(free.sum(dtype=jnp.int32), num_rows - state.next_row)
    free_slots = jnp.argsort(~free, stable=True).astype(jnp.int32)

    def fill(i: Int[Array, ""], state: _Loop) -> _Loop:
        slot, row = free_slots[i], state.next_row
        prompt = prompt_of[row]

        def copy(of_slots: Float[Array, "L B K S ..."], of_prompts: Float[Array, "L N K P ..."]) -> Array:
            source = jax.lax.dynamic_slice_in_dim(of_prompts, prompt, 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(of_slots, source, slot, axis=1)

        return state._replace(
            row=state.row.at[slot].set(row),
            drawn=state.drawn.at[slot].set(0),
            logits=state.logits.at[slot].set(prompt_logits[prompt]),
            cache=jax.tree.map(copy, state.cache, prompt_cache),
            next_row=row + 1,
        )

    return jax.lax.fori_loop(0, count, fill, state)


def model_logits(model: Transformer, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """Logits over the whole vocabulary, which the draw needs, on every device of a `tensor` group."""
    return sharding.gather_over_tensor(model.logits(hidden))


def _is_one_of(tokens: Int[Array, " B"], ids: tuple[int, ...]) -> Array:
    return (tokens[:, None] == jnp.asarray(ids, tokens.dtype)).any(axis=-1)
