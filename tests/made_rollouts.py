"""Rollouts of one turn each, made by hand."""

from __future__ import annotations

import numpy as np

from p3o_jax.batch.types import Rollout


def one_turn(tokens, prompt_length, response_length, **fields) -> Rollout:
    """Rows of a prompt and a response; what is not given is 0, log-probs NaN, temperatures 1."""
    rows, slots = tokens.shape
    start = np.broadcast_to(np.asarray(prompt_length, np.int32), (rows,))
    end, at = start + np.asarray(response_length, np.int32), np.arange(slots)
    zeros = np.zeros(rows, np.int32)
    made = Rollout(
        tokens=tokens,
        length=end,
        action_mask=(at >= start[:, None]) & (at < end[:, None]),
        behaviour_log_probs=np.full((rows, slots), np.nan, np.float32),
        temperature=np.ones(rows, np.float32),
        policy_version=np.zeros((rows, slots), np.int32),
        source=zeros,
        finish_reason=zeros,
        group=zeros,
        task=zeros,
    )
    return made._replace(**fields)
