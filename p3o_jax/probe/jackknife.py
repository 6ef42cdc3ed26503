"""An ESS with its error over prompts, on the host in float64.

    ess   = 1 / (1 + v),   v = Var(rho) / (mean rho)^2               over tokens, with rho = exp(log_ratio)
    error = sqrt((G - 1) / G sum_g (ess_(g) - mean_g ess_(g))^2)     ess_(g): of all prompts but g, of G

the jackknife (Tukey 1958; Efron and Stein 1981), with prompts drawn independently. Nothing is found by subtraction of
sums, which would leave rounding where one token outweighs all others, and where the ESS is near 1: the moments of all
prompts but one are those of the prompts before it merged with those of the prompts after it, each relative to its own
largest log-ratio, as means and squared deviations (Chan, Golub and LeVeque 1979).
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int


class EssOfPrompts(NamedTuple):
    """The ESS of tokens, and how far it can be trusted."""

    ess: float
    """1 of no tokens, as of a batch in training; NaN if a log-ratio is not finite, and so are the others."""
    error: float
    """Its standard error over prompts; NaN with fewer than two that have tokens."""
    largest_share: float
    """The largest part that one prompt has in the ESS's denominator: max_g sum_g rho^2 / sum rho^2.

    The more prompts, the nearer 0, if and only if rho^2 has a mean to be estimated (O'Brien 1980).
    """


class _Moments(NamedTuple):
    """Of ratios relative to the largest, w = exp(log_ratio - largest), of one prompt or of each of several."""

    largest: Float[np.ndarray, "*G"]  # -inf of nothing
    count: Float[np.ndarray, "*G"]  # type: ignore[assignment]  # hides tuple.count
    mean: Float[np.ndarray, "*G"]  # of w
    squares: Float[np.ndarray, "*G"]  # sum (w - mean)^2

    def ess_lost(self) -> Float[np.ndarray, "*G"]:
        """1 - ess = v / (1 + v), with its digits where it is small; there must be a token."""
        v = self.squares / self.count / self.mean**2
        return np.asarray(v / (1.0 + v))


_NOTHING = _Moments(*np.array([-np.inf, 0.0, 0.0, 0.0]))


def ess_of_prompts(
    log_ratio: Float[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"], group: Int[np.ndarray, " B"]
) -> EssOfPrompts:
    """Takes the ESS of the tokens at which the mask is True, and leaves out one prompt at a time.

    Args:
        log_ratio: log pi - log mu; masked entries may hold anything.
        mask: True counts.
        group: the prompt of each row.
    """
    if not np.isfinite(log_ratio[mask]).all():
        return EssOfPrompts(*[float("nan")] * 3)
    prompts = _by_prompt(log_ratio, mask, group)
    if not len(prompts.count):
        return EssOfPrompts(1.0, float("nan"), float("nan"))
    singly = [_Moments(*one) for one in zip(*prompts, strict=True)]
    before = list(accumulate(singly, _merged, initial=_NOTHING))
    after = list(accumulate(reversed(singly), _merged, initial=_NOTHING))[::-1]
    ess = 1.0 - float(before[-1].ess_lost())

    error = float("nan")
    if len(singly) > 1:
        left_out = _merged(_stacked(before[:-1]), _stacked(after[1:])).ess_lost()
        error = float(np.sqrt((len(singly) - 1) * np.var(left_out)))

    squares = prompts.squares + prompts.count * prompts.mean**2
    squares = squares * np.exp(2.0 * (prompts.largest - prompts.largest.max()))
    return EssOfPrompts(ess, error, float(squares.max() / squares.sum()))


def _by_prompt(
    log_ratio: Float[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"], group: Int[np.ndarray, " B"]
) -> _Moments:
    """The moments of each prompt that has tokens."""
    row, _ = np.nonzero(mask)
    _, prompt, count = np.unique(group[row], return_inverse=True, return_counts=True)
    values = log_ratio[mask].astype(np.float64)
    largest = np.full(len(count), -np.inf)
    np.maximum.at(largest, prompt, values)
    ratio = np.exp(values - largest[prompt])
    mean = np.bincount(prompt, ratio, len(count)) / count
    squares = np.bincount(prompt, (ratio - mean[prompt]) ** 2, len(count))
    return _Moments(largest, count.astype(np.float64), mean, squares)


def _merged(a: _Moments, b: _Moments) -> _Moments:
    """The moments of a and b together, one of which must hold a token."""
    largest = np.maximum(a.largest, b.largest)
    of_a, of_b = np.exp(a.largest - largest), np.exp(b.largest - largest)
    count = a.count + b.count
    apart = b.mean * of_b - a.mean * of_a
    return _Moments(
        largest,
        count,
        a.mean * of_a + apart * (b.count / count),
        a.squares * of_a**2 + b.squares * of_b**2 + apart**2 * (a.count * b.count / count),
    )


def _stacked(moments: list[_Moments]) -> _Moments:
    return _Moments(*(np.array(field) for field in zip(*moments, strict=True)))
