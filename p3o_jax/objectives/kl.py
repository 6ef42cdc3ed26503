"""KL terms between the policy pi and an anchor, each named for what it estimates.

With samples of mu, r = log pi - log anchor of the sampled token, rho = pi / mu:

| form         | value                           | gradient in log pi      | expectation over mu                       |
|--------------|---------------------------------|-------------------------|-------------------------------------------|
| `k3`         | r + exp(clip(-r, -10, 10)) - 1  | 1 - exp(clip(-r, ..))   | for anchor mu: chi2(mu, pi) - KL(mu, pi)  |
| `reference`  | the same                        | 1 - exp(-r), or 1 where | as k3; its gradient is not that of its    |
|              |                                 | the clip is active      | value's unclipped form                    |
| `importance` | rho r - rho + 1                 | rho r                   | KL(pi, anchor)                            |
| `reverse`    | (anchor / mu) (exp(r) - 1 - r)  | rho - anchor / mu       | KL(anchor, pi)                            |
| `exact`      | sum_v pi_v (log pi_v - log a_v) | of every pi_v           | KL(pi, anchor), no sampling               |
| `top_k`      | `exact` of k tokens and one     | of every pi_v of the k  | a lower bound of KL(pi, anchor),          |
|              | bucket for all the others       |                         | which grows with k                        |

chi2(mu, pi) = sum_v mu_v^2 / pi_v - 1, which is not bounded by any KL: the gradient of
k3 is -147 at r = -5 and -22025 at r <= -10, that of `importance` -0.03 and -0.0005.
k3 estimates KL(pi, anchor) without bias only under samples of pi.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from p3o_jax.batch.stats import bounded_exp, bounded_expm1
from p3o_jax.batch.types import AnyArray

EXPONENT_LIMIT = 10.0  # of the authors' k3
PARITY_FORMS = ("reference", "k3")
SAMPLED_FORMS = ("k3", "reference", "importance", "reverse")
DISTRIBUTION_FORMS = ("exact", "top_k")


def sampled(
    form: str, anchor_log_ratio: Float[Array, "B T"], behaviour_log_ratio: Float[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
    """One of the forms that need only the sampled token's log-probs.

    Args:
      form: one of SAMPLED_FORMS.
      anchor_log_ratio: r = log pi - log anchor, finite.
      behaviour_log_ratio: log rho = log pi - log mu; None: the anchor is mu.
    """
    r = anchor_log_ratio
    log_rho = r if behaviour_log_ratio is None else behaviour_log_ratio
    match form:
        case "k3":
            return _k3(r)
        case "reference":
            return _reference(r)
        case "importance":
            return _importance(r, jax.lax.stop_gradient(log_rho - r))
        case "reverse":
            return bounded_exp(jax.lax.stop_gradient(log_rho - r)) * _reverse(r)
    raise ValueError(f"kl={form!r} is not a form of the sampled token: {', '.join(SAMPLED_FORMS)}")


# The derivatives are written down: differentiating the values would take 1 from a number near
# 1, and lose all digits of a gradient that is 0 on fresh data.


@jax.custom_jvp
def _k3(r: Float[Array, "..."]) -> Float[Array, "..."]:
    return r + bounded_expm1(-r, EXPONENT_LIMIT)


@jax.custom_jvp
def _importance(r: Float[Array, "..."], log_weight: Float[Array, "..."]) -> Float[Array, "..."]:
    return bounded_exp(r + log_weight) * r - bounded_expm1(r + log_weight)


@jax.custom_jvp
def _reverse(r: Float[Array, "..."]) -> Float[Array, "..."]:
    return bounded_expm1(r) - r


_k3.defjvps(lambda tangent, value, r: -bounded_expm1(-r, EXPONENT_LIMIT) * tangent)
_importance.defjvps(lambda tangent, value, r, log_weight: bounded_exp(r + log_weight) * r * tangent, None)
_reverse.defjvps(lambda tangent, value, r: bounded_expm1(r) * tangent)


def _reference(r: Float[Array, "..."]) -> Float[Array, "..."]:
    """The authors' expression in their order of operations: their clip stops the gradient beyond +-10."""
    clipped = jnp.clip(-r, -EXPONENT_LIMIT, EXPONENT_LIMIT)
    inside = jnp.abs(r) <= EXPONENT_LIMIT  # inclusive, as torch.clamp; jnp.clip would halve it on the bound
    return r + jnp.exp(jnp.where(inside, -r, jax.lax.stop_gradient(clipped))) - 1.0


def distribution(
    form: str, log_probs: Float[AnyArray, "B T K"], anchor_log_probs: Float[AnyArray, "B T K"]
) -> Float[Array, "B T"]:
    """KL(pi, anchor) over the vocabulary (`exact`), or over k tokens and one bucket (`top_k`).

    By the data-processing inequality, merging tokens into a bucket can only lose divergence:
    `top_k` is a lower bound, tight if pi / anchor is constant in the bucket, and equal to
    `exact` if the bucket is empty. A bucket of less than rounding (8 eps) counts as empty.
    Infinite where pi has mass and the anchor has none (a truncated sampler).
    """
    divergence = jnp.sum(_relative_entropy(log_probs, anchor_log_probs), axis=-1)
    if form == "exact":
        return divergence
    if form != "top_k":
        raise ValueError(f"kl={form!r} is not a form over distributions: {', '.join(DISTRIBUTION_FORMS)}")
    rounding = 8.0 * float(jnp.finfo(log_probs.dtype).eps)
    rest = 1.0 - jnp.sum(jnp.exp(log_probs), axis=-1)
    anchor_rest = jnp.maximum(1.0 - jnp.sum(jnp.exp(anchor_log_probs), axis=-1), rounding)
    log_rest = jnp.log(jnp.where(rest > rounding, rest, 1.0))
    return divergence + jnp.where(rest > rounding, rest * (log_rest - jnp.log(anchor_rest)), 0.0)


def _relative_entropy(log_p: Float[AnyArray, "..."], log_q: Float[AnyArray, "..."]) -> Float[Array, "..."]:
    """p (log p - log q), which is 0 where p is 0, whatever q is."""
    some = log_p > -jnp.inf
    safe = jnp.where(some, log_p, 0.0)
    return jnp.where(some, jnp.exp(safe) * (safe - jnp.where(some, log_q, 0.0)), 0.0)
