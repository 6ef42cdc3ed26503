"""What an objective is: a frozen dataclass with batch statistics and a loss.

An objective knows no model, mesh or optimizer. `statistics` are what it must know of
the whole optimizer batch before any token's loss can be written down (P3O: the ESS);
they are metrics in the sense of `p3o_jax.batch.metrics`, so they merge over micro-batches
and devices and the loss does not depend on how the batch is split. `loss` then gives
one value a token, and `aggregation` its weight and the global denominator:

    L = sum_t weight_t loss_t / denominator,     denominator over the whole optimizer batch
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from p3o_jax.batch import stats
from p3o_jax.batch.metrics import LossTerm
from p3o_jax.batch.types import AnyArray, Batch, Policy, required
from p3o_jax.objectives import kl
from p3o_jax.objectives.aggregation import Aggregation, TokenMean

Metrics = dict[str, Any]  # tag ("policy/ess") -> p3o_jax.batch.metrics.Metric


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """Fields and terms common to all objectives.

    loss_t = policy_loss_t - entropy_coefficient H_t + reference_kl_coefficient k_t(pi || reference)
    """

    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus. Above 0 it needs `Policy.entropy`."""

    reference_kl_coefficient: float = 0.0
    """Weight of the KL to a frozen policy. Above 0 it needs `Batch.reference_log_probs`."""

    reference_kl: Literal["reference", "k3"] = "reference"
    """Estimator of the KL to the frozen policy, `objectives.kl`: `reference` is the one that published
    results used, whose gradient has the wrong sign where log pi is more than 10 below the frozen
    policy's; `k3` has the same value, and the right sign everywhere."""

    aggregation: Aggregation = TokenMean()
    """How token losses become one number."""

    def __post_init__(self):
        for name in ("entropy_coefficient", "reference_kl_coefficient"):
            check_field(self, name, at_least=0.0)
        check_choice(self, "reference_kl", kl.PARITY_FORMS)

    @property
    def statistics_scope(self) -> Literal["batch", "micro_batch"] | None:
        """Over what `statistics` are taken; None: the objective has none, and costs no extra pass."""
        return None

    @property
    def snapshot(self) -> Literal["epoch", "rollout"] | None:
        """Which snapshot `batch.proximal_log_probs` must hold: the learner's policy at the start of
        the epoch, or at the parameters that sampled; None: not needed.
        """
        return None

    @property
    def support(self) -> Literal["behaviour", "proximal", "both"] | None:
        """Whose distribution over next tokens (not only the sampled one) the loss needs."""
        return None

    @property
    def support_form(self) -> Literal["exact", "top_k"] | None:
        """How much of a distribution `support` must hold: the whole vocabulary, or the k most likely tokens."""
        return None

    def statistics(self, policy: Policy, batch: Batch) -> Any:
        """The batch statistics of these tokens: a tree of metrics to be merged, gradients stopped."""
        return None

    def learning_rate_factor(self, statistics: Any) -> Float[Array, ""] | float:
        """What the learning rate of this update is multiplied by."""
        return 1.0

    @abstractmethod
    def policy_loss(self, policy: Policy, batch: Batch, statistics: Any) -> tuple[Float[Array, "B T"], Metrics]:
        """This objective's own terms, one value a token, and its own metrics.

        Called by `loss`, with every array in float32 (or float64) and 0 at masked tokens.
        """

    def loss(self, policy: Policy, batch: Batch, statistics: Any) -> tuple[Float[Array, "B T"], Metrics]:
        """The loss of each token, 0 where masked, and the metrics of these tokens.

        Args:
          policy: the policy being updated; the loss is differentiated through it.
          batch: what it is updated on.
          statistics: `statistics`, merged over everything that `statistics_scope` says.

        Returns:
          [B, T] losses, NaN at a counted token whose log-ratio is not finite (such an update
          is to be refused: no number is a substitute); tag -> metric, with `policy/*` token
          means and `loss/*` over the aggregation's denominator.

        Raises:
          ValueError: the batch lacks something that this objective needs.
        """
        self.check_needs(policy, batch)
        policy, batch = _at_counted_tokens(policy, batch)
        mask = batch.mask
        log_ratio = policy.log_probs - batch.behaviour_log_probs

        per_token, metrics = self.policy_loss(policy, batch, statistics)
        metrics.setdefault("loss/score", self.term(per_token, batch))
        if self.entropy_coefficient:
            per_token = per_token - self.entropy_coefficient * required(policy.entropy, "entropy")
        if self.reference_kl_coefficient:
            reference = required(batch.reference_log_probs, "reference_log_probs")
            divergence = kl.sampled(self.reference_kl, policy.log_probs - reference)
            per_token = per_token + self.reference_kl_coefficient * divergence
            metrics["loss/reference_kl"] = self.term(divergence, batch)

        usable = jnp.isfinite(log_ratio)
        if self.snapshot is not None:
            usable &= jnp.isfinite(policy.log_probs - required(batch.proximal_log_probs, "proximal_log_probs"))
        # A product, so that the gradient is refused along with the value.
        per_token = jnp.where(mask, per_token * jnp.where(usable, 1.0, jnp.nan), jnp.zeros_like(per_token))

        metrics |= stats.ratio_metrics(log_ratio, mask)
        metrics["policy/entropy_proxy"] = stats.token_mean(-policy.log_probs, mask)
        if policy.entropy is not None:
            metrics["policy/entropy"] = stats.token_mean(policy.entropy, mask)
        if batch.proximal_log_probs is not None:
            metrics |= _proximal_metrics(policy, batch, batch.proximal_log_probs)
        if self.snapshot == "rollout":
            # Same parameters, so what is left is precision (and temperature); unbiased for KL(mu, snapshot).
            gap = batch.behaviour_log_probs - required(batch.proximal_log_probs, "proximal_log_probs")
            metrics["policy/precision_gap_kl"] = stats.token_mean(stats.k3_value(gap), mask)
        metrics["loss/total"] = self.term(per_token, batch)
        return per_token, jax.lax.stop_gradient(metrics)

    def term(self, per_token: Float[Array, "B T"], batch: Batch) -> LossTerm:
        """A term of the loss as a metric, aggregated as the loss is."""
        per_token = jnp.where(batch.mask, per_token, jnp.zeros_like(per_token))
        weights = self.aggregation.weights(batch, per_token.dtype)
        return LossTerm(jnp.sum(weights * per_token), self.aggregation.count(batch, per_token.dtype))

    def check_needs(self, policy: Policy, batch: Batch) -> None:
        """Raises ValueError, naming the field, if the batch or the policy lacks something this objective needs."""
        needs: list[tuple[str, Any, str]] = []
        if self.entropy_coefficient:
            needs.append(("entropy", policy.entropy, "entropy_coefficient > 0"))
        if self.reference_kl_coefficient:
            needs.append(("reference_log_probs", batch.reference_log_probs, "reference_kl_coefficient > 0"))
        if self.snapshot is not None:
            needs.append(("proximal_log_probs", batch.proximal_log_probs, f"a snapshot of the {self.snapshot}"))
        if self.support is not None:
            distributions = batch.support
            needs.append(("support", distributions, f"a KL over {self.support} distributions"))
            needs.append(("support_log_probs", policy.support_log_probs, "a KL over distributions"))
            for anchor in ("behaviour", "proximal"):
                if self.support in (anchor, "both") and distributions is not None:
                    name = f"{anchor}_log_probs"
                    needs.append((f"support.{name}", getattr(distributions, name), "this objective's KL"))
        for name, value, reason in needs:
            if value is None:
                raise ValueError(f"{type(self).__name__} needs {name} ({reason}), which is None")


