"""The records that TensorBoard's pages are made of, without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tensorboardX import summary
from tensorboardX.proto.summary_pb2 import HistogramProto, Summary

from p3o_jax.batch.metrics import Histogram

ESS_PAGE = {
    "ESS": {
        "ESS of the optimizer batch": "policy/ess",
        "share of tokens capped or clipped": "policy/(cap|clip)_fraction",
        "KL to the behaviour policy": "policy/behaviour_kl_proxy",
        "precision gap (KL)": "policy/precision_gap_kl",
        "staleness (rollout steps)": "rollout/staleness_mean",
        "reward": "reward/mean",
    },
    "ESS of parts of the batch": {
        "by staleness": "policy/ess/staleness=.*",
        "by source": "policy/ess/source=.*",
        "by task of a mixture": "policy/ess/task=.*",
        "by position in the response": "policy/ess/position=.*",
        "smallest of a step": "policy/ess_min",
    },
}
"""Page -> chart -> pattern of tags. A chart holds every run that is selected."""


def ess_page() -> Summary:
    """The layout of the custom-scalars page."""
    charts = {
        page: {title: ["Multiline", [f"^{pattern}$"]] for title, pattern in charts.items()}
        for page, charts in ESS_PAGE.items()
    }
    return summary.custom_scalars(charts)


def hyperparameters(settings: Mapping[str, bool | int | float | str]) -> Summary:
    """A run's settings, in the run itself.

    No list of all settings and metrics goes with them: TensorBoard would take one run's list for every run's, and
    without one it finds the settings in which runs differ.
    """
    _, start, _ = summary.hparams(dict(settings), {})
    return start


def histogram(tag: str, value: Histogram) -> Summary.Value:
    """A histogram, without the empty bins at either end: TensorBoard cuts what is left into 30 equal ones.

    Raises:
        ValueError: the counts do not fit the edges.
    """
    edges, counts = np.asarray(value.edges, np.float64), np.asarray(value.counts, np.float64)
    if counts.shape != (len(edges) + 1,):
        raise ValueError(f"{tag}: counts of shape {counts.shape} do not fit {len(edges)} edges")
    # Open bins are drawn as wide as their neighbours.
    limits = np.concatenate([[2 * edges[0] - edges[1]], edges, [2 * edges[-1] - edges[-2]]])
    filled = np.flatnonzero(counts) if counts.any() else np.arange(1)
    counts, limits = counts[filled[0] : filled[-1] + 1], limits[filled[0] : filled[-1] + 2]
    middles = (limits[1:] + limits[:-1]) / 2
    proto = HistogramProto(
        min=limits[0],
        max=limits[-1],
        num=counts.sum(),
        sum=counts @ middles,
        sum_squares=counts @ middles**2,
        bucket_limit=limits[1:].tolist(),
        bucket=counts.tolist(),
    )
    return Summary.Value(tag=tag, histo=proto)


def text(tag: str, markdown: str) -> Summary:
    """A text; of HTML, TensorBoard keeps tables, headings, lists, code, emphasis and the titles of links."""
    return summary.text(tag, markdown)
