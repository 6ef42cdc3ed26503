"""Statistics of importance ratios, and the masked arithmetic they are made of.

    log_ratio_t = log pi(y_t) - log mu(y_t)        rho_t = exp(log_ratio_t)
    ess         = (mean rho)^2 / mean rho^2        in [1/n, 1], a fraction     (arXiv:2605.12380)

Everything is in log space, shifted by the largest log-ratio, so that no magnitude
overflows, and in float32 (float64 if the log-probs are), whatever the precision of
the model. No statistic carries a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from p3o_jax.batch.metrics import Max, Mean, Sum
from p3o_jax.batch.types import AnyArray

# Bins of the logged histogram of log_ratio: the first and the last are open-ended.
# Evenly spaced in log |log_ratio|: rounding (1e-3) and staleness (1) are both resolved.
_POSITIVE_EDGES = np.array([0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10], np.float32)
LOG_RATIO_EDGES = np.concatenate([-_POSITIVE_EDGES[::-1], _POSITIVE_EDGES])


def real(x: Float[AnyArray, "..."]) -> Float[Array, "..."]:
    """Converts x to float32, unless it is float64: the precision of every statistic and loss."""
    return jnp.asarray(x) if x.dtype == jnp.float64 else jnp.asarray(x, jnp.float32)


def log_ratio(
    log_probs: Float[AnyArray, "B T"], other_log_probs: Float[AnyArray, "B T"], mask: Bool[AnyArray, "B T"]
) -> Float[Array, "B T"]:
    """log_probs - other_log_probs where `mask`, and 0 elsewhere, whatever stands there."""
    log_probs = real(log_probs)
    difference = log_probs - other_log_probs.astype(log_probs.dtype)
    return jnp.where(mask, difference, jnp.zeros_like(difference))


def bounded_exp(x: Float[AnyArray, "..."], limit: float | None = None) -> Float[Array, "..."]:
    """exp(clip(x, -limit, limit)), whose derivative is its own value, also where it is clipped.

    A clip stops the gradient just where it is largest; here it stays at the bound, with
    the right sign. `limit` None: only what the dtype cannot hold is clipped (x > 88 in
    float32). Non-finite x gives NaN.
    """
    largest = float(np.floor(np.log(np.finfo(x.dtype).max)))
    bounded = jnp.minimum(x, largest) if limit is None else jnp.clip(x, -limit, limit)
    return jnp.exp(jax.lax.stop_gradient(bounded) + (x - jax.lax.stop_gradient(x)))


def bounded_expm1(x: Float[AnyArray, "..."], limit: float | None = None) -> Float[Array, "..."]:
    """bounded_exp(x) - 1, with its digits where x is small."""
    small = jnp.abs(x) < 1.0
    near = jnp.expm1(jnp.where(small, x, jnp.zeros_like(x)))
    return jnp.where(small, near, bounded_exp(x, limit) - 1.0)


class RatioMoments(NamedTuple):
    """The mergeable statistic behind the ESS: moments of rho relative to the largest rho.

    A metric (`p3o_jax.batch.metrics`): `combine` merges micro-batches, `all_reduce` devices, and
    the result does not depend on the split. Scalars, or one entry a group ([G]).
    """

    largest: Float[Array, "*G"]  # the largest finite log-ratio; -inf if there is none
    first: Float[Array, "*G"]  # sum of exp(log_ratio - largest)
    second: Float[Array, "*G"]  # sum of exp(2 (log_ratio - largest))
    count: Float[Array, "*G"]  # type: ignore[assignment]  # finite log-ratios that were counted
    nonfinite: Float[Array, "*G"]  # log-ratios that are NaN or infinite

    @classmethod
    def of(
        cls,
        log_ratio: Float[AnyArray, "*S"],
        mask: Bool[AnyArray, "*S"],
        group: Int[AnyArray, "*S"] | None = None,
        num_groups: int = 1,
    ) -> RatioMoments:
        """The moments of the log-ratios at which `mask` is True, over all of them or by group.

        Args:
          log_ratio: log pi - log mu; masked entries may hold anything.
          mask: True counts.
          group: which group an entry belongs to (staleness, source, position bucket); an entry
            outside 0..num_groups-1 belongs to none.
          num_groups: G, static.
        """
        log_ratio = real(jax.lax.stop_gradient(log_ratio))
        one = jnp.ones((), log_ratio.dtype)
        finite = jnp.isfinite(log_ratio)

        largest_of, total_of, at_group = _reductions(mask, group, num_groups)
        seen = mask & finite
        largest = largest_of(jnp.where(seen, log_ratio, -jnp.inf))
        shifted = jnp.where(seen, log_ratio - at_group(largest), -jnp.inf)
        return cls(
            largest=largest,
            first=total_of(jnp.exp(shifted)),
            second=total_of(jnp.exp(2.0 * shifted)),
            count=total_of(jnp.where(seen, one, 0.0)),
            nonfinite=total_of(jnp.where(mask & ~finite, one, 0.0)),
        )

    def maxima(self):
        return (self.largest,)

    def sums(self, maxima):
        # An empty part has largest = -inf on both sides: -inf - -inf must not reach the exp.
        shift = jnp.where(self.largest == maxima[0], 0.0, self.largest - maxima[0])
        return (self.first * jnp.exp(shift), self.second * jnp.exp(2.0 * shift), self.count, self.nonfinite)

    def rebuild(self, maxima, sums):
        return type(self)(*maxima, *sums)

    def _if_finite(self, value: Float[Array, "*G"]) -> Float[Array, "*G"]:
        return jnp.where(self.nonfinite > 0, jnp.nan, value)

    def ess(self) -> Float[Array, "*G"]:
        """(mean rho)^2 / mean rho^2, clamped to [1/n, 1].

        NaN if any log-ratio was not finite: such a batch is to be refused, not trusted.
        1 for an empty batch: there is nothing to distrust, and its loss is 0 either way.
        """
        count = jnp.maximum(self.count, 1.0)
        second = jnp.where(self.count > 0, self.second, 1.0)
        ess = jnp.clip((self.first / second) * (self.first / count), 1.0 / count, 1.0)
        return self._if_finite(jnp.where(self.count > 0, ess, 1.0))

    def ratio_mean(self) -> Float[Array, "*G"]:
        """The mean of rho: 1 in expectation if the samples are mu's, whatever pi is. NaN if empty."""
        return self._if_finite(bounded_exp(self.largest + jnp.log(self.first / self.count)))

    def chi2(self) -> Float[Array, "*G"]:
        """The mean of rho^2 less 1: unbiased for the chi-squared divergence of pi from mu. NaN if empty."""
        return self._if_finite(bounded_expm1(2.0 * self.largest + jnp.log(self.second / self.count)))

    def value(self):
        return self.ess()


