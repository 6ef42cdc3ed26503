"""What is logged of a step's time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from p3o_jax.batch.types import Rollout
from p3o_jax.devices.chips import CHIPS
from p3o_jax.models.flops import forward_flops
from p3o_jax.models.transformer import TransformerConfig


def speed(
    seconds: Mapping[str, float],
    rollout: Rollout,
    *,
    sampled_tokens: int,
    epochs: int,
    model: TransformerConfig,
    vocab_size: int,
    num_devices: float,
    device_kind: str,
) -> dict[str, float]:
    """What is logged of a step's time: seconds of each phase, response tokens a second, and the learner's MFU.

    `time/mfu` is the learner's model FLOPs over what the devices could have done in the learning phase at their
    bfloat16 peak (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): forward and backward over the tokens there are,
    padding, recomputation and further passes left out. It is absent where `device_kind` has no stated peak.

    Args:
        seconds: of the phases, `sample` and `learn` among them.
        rollout: this process's rows that were learned from.
        sampled_tokens: of this process's responses, whether learned from or not.
        epochs: passes of the learner over them.
        num_devices: that these rows are shared by.
    """
    tokens = int(rollout.response_length.sum())
    found = {f"time/{phase}_seconds": spent for phase, spent in seconds.items()} | {
        "time/sampler_tokens_per_second": sampled_tokens / seconds["sample"],
        "time/learner_tokens_per_second": tokens * epochs / seconds["learn"],
    }
    chip = CHIPS.get(device_kind)
    if chip is not None:
        predictions, rows = np.unique(rollout.prompt_length + rollout.response_length - 1, return_counts=True)
        forward = sum(
            forward_flops(model, vocab_size, int(count), int(tokens)).total
            for tokens, count in zip(predictions, rows, strict=True)
        )
        flops = 3.0 * epochs * forward
        found["time/mfu"] = flops / seconds["learn"] / (num_devices * chip.peak_flops)
    return found
