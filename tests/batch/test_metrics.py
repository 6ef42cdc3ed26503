"""Metrics merge as their types say, over micro-batches and over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from p3o_jax.batch import metrics
from p3o_jax.batch.metrics import LossTerm, Max, Mean, Metric, Min, Sum
from p3o_jax.batch.stats import RatioMoments


def example(values):
    """One metric of each type, over some values."""
    return {
        "mean": Mean(jnp.sum(values), jnp.float32(values.size)),
        "term": LossTerm(jnp.sum(values), jnp.float32(values.size)),
        "sum": Sum(jnp.sum(values)),
        "counts": Sum(jnp.stack([jnp.sum(values > 0), jnp.sum(values <= 0)]).astype(jnp.float32)),
        "max": Max(jnp.max(values)),
        "min": Min(jnp.min(values)),
        "nested": [RatioMoments.of(values, jnp.ones(values.shape, bool))],
    }


VALUES = jnp.asarray([3.0, -1.0, 0.5, 2.0, -7.0, 4.0, 1.0, 0.25])


def assert_is_of_all(tree):
    logged = metrics.values(tree)
    assert logged["mean"] == logged["term"] == pytest.approx(2.75 / 8)
    assert logged["sum"] == pytest.approx(2.75)
    assert logged["counts"].tolist() == [6, 2]
    assert (logged["max"], logged["min"]) == (4, -7)
    ratio = np.exp(np.float64(VALUES))
    assert logged["nested"][0] == pytest.approx(ratio.sum() ** 2 / (ratio**2).sum() / 8, rel=1e-6)


def test_combine_of_unequal_parts():
    parts = [example(VALUES[:1]), example(VALUES[1:6]), example(VALUES[6:])]
    assert_is_of_all(metrics.combine(metrics.combine(parts[0], parts[1]), parts[2]))
    assert_is_of_all(metrics.combine(parts[2], metrics.combine(parts[1], parts[0])))
    merged = metrics.combine(parts[0], parts[1])
    assert [type(merged[name]) for name in merged] == [type(parts[0][name]) for name in merged]


def test_all_reduce_is_one_max_and_one_sum_over_devices():
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))

    def device(values):
        return metrics.all_reduce(example(values), "data")

    step = jax.jit(jax.shard_map(device, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()))
    assert_is_of_all(step(VALUES))
    text = str(jax.make_jaxpr(step)(VALUES))
    assert (text.count("pmax["), text.count("psum")) == (1, 1)


def test_nothing_counted():
    assert np.isnan(Mean(jnp.float32(0), jnp.float32(0)).value())
    assert LossTerm(jnp.float32(0), jnp.float32(0)).value() == 0


def test_every_type_is_a_metric_and_a_pytree():
    tree = example(VALUES)
    for metric in (tree["mean"], tree["term"], tree["sum"], tree["max"], tree["min"], tree["nested"][0]):
        assert isinstance(metric, Metric)
        assert type(jax.tree.map(lambda x: x, metric)) is type(metric)
    assert not isinstance(VALUES, Metric)


def test_a_reduction_without_metrics_is_nothing():
    assert metrics.all_reduce(None, "data") is None
    assert metrics.all_reduce({}, "data") == {}
