"""What TensorBoard's own code finds in the records."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata

from p3o_jax.batch.metrics import Histogram
from p3o_jax.batch.stats import LOG_RATIO_EDGES
from p3o_jax.writers import Writer
from p3o_jax.writers.tensorboard import histogram


def test_a_histogram_keeps_its_counts_and_loses_its_empty_ends():
    counts = np.zeros(len(LOG_RATIO_EDGES) + 1)
    counts[[12, 13, 15]] = 5, 7, 2  # [-0.002, -0.001), [-0.001, 0.001) and [0.002, 0.005)
    record = histogram("h", Histogram(LOG_RATIO_EDGES, counts)).histo
    assert list(record.bucket) == [5, 7, 0, 2]
    np.testing.assert_allclose([record.min, *record.bucket_limit], [-0.002, -0.001, 0.001, 0.002, 0.005], rtol=1e-6)
    assert record.num == 14
    assert record.max == record.bucket_limit[-1]
    assert record.sum == pytest.approx(5 * -0.0015 + 2 * 0.0035)


def test_open_bins_are_as_wide_as_their_neighbours():
    record = histogram("h", Histogram(np.array([0.0, 1.0, 3.0]), np.ones(4))).histo
    assert [record.min, *record.bucket_limit] == [-1, 0, 1, 3, 5]


def test_an_empty_histogram_is_one():
    assert list(histogram("h", Histogram(np.array([0.0, 1.0]), np.zeros(3))).histo.bucket) == [0]


def test_counts_must_fit_the_edges():
    with pytest.raises(ValueError, match=r"h: counts of shape \(2,\) do not fit 2 edges"):
        histogram("h", Histogram(np.array([0.0, 1.0]), np.ones(2)))


@pytest.fixture
def described(tmp_path):
    with Writer(tmp_path) as writer:
        writer.describe({"objective": "P3O", "seed": 3, "pack": True})
    return EventAccumulator(str(tmp_path)).Reload()


def test_settings_are_in_the_run_itself(described):
    (tag,) = described.PluginTagToContent("hparams")
    content = described.PluginTagToContent("hparams")[tag]
    found = metadata.parse_session_start_info_plugin_data(content).hparams
    assert (found["objective"].string_value, found["seed"].number_value) == ("P3O", 3)
    assert found["pack"].bool_value is True


def test_one_page_holds_the_ess_of_all_runs(described):
    (event,) = described.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    patterns = [pattern for page in layout.category for chart in page.chart for pattern in chart.multiline.tag]
    assert layout.category[0].title == "ESS"
    for tag in (
        "policy/ess", "policy/cap_fraction", "policy/clip_fraction", "policy/behaviour_kl_proxy",
        "policy/precision_gap_kl", "rollout/staleness_mean", "reward/mean", "policy/ess/position=4-15",
    ):  # fmt: skip
        assert sum(re.match(pattern, tag) is not None for pattern in patterns) == 1, tag
