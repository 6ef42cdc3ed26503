"""What a probe finds: how far a sampler is from the learner on a set of tokens, and on which of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from p3o_jax.batch import metrics, stats
from p3o_jax.probe.jackknife import ess_of_prompts


@dataclass(frozen=True)
class Token:
    """A token on which the two sides disagree, and what stands before it."""

    prompt_index: int
    position: int  # in the response, from 0
    context: str
    token: str
    log_prob: float  # the learner's
    behaviour_log_prob: float


@dataclass(frozen=True)
class Mismatch:
    """What is said of one set of tokens; means are over tokens."""

    ess: float
    ess_error: float  # its standard error, over prompts; NaN of one prompt
    largest_prompt_share: float  # of sum rho^2, the ESS's denominator, what one prompt has
    sequence_ess: float  # of ratios of whole responses: 1 / rows already where the tokens' is near 1
    kl: float | None  # KL(pi, mu) of the distributions, exact or of their top tokens; None: not looked at
    k3: float
    chi2: float
    log_ratio_abs_mean: float
    log_ratio_abs_max: float
    outside_fraction: float  # of ratios outside 1 +- 0.2
    ratio_mean: float
    nonfinite: int
    num_tokens: int
    num_rows: int


@dataclass(frozen=True)
class Cell:
    """A sampler, and how far it is from the learner."""

    precision: str
    temperature: float
    staleness: int
    mismatch: Mismatch
    top: tuple[Token, ...]


@dataclass(frozen=True)
class Report:
    """All cells, and what there is without any difference."""

    cells: tuple[Cell, ...]
    batch_shape: Mismatch
    """The learner against itself: rows at once, and in halves."""
    equal_precision: Cell
    """The sampler in the learner's own format, at its temperature, with its weights."""
    learner_precision: str
    learner_temperature: float
    kl: str
    """What stands for the KL: "exact" or "top_k", a lower bound."""


def mismatch(
    log_probs: Float[np.ndarray, "B T"],
    behaviour: Float[np.ndarray, "B T"],
    divergence: Float[np.ndarray, "B T"] | None,
    mask: Bool[np.ndarray, "B T"],
    group: Int[np.ndarray, " B"],
) -> Mismatch:
    """The mismatch of tokens where the mask is True.

    Args:
        log_probs: the learner's.
        behaviour: the sampler's.
        divergence: KL(pi, mu) at every token; None: not looked at.
        mask: tokens that count.
        group: the prompt of each row, over which the error of the ESS is taken.
    """
    found = jax.device_get(_statistics(log_probs, behaviour, divergence, mask))
    means: dict[str, Any] = {"kl": None} | {name: float(found[name]) for name in found if name != "nonfinite"}
    with np.errstate(invalid="ignore"):  # of what is masked, or is counted as not finite
        ess = ess_of_prompts(log_probs.astype(np.float64) - behaviour, mask, group)
    return Mismatch(
        ess=ess.ess,
        ess_error=ess.error,
        largest_prompt_share=ess.largest_share,
        **means,
        nonfinite=int(found["nonfinite"]),
        num_tokens=int(mask.sum()),
        num_rows=len(mask),
    )


@jax.jit
def _statistics(log_probs: Any, behaviour: Any, divergence: Any, mask: Any) -> dict[str, Any]:
    """The fields of a `Mismatch` that are taken over tokens [B, T], but for the ESS."""
    log_ratio = stats.log_ratio(log_probs, behaviour, mask)
    found = stats.ratio_metrics(log_ratio, mask)
    tags = {
        "k3": "policy/behaviour_kl_proxy",
        "chi2": "policy/chi2",
        "log_ratio_abs_mean": "policy/log_ratio_abs_mean",
        "log_ratio_abs_max": "policy/log_ratio_abs_max",
        "outside_fraction": "policy/outside_0.2_fraction",
        "ratio_mean": "policy/ratio_mean",
        "nonfinite": "policy/nonfinite_log_ratio",
    }
    wanted = {name: found[tag] for name, tag in tags.items()}
    wanted["sequence_ess"] = stats.sequence_moments(log_ratio, mask)
    if divergence is not None:
        wanted["kl"] = stats.token_mean(divergence, mask)
    return metrics.values(wanted)
