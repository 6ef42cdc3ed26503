"""The arrays that pass between sampler, objectives and learner.

Letters in shapes: B rows, T predictions in a row, V vocabulary, K entries of a
distribution's support. Arrays [B, T] of a `Batch` are aligned with predictions:
column t concerns `targets[:, t]`, the token predicted from `tokens[:, :t + 1]`.
Masks are True where a token counts, and come from lengths, never from ids.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


class FinishReason(IntEnum):
    """Why a response ended."""

    EOS = 0  # the model's end-of-sequence token
    LENGTH = 1  # the limit on response tokens: the response is truncated
    STOP = 2  # another stop token


class Rollout(NamedTuple):
    """What the sampler returns: prompts continued by responses, left-aligned.

    Row i is `prompt_i ++ response_i ++ padding`; what stands in the padding is not
    specified and must not be read. `behaviour_log_probs[i, t]` is the log-probability
    of `tokens[i, t]` under the distribution it was drawn from (the sampler's
    precision, after temperature), and is meaningful at response positions only.
    """

    tokens: Int[Array, "B S"]
    prompt_length: Int[Array, " B"]
    response_length: Int[Array, " B"]  # tokens, the stop token included
    behaviour_log_probs: Float[Array, "B S"]
    temperature: Float[Array, " B"]
    policy_version: Int[Array, " B"]  # rollout steps that the sampling parameters had been trained for
    source: Int[Array, " B"]  # where the row came from; 0 is this run's own sampler
    finish_reason: Int[Array, " B"]  # FinishReason
    group: Int[Array, " B"]  # rows with the same value answer the same prompt
    support: Support | None = None  # [B, S, K]: mu's distribution at each token, where an objective asks for it


def responses(rollout: Rollout) -> list[list[int]]:
    """Each row's response as token ids, without the token that ended it; on the host."""
    ended = rollout.finish_reason != FinishReason.LENGTH
    starts = rollout.prompt_length
    ends = starts + rollout.response_length - ended
    return [row[start:end].tolist() for row, start, end in zip(rollout.tokens, starts, ends, strict=True)]


class Inputs(NamedTuple):
    """What the model reads to predict a batch."""

    tokens: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    positions: Int[Array, "B T"]  # within a sequence, from 0
    temperature: Float[Array, "B T"]  # the learner's: logits are divided by it


class Support(NamedTuple):
    """Distributions over next tokens, for the KL forms that need more than the sampled token.

    K = V and `indices` None: the whole vocabulary. Otherwise the K tokens at `indices`,
    and the rest of the vocabulary is one bucket. The anchors share the indices.
    """

    indices: Int[Array, "B T K"] | None = None
    behaviour_log_probs: Float[Array, "B T K"] | None = None
    proximal_log_probs: Float[Array, "B T K"] | None = None


class Batch(NamedTuple):
    """Scored rollouts, padded or packed: what an objective and the learner consume.

    Values at masked positions are not read. `segment_ids` tells the sequences of a
    packed row apart (0-based within the row, not read where masked); None: one sequence a row.
    """

    mask: Bool[Array, "B T"]
    behaviour_log_probs: Float[Array, "B T"]
    advantages: Float[Array, "B T"]
    proximal_log_probs: Float[Array, "B T"] | None = None  # a snapshot of the learner's own policy
    reference_log_probs: Float[Array, "B T"] | None = None  # a frozen policy
    support: Support | None = None
    segment_ids: Int[Array, "B T"] | None = None
    staleness: Int[Array, "B T"] | None = None  # learner step - policy version, in rollout steps
    source: Int[Array, "B T"] | None = None
    inputs: Inputs | None = None  # None where the log-probs are computed elsewhere


class Policy(NamedTuple):
    """What an objective sees of the policy being updated, on one batch."""

    log_probs: Float[Array, "B T"]  # of the targets, float32, at the learner's temperature
    entropy: Float[Array, "B T"] | None = None
    support_log_probs: Float[Array, "B T K"] | None = None  # at `batch.support.indices`, or of all tokens
