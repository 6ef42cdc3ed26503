from __future__ import annotations

import errno
import io
import json
import math
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX.event_file_writer import EventsWriter

from p3o_jax.stats import LOG_RATIO_EDGES
from p3o_jax.writers import Progress, Writer, read_metrics


def events(path):
    accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    return accumulator.Reload()


def scalars(path, tag):
    return [(event.step, event.value) for event in events(path).Scalars(tag)]


def test_scalars_are_in_both_places_under_their_tags(tmp_path):
    with Writer(tmp_path) as writer:
        writer.write(0, {"eval/sort_digits/pass@1": 0.25})
        writer.write(
            3, {"policy/ess/source=0": jnp.float32(0.5), "optim/skipped_updates": 2, "reward/mean": np.float64(1)}
        )
    assert read_metrics(tmp_path) == [
        {"step": 0, "eval/sort_digits/pass@1": 0.25},
        {"step": 3, "policy/ess/source=0": 0.5, "optim/skipped_updates": 2.0, "reward/mean": 1.0},
    ]
    assert scalars(tmp_path, "eval/sort_digits/pass@1") == [(0, 0.25)]
    assert scalars(tmp_path, "policy/ess/source=0") == [(3, 0.5)]


def test_write_returns_the_scalars_as_floats_where_it_writes_and_where_it_does_not(tmp_path):
    metrics = {"a": jnp.float32(0.5), "h": np.ones(len(LOG_RATIO_EDGES) + 1)}
    for enabled in (True, False):
        with Writer(tmp_path, enabled=enabled) as writer:
            result = writer.write(1, metrics)
        assert result == {"a": 0.5}
        assert type(result["a"]) is float


def test_a_disabled_writer_writes_nothing(tmp_path):
    with Writer(tmp_path, enabled=False) as writer:
        writer.resume_at(1)
        writer.write(1, {"a": 1.0})
        writer.histogram(1, "h", np.array([0.0, 1.0]), np.ones(3))
        writer.text(1, "t", "x")
        writer.rollouts(1, [{"a": 1}])
        writer.flush()
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_not_finite_are_valid_json(tmp_path):
    with Writer(tmp_path) as writer:
        writer.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "a": "nan", "b": "inf", "c": "-inf"}
    (read,) = read_metrics(tmp_path)
    assert math.isnan(read["a"])
    assert (read["b"], read["c"]) == (math.inf, -math.inf)


def test_what_is_written_can_be_read_before_the_end(tmp_path):
    writer = Writer(tmp_path)
    writer.write(1, {"a": 1.0})
    assert read_metrics(tmp_path) == [{"step": 1, "a": 1.0}]
    assert scalars(tmp_path, "a") == [(1, 1.0)]
    writer.close()


def test_steps_do_not_go_back(tmp_path):
    with Writer(tmp_path) as writer:
        writer.write(5, {"a": 1.0})
        writer.text(5, "t", "the same step is no step back")
        for write in (
            lambda: writer.write(4, {"a": 1.0}),
            lambda: writer.histogram(4, "h", np.array([0.0, 1.0]), np.ones(3)),
            lambda: writer.text(4, "t", "x"),
            lambda: writer.rollouts(4, []),
        ):
            with pytest.raises(ValueError, match="step 4 is written after step 5"):
                write()


def test_histograms_keep_their_counts_and_edges(tmp_path):
    counts = np.arange(len(LOG_RATIO_EDGES) + 1, dtype=np.float32)
    with Writer(tmp_path) as writer:
        writer.write(2, {"policy/log_ratio_histogram": counts})
    (event,) = events(tmp_path).Histograms("policy/log_ratio_histogram")
    value = event.histogram_value
    assert event.step == 2
    np.testing.assert_array_equal(value.bucket, counts)
    np.testing.assert_array_equal(value.bucket_limit[:-1], LOG_RATIO_EDGES.astype(np.float64))
    assert value.num == counts.sum()
    # -10 and 10 are the outer edges, -5 and 5 the next: the open bins are drawn up to -15 and 15.
    assert (value.min, value.max, value.bucket_limit[-1]) == (-15, 15, 15)


def test_counts_must_fit_the_edges(tmp_path):
    with Writer(tmp_path) as writer:
        with pytest.raises(ValueError, match=r"h: counts of shape \(2,\) do not fit 2 edges"):
            writer.histogram(0, "h", np.array([0.0, 1.0]), np.ones(2))
        with pytest.raises(ValueError, match="m: counts of shape"):
            writer.write(0, {"m": np.ones((2, 2))})


def test_text(tmp_path):
    with Writer(tmp_path) as writer:
        writer.text(4, "rollout/sample", "*3124=* -> 1234")
    (event,) = events(tmp_path).Tensors("rollout/sample/text_summary")
    assert event.step == 4
    assert event.tensor_proto.string_val[0] == b"*3124=* -> 1234"


def test_rollouts_are_readable_lines(tmp_path):
    rows = [
        {
            "prompt": "31=",
            "completion": "13",
            "reward": np.float32(1),
            "behaviour_log_probs": np.array([-0.5, -np.inf]),
        },
        {"prompt": "é=", "token_ids": (1, 2), "tokens": ["1", "3"]},
    ]
    with Writer(tmp_path) as writer:
        writer.rollouts(20, rows)
    text = (tmp_path / "rollouts" / "step_20.jsonl").read_text()
    assert "é=" in text
    assert [json.loads(line) for line in text.splitlines()] == [
        {"prompt": "31=", "completion": "13", "reward": 1.0, "behaviour_log_probs": [-0.5, "-inf"]},
        {"prompt": "é=", "token_ids": [1, 2], "tokens": ["1", "3"]},
    ]