def _at_counted_tokens(policy: Policy, batch: Batch) -> tuple[Policy, Batch]:
    """Policy and batch in one floating dtype, with zeros wherever the mask is False."""
    dtype = stats.real(policy.log_probs).dtype

    def clean(x):
        if x is None:
            return None
        mask = batch.mask if x.ndim == batch.mask.ndim else batch.mask[..., None]
        return jnp.where(mask, x.astype(dtype), jnp.zeros((), dtype))

    support = batch.support
    if support is not None:
        support = support._replace(
            behaviour_log_probs=clean(support.behaviour_log_probs),
            proximal_log_probs=clean(support.proximal_log_probs),
        )
    return Policy(*(clean(x) for x in policy)), batch._replace(
        behaviour_log_probs=clean(batch.behaviour_log_probs),
        advantages=clean(batch.advantages),
        proximal_log_probs=clean(batch.proximal_log_probs),
        reference_log_probs=clean(batch.reference_log_probs),
        support=support,
    )


def _proximal_metrics(policy: Policy, batch: Batch, proximal: Float[AnyArray, "B T"]) -> Metrics:
    """The off-policyness split in two: pi against the snapshot, and the snapshot against mu."""
    drift = policy.log_probs - proximal
    gap = proximal - batch.behaviour_log_probs
    return {
        "policy/ess/policy_to_proximal": stats.RatioMoments.of(drift, batch.mask),
        "policy/ess/proximal_to_behaviour": stats.RatioMoments.of(gap, batch.mask),
        "policy/proximal_kl_proxy": stats.token_mean(stats.k3_value(drift), batch.mask),
    }


def check_field(objective: Any, name: str, at_least: float = -math.inf, above: float = -math.inf) -> None:
    """Raises ValueError unless the field is a finite number in range."""
    value = getattr(objective, name)
    if not (math.isfinite(value) and value >= at_least and value > above):
        bound = f"above {above}" if above > -math.inf else f"of at least {at_least}"
        raise ValueError(f"{type(objective).__name__}.{name}={value!r}: give a finite number {bound}")


def check_choice(objective: Any, name: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless the field is one of `choices`."""
    value = getattr(objective, name)
    if value not in choices:
        raise ValueError(f"{type(objective).__name__}.{name}={value!r}: give one of {', '.join(choices)}")
