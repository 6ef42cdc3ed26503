"""The arrays that pass between sampler, objectives and learner.

Letters in shapes: B rows, T predictions in a row, V vocabulary, K entries of a
distribution's support. Arrays [B, T] of a `Batch` are aligned with predictions:
column t concerns `targets[:, t]`, the token predicted from `tokens[:, :t + 1]`.
Masks are True where a token counts, and come from lengths, never from ids.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, TypeVar, overload

import numpy as np
from jaxtyping import Array, Bool, Float, Int

AnyArray = Array | np.ndarray
"""Numpy's on the host, where rollouts are scored and batches are made; JAX's on devices, which take both and return
their own."""


class FinishReason(IntEnum):
    """Why a response ended."""

    EOS = 0  # the model's end-of-sequence token
    LENGTH = 1  # the limit on response tokens: the response is truncated
    STOP = 2  # another stop token


class Rollout(NamedTuple):
    """What an engine returns: prompts continued by responses, left-aligned.

    Row i holds `length[i]` tokens and then padding; what stands in the padding is not
    specified and must not be read. `action_mask` says which tokens the policy drew, and
    only whoever makes a rollout derives it from lengths: a row of several turns has more
    than one stretch of actions. `behaviour_log_probs[i, t]` is the log-probability of
    `tokens[i, t]` under the distribution it was drawn from (the sampler's precision,
    after temperature); it and `policy_version` are meaningful at actions only.
    """

    tokens: Int[AnyArray, "B S"]
    length: Int[AnyArray, " B"]  # tokens of the row, prompt and response
    action_mask: Bool[AnyArray, "B S"]
    behaviour_log_probs: Float[AnyArray, "B S"]
    temperature: Float[AnyArray, " B"]
    policy_version: Int[AnyArray, "B S"]  # rollout steps that the parameters which drew the token had been trained for
    source: Int[AnyArray, " B"]  # whose rollout it is: 0 is this run's own sampler
    finish_reason: Int[AnyArray, " B"]  # FinishReason
    group: Int[AnyArray, " B"]  # rows with the same value answer the same prompt
    task: Int[AnyArray, " B"]  # which component of a mixture asked; 0 otherwise
    support: Support | None = None  # [B, S, K]: mu's distribution at each token, where an objective asks for it

    @property
    def response_length(self) -> Int[AnyArray, " B"]:
        """Tokens that the policy drew, the one that ended the row included."""
        return self.action_mask.sum(axis=1, dtype=np.int32)

    @property
    def prompt_length(self) -> Int[AnyArray, " B"]:
        """Tokens before the first that the policy drew."""
        return self.action_mask.argmax(axis=1)


def responses(rollout: Rollout) -> list[list[int]]:
    """Lists the tokens that the policy drew in each row, without the token that ended it; on the host."""
    drawn = [tokens[actions].tolist() for tokens, actions in zip(rollout.tokens, rollout.action_mask, strict=True)]
    ended = rollout.finish_reason != FinishReason.LENGTH
    return [ids[:-1] if has_end else ids for ids, has_end in zip(drawn, ended, strict=True)]


class Inputs(NamedTuple):
    """What the model reads to predict a batch."""

    tokens: Int[AnyArray, "B T"]
    targets: Int[AnyArray, "B T"]
    positions: Int[AnyArray, "B T"]  # within a sequence, from 0
    temperature: Float[AnyArray, "B T"]  # the learner's: logits are divided by it


class Support(NamedTuple):
    """Distributions over next tokens, for the KL forms that need more than the sampled token.

    K = V and `indices` None: the whole vocabulary. Otherwise the K tokens at `indices`,
    and the rest of the vocabulary is one bucket. The anchors share the indices.
    """

    indices: Int[AnyArray, "B T K"] | None = None
    behaviour_log_probs: Float[AnyArray, "B T K"] | None = None
    proximal_log_probs: Float[AnyArray, "B T K"] | None = None


class Batch(NamedTuple):
    """Scored rollouts, padded or packed: what an objective and the learner consume.

    Values at masked positions are not read. `segment_ids` tells the sequences of a
    packed row apart (0-based within the row, not read where masked); None: one sequence a row.
    """

    mask: Bool[AnyArray, "B T"]
    behaviour_log_probs: Float[AnyArray, "B T"]
    advantages: Float[AnyArray, "B T"]
    proximal_log_probs: Float[AnyArray, "B T"] | None = None  # a snapshot of the learner's own policy
    reference_log_probs: Float[AnyArray, "B T"] | None = None  # a frozen policy
    support: Support | None = None
    segment_ids: Int[AnyArray, "B T"] | None = None
    staleness: Int[AnyArray, "B T"] | None = None  # learner step - policy version, in rollout steps
    source: Int[AnyArray, "B T"] | None = None  # whose rollout it is, as `Rollout.source`
    task: Int[AnyArray, "B T"] | None = None  # which component of a mixture asked, as `Rollout.task`
    row: Int[AnyArray, "B T"] | None = None  # the row of the step's batch that the token is from
    inputs: Inputs | None = None  # None where the log-probs are computed elsewhere


class Policy(NamedTuple):
    """What an objective sees of the policy being updated, on one batch."""

    log_probs: Float[Array, "B T"]  # of the targets, float32, at the learner's temperature
    entropy: Float[Array, "B T"] | None = None
    support_log_probs: Float[Array, "B T K"] | None = None  # at `batch.support.indices`, or of all tokens


T = TypeVar("T")


@overload  # since no type checker solves T for a union
def required(value: AnyArray | None, name: str) -> AnyArray: ...
@overload
def required(value: T | None, name: str) -> T: ...
def required(value: T | None, name: str) -> T:
    """Returns a field of a batch or a policy that not all of them have.

    Raises:
        ValueError: it is None.
    """
    if value is None:
        raise ValueError(f"{name} is needed, and is None")
    return value