def test_a_resumed_run_reads_as_one_that_was_not_interrupted(tmp_path):
    def steps(writer, start, end):
        for step in range(start, end):
            writer.write(step, {"a": step / 4, "h": np.full(len(LOG_RATIO_EDGES) + 1, step)})
            if step % 2 == 0:
                writer.rollouts(step, [{"step": step}])

    (tmp_path / "whole").mkdir()
    (tmp_path / "resumed").mkdir()
    with Writer(tmp_path / "whole") as writer:
        steps(writer, 0, 9)
    with Writer(tmp_path / "resumed") as writer:
        steps(writer, 0, 8)
        # The end of a line that was being written when the process was killed is missing.
        with open(tmp_path / "resumed" / "metrics.jsonl", "a") as file:
            file.write('{"step": 8, "a"')
    with Writer(tmp_path / "resumed") as writer:
        writer.resume_at(5)
        assert not (tmp_path / "resumed" / "rollouts" / "step_6.jsonl").exists()
        assert (tmp_path / "resumed" / "rollouts" / "step_4.jsonl").exists()
        steps(writer, 5, 9)
    assert read_metrics(tmp_path / "resumed") == read_metrics(tmp_path / "whole")
    assert scalars(tmp_path / "resumed", "a") == scalars(tmp_path / "whole", "a") == [(s, s / 4) for s in range(9)]
    assert [event.step for event in events(tmp_path / "resumed").Histograms("h")] == list(range(9))


def test_steps_do_not_go_back_behind_where_a_run_was_resumed(tmp_path):
    with Writer(tmp_path) as writer:
        writer.resume_at(5)
        with pytest.raises(ValueError, match="step 3 is written after step 4"):
            writer.write(3, {"a": 1.0})


def test_damage_inside_the_metrics_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is damaged"):
        read_metrics(tmp_path)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is damaged"):
        Writer(tmp_path).resume_at(2)


def test_a_full_disk_is_an_error_that_names_the_path(tmp_path, monkeypatch):
    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(EventsWriter, "flush", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        Writer(tmp_path).write(1, {"a": 1.0})
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)


def test_a_missing_directory_is_an_error_that_names_the_path(tmp_path):
    (tmp_path / "rollouts").touch()
    with pytest.raises(OSError, match=r"step_1\.jsonl"), Writer(tmp_path) as writer:
        writer.rollouts(1, [{"a": 1}])


def test_event_files_have_valid_lengths(tmp_path):
    with Writer(tmp_path) as writer:
        writer.write(1, {"a": 1.0})
    (path,) = tmp_path.glob("events.out.tfevents.*")
    data, at, records = path.read_bytes(), 0, 0
    while at < len(data):
        (length,) = struct.unpack("<Q", data[at : at + 8])
        at += 8 + 4 + length + 4
        records += 1
    assert at == len(data)
    assert records == 2  # the file's version, and the scalars


class Terminal(io.StringIO):
    def isatty(self):
        return True


METRICS = {
    "reward/mean": 0.412,
    "policy/ess": 0.9312,
    "time/learner_tokens_per_second": 31_400.0,
    "time/sampler_tokens_per_second": 1_234_000.0,
}


def test_progress_line():
    stream, now = io.StringIO(), [100.0]
    with Progress(60, stream=stream, clock=lambda: now[0]) as progress:
        progress.update(1, METRICS)
        now[0] += 11 * 2.0
        progress.update(12, METRICS)
    first, last = stream.getvalue().splitlines()
    assert first == ("step 1/60  reward 0.41  ess 0.9312  learner 31k tok/s  sampler 1.2M tok/s  --:-- left")
    # 2 s a step since the first, 48 to go.
    assert last.startswith("step 12/60  ")
    assert last.endswith("  01:36 left")


def test_progress_in_place_leaves_nothing_of_a_longer_line():
    stream = Terminal()
    with Progress(3, stream=stream, clock=lambda: 0.0) as progress:
        progress.update(1, METRICS)
        progress.update(2, {"reward/mean": 0.5})
    first, second = stream.getvalue().removesuffix("\n").split("\r")[1:]
    assert len(second) == len(first)
    assert second.rstrip() == "step 2/3  reward 0.50  00:00 left"
    assert stream.getvalue().endswith("\n")


def test_progress_without_a_terminal_is_a_line_every_few_seconds_and_the_last():
    stream, now = io.StringIO(), [0.0]
    progress = Progress(100, stream=stream, clock=lambda: now[0])
    for step in range(1, 101):
        progress.update(step, {})
        now[0] += 1.0
    shown = [int(line.split()[1].split("/")[0]) for line in stream.getvalue().splitlines()]
    assert shown == [*range(1, 100, 5), 100]


def test_progress_of_a_resumed_run_counts_the_time_of_its_own_steps():
    stream, now = io.StringIO(), [0.0]
    progress = Progress(60, stream=stream, clock=lambda: now[0])
    progress.update(41, {})
    now[0] += 10.0
    progress.update(42, {})
    assert stream.getvalue().splitlines()[-1] == "step 42/60  03:00 left"


def test_hours_left():
    stream, now = io.StringIO(), [0.0]
    progress = Progress(1000, stream=stream, clock=lambda: now[0])
    progress.update(1, {})
    now[0] += 10.0
    progress.update(2, {})
    assert stream.getvalue().splitlines()[-1] == "step 2/1000  2:46:20 left"  # 998 steps of 10 s


def test_disabled_progress_is_silent():
    stream = io.StringIO()
    with Progress(2, enabled=False, stream=stream) as progress:
        progress.update(1, METRICS)
        progress.update(2, METRICS)
    assert stream.getvalue() == ""
