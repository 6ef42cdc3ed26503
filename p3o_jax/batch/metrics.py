"""Metrics that know how they are reduced: by type, never by name.

A metric is a commutative monoid given by two parts: `maxima`, reduced by max, and
`sums`, reduced by addition once both sides agree on the maxima (which a log-space
sum needs as its shift). One definition serves micro-batches (`combine`) and devices
(`all_reduce`: one max and one sum for any number of metrics).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Num


@runtime_checkable
class Metric(Protocol):
    """A quantity over a batch that can be merged from parts, in any order."""

    def maxima(self) -> Any:
        """What is reduced by max, a pytree of float32 (leaves may be absent)."""

    def sums(self, maxima: Any) -> Any:
        """What is reduced by addition, expressed relative to the given `maxima`."""

    def rebuild(self, maxima: Any, sums: Any) -> Metric:
        """The metric with the reduced parts."""

    def value(self) -> Any:
        """What is logged: an array, or one for each group."""


class Mean(NamedTuple):
    """total / count; NaN where nothing was counted."""

    total: Float[Array, ""]
    count: Float[Array, ""]  # type: ignore[assignment]  # hides tuple.count

    def maxima(self):
        return ()

    def sums(self, maxima):
        return (self.total, self.count)

    def rebuild(self, maxima, sums):
        return type(self)(*sums)

    def value(self):
        return self.total / self.count


class LossTerm(Mean):
    """A term of a loss, over the loss's own denominator: 0, as the loss, where nothing was counted."""

    def value(self):
        return self.total / jnp.maximum(self.count, 1.0)


class Sum(NamedTuple):
    """A count or a total; any shape (a histogram is a `Sum` of counts)."""

    total: Float[Array, "..."]

    def maxima(self):
        return ()

    def sums(self, maxima):
        return (self.total,)

    def rebuild(self, maxima, sums):
        return Sum(*sums)

    def value(self):
        return self.total


class Max(NamedTuple):
    """The largest value; -inf where nothing was seen."""

    largest: Float[Array, ""]

    def maxima(self):
        return (self.largest,)

    def sums(self, maxima):
        return ()

    def rebuild(self, maxima, sums):
        return Max(*maxima)

    def value(self):
        return self.largest


class Min(NamedTuple):
    """The smallest value; inf where nothing was seen."""

    smallest: Float[Array, ""]

    def maxima(self):
        return (-self.smallest,)

    def sums(self, maxima):
        return ()

    def rebuild(self, maxima, sums):
        return Min(-maxima[0])

    def value(self):
        return self.smallest


class Histogram(NamedTuple):
    """Counts as they are logged, on the host: of len(edges) + 1 bins, of which the first and the last are open."""

    edges: Num[np.ndarray, " E"]
    counts: Num[np.ndarray, " E+1"]


Tree = TypeVar("Tree")


def _is_metric(node: Any) -> bool:
    return isinstance(node, Metric)


def combine(left: Tree, right: Tree) -> Tree:
    """Merges two trees of metrics with the same structure."""

    def merge(a: Metric, b: Metric) -> Metric:
        maxima = jax.tree.map(jnp.maximum, a.maxima(), b.maxima())
        return a.rebuild(maxima, jax.tree.map(jnp.add, a.sums(maxima), b.sums(maxima)))

    return jax.tree.map(merge, left, right, is_leaf=_is_metric)


def fold(stacked: Tree) -> Tree:
    """Merges metrics that are stacked along a leading axis, as a scan over micro-batches returns them."""

    def merge(metric: Metric) -> Metric:
        maxima = jax.tree.map(lambda leaf: leaf.max(axis=0), metric.maxima())
        return metric.rebuild(maxima, jax.tree.map(lambda leaf: leaf.sum(axis=0), metric.sums(maxima)))

    return jax.tree.map(merge, stacked, is_leaf=_is_metric)


def all_reduce(tree: Tree, axis_names: str | Sequence[str]) -> Tree:
    """Merges a tree of metrics over mesh axes: one `pmax` and one `psum` of a small vector."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_metric)
    maxima = _reduce_all([m.maxima() for m in leaves], axis_names, jax.lax.pmax)
    sums = [m.sums(top) for m, top in zip(leaves, maxima, strict=True)]
    sums = _reduce_all(sums, axis_names, jax.lax.psum)
    merged = [m.rebuild(top, total) for m, top, total in zip(leaves, maxima, sums, strict=True)]
    return jax.tree.unflatten(treedef, merged)


def _reduce_all(parts: list, axis_names, reduce) -> list:
    if not axis_names or not jax.tree.leaves(parts):
        return parts
    flat, unflatten = ravel_pytree(parts)
    return unflatten(reduce(jax.lax.stop_gradient(flat), axis_names))


def values(tree: Any) -> Any:
    """The logged values of a tree of metrics."""
    return jax.tree.map(lambda metric: metric.value(), tree, is_leaf=_is_metric)