def _reductions(mask, group, num_groups) -> tuple[Callable, Callable, Callable]:
    """Max and sum over everything, or by group, and the way back from groups to entries."""
    if group is None:
        return jnp.max, jnp.sum, jnp.asarray
    # A comparison with every group, fused into the reduction: unlike a scatter-add it is deterministic.
    names = jnp.arange(num_groups, dtype=group.dtype).reshape(-1, *(1,) * group.ndim)
    belongs = mask & (group == names)
    axes = tuple(range(1, group.ndim + 1))
    return (
        lambda x: jnp.max(jnp.where(belongs, x, -jnp.inf), axis=axes),
        lambda x: jnp.sum(jnp.where(belongs, x, jnp.zeros_like(x)), axis=axes),
        lambda x: jnp.take(x, group, mode="clip"),
    )


class RatioMean(RatioMoments):
    """The same moments, logged as mean rho."""

    def value(self):
        return self.ratio_mean()


class Chi2(RatioMoments):
    """The same moments, logged as chi2(pi || mu)."""

    def value(self):
        return self.chi2()


def token_mean(x: Float[AnyArray, "B T"], mask: Bool[AnyArray, "B T"]) -> Mean:
    """The mean of x over the tokens at which `mask` is True; NaN if there is none."""
    x = real(jax.lax.stop_gradient(x))
    return Mean(jnp.sum(jnp.where(mask, x, jnp.zeros_like(x))), jnp.sum(mask, dtype=x.dtype))


def outside_fraction(log_ratio: Float[AnyArray, "B T"], mask: Bool[AnyArray, "B T"], low: float, high: float) -> Mean:
    """The share of tokens with a ratio outside [1 - low, 1 + high]."""
    ratio = bounded_exp(real(log_ratio))
    return token_mean(((ratio > 1.0 + high) | (ratio < 1.0 - low)).astype(ratio.dtype), mask)


def histogram(x: Float[Array, "B T"], mask: Bool[AnyArray, "B T"], edges: np.ndarray = LOG_RATIO_EDGES) -> Sum:
    """Counts of x by bin, len(edges) + 1 of them; a value on an edge belongs to the upper bin."""
    x = real(jax.lax.stop_gradient(x))
    at_least = x[..., None] >= jnp.asarray(edges, x.dtype)
    above = jnp.sum(at_least & mask[..., None], axis=tuple(range(x.ndim)), dtype=x.dtype)
    total = jnp.sum(mask & ~jnp.isnan(x), dtype=x.dtype)
    return Sum(jnp.concatenate([total[None], above]) - jnp.concatenate([above, jnp.zeros_like(above[:1])]))


def ratio_metrics(log_ratio: Float[Array, "B T"], mask: Bool[AnyArray, "B T"]) -> dict[str, Any]:
    """What every objective reports of log_ratio = log pi - log mu, as metrics to be merged.

    Non-finite log-ratios are counted under `policy/nonfinite_log_ratio`; they make the ESS,
    the mean ratio and chi2 NaN, and are left out of the other statistics.
    """
    log_ratio = real(jax.lax.stop_gradient(log_ratio))
    moments = RatioMoments.of(log_ratio, mask)
    finite = mask & jnp.isfinite(log_ratio)
    log_ratio = jnp.where(finite, log_ratio, jnp.zeros_like(log_ratio))
    size = jnp.abs(log_ratio)
    return {
        "policy/ess": moments,
        "policy/ratio_mean": RatioMean(*moments),
        "policy/ratio_max": Max(jnp.max(jnp.where(finite, bounded_exp(log_ratio), -jnp.inf))),
        "policy/chi2": Chi2(*moments),
        "policy/log_ratio_abs_mean": token_mean(size, finite),
        "policy/log_ratio_abs_max": Max(jnp.max(jnp.where(finite, size, -jnp.inf))),
        "policy/log_ratio_histogram": histogram(log_ratio, finite),
        "policy/outside_0.2_fraction": outside_fraction(log_ratio, finite, 0.2, 0.2),
        "policy/behaviour_kl_proxy": token_mean(k3_value(log_ratio), finite),
        "policy/behaviour_kl_reverse": token_mean(k3_value(-log_ratio), finite),  # unbiased for KL(mu, pi)
        "policy/nonfinite_log_ratio": Sum(moments.nonfinite),
    }


def k3_value(log_ratio: Float[AnyArray, "..."]) -> Float[Array, "..."]:
    """log_ratio + exp(-log_ratio) - 1, exponent bounded only by the dtype."""
    return jnp.asarray(log_ratio) + bounded_expm1(-log_ratio)


def position_bucket(mask: Bool[AnyArray, "B T"], segment_ids: Int[AnyArray, "B T"] | None = None) -> Int[Array, "B T"]:
    """floor(log2(i)) of the i-th counted token of its sequence (from 1): 0, 1 1, 2 2 2 2, 3 ...

    A group for `RatioMoments.of`; 20 buckets hold a million tokens. Masked tokens get -1.
    """
    position = jnp.cumsum(mask, axis=1, dtype=jnp.int32)
    if segment_ids is not None:
        num_tokens = mask.shape[1]
        ids = jnp.where(mask, segment_ids, num_tokens)
        first = jax.vmap(lambda row, row_ids: jax.ops.segment_min(row, row_ids, num_tokens))(position, ids)
        position = position - jnp.take_along_axis(first, jnp.where(mask, segment_ids, 0), axis=1) + 1
    bucket = 31 - jax.lax.clz(jnp.maximum(position, 1))
    return jnp.where(mask, bucket, -1)


# Sequences: one a row, or several in a packed row, told apart by `segment_ids`
# (0-based within the row, so at most T of them; those of masked tokens are not read).


def _sequence_totals(
    x: Float[Array, "B T"], mask: Bool[AnyArray, "B T"], segment_ids: Int[AnyArray, "B T"] | None
) -> Float[Array, "B S"]:
    x = jnp.where(mask, x, jnp.zeros_like(x))
    if segment_ids is None:
        return jnp.sum(x, axis=1, keepdims=True)
    num_tokens = x.shape[1]
    ids = jnp.where(mask, segment_ids, num_tokens)
    return jax.vmap(lambda row, row_ids: jax.ops.segment_sum(row, row_ids, num_tokens))(x, ids)


def sequence_sum(
    x: Float[Array, "B T"], mask: Bool[AnyArray, "B T"], segment_ids: Int[AnyArray, "B T"] | None = None
) -> Float[Array, "B T"]:
    """At each token, the sum of x over the counted tokens of its sequence; 0 at masked tokens."""
    totals = _sequence_totals(x, mask, segment_ids)
    ids = jnp.zeros(mask.shape, jnp.int32) if segment_ids is None else jnp.where(mask, segment_ids, 0)
    return jnp.where(mask, jnp.take_along_axis(totals, ids, axis=1), jnp.zeros_like(x))


def sequence_lengths(
    mask: Bool[AnyArray, "B T"], segment_ids: Int[AnyArray, "B T"] | None = None, dtype: DTypeLike = jnp.float32
) -> Float[Array, "B T"]:
    """At each token, the number of counted tokens of its sequence; 0 at masked tokens."""
    return sequence_sum(jnp.asarray(mask, dtype), mask, segment_ids)


def num_sequences(
    mask: Bool[AnyArray, "B T"], segment_ids: Int[AnyArray, "B T"] | None = None, dtype: DTypeLike = jnp.float32
) -> Float[Array, ""]:
    """The number of sequences with at least one counted token."""
    totals = _sequence_totals(jnp.asarray(mask, jnp.float32), mask, segment_ids)
    return jnp.sum(totals > 0, dtype=dtype)


def sequence_moments(
    log_ratio: Float[Array, "B T"], mask: Bool[AnyArray, "B T"], segment_ids: Int[AnyArray, "B T"] | None = None
) -> RatioMoments:
    """The moments of the ratios of whole sequences, exp(sum of log_ratio)."""
    totals = _sequence_totals(log_ratio, mask, segment_ids)
    return RatioMoments.of(totals, _sequence_totals(jnp.asarray(mask, jnp.float32), mask, segment_ids) > 0)
