from __future__ import annotations

import errno
import json
import math
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX.event_file_writer import EventsWriter

from p3o_jax.batch.metrics import Histogram
from p3o_jax.writers import Writer, read_metrics

ROW = {
    "prompt_index": 7,
    "prompt": "31=",
    "completion": "13",
    "reward": 1.0,
    "advantage": 0.5,
    "finish_reason": "eos",
    "tokens": ["1", "3"],
    "behaviour_log_probs": [-0.5, -0.25],
    "log_ratios": [0.0, 0.1],
}


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
    metrics = {"a": jnp.float32(0.5), "h": Histogram(np.array([0.0, 1.0]), np.ones(3))}
    for enabled in (True, False):
        with Writer(tmp_path, enabled=enabled) as writer:
            result = writer.write(1, metrics)
        assert result == {"a": 0.5}
        assert type(result["a"]) is float


def test_a_disabled_writer_writes_nothing(tmp_path):
    with Writer(tmp_path, enabled=False) as writer:
        writer.resume_at(1)
        writer.describe({"seed": 0})
        writer.write(1, {"a": 1.0})
        writer.rollouts(1, [ROW])
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
        writer.rollouts(5, [])  # the same step is no step back
        for write in (
            lambda: writer.write(4, {"a": 1.0}),
            lambda: writer.rollouts(4, []),
        ):
            with pytest.raises(ValueError, match="step 4 is written after step 5"):
                write()


def test_only_scalars_and_histograms_are_metrics(tmp_path):
    with Writer(tmp_path) as writer, pytest.raises(ValueError, match=r"m: an array of shape \(2,\) is neither"):
        writer.write(0, {"m": np.ones(2)})


def test_rollouts_are_readable_lines(tmp_path):
    rows = [
        ROW | {"reward": np.float32(1), "behaviour_log_probs": np.array([-0.5, -np.inf])},
        ROW | {"prompt": "é=", "token_ids": (1, 2)},
    ]
    with Writer(tmp_path) as writer:
        writer.rollouts(20, rows)
    text = (tmp_path / "rollouts" / "step_20.jsonl").read_text()
    assert "é=" in text
    assert [json.loads(line) for line in text.splitlines()] == [
        ROW | {"behaviour_log_probs": [-0.5, "-inf"]},
        ROW | {"prompt": "é=", "token_ids": [1, 2]},
    ]


def test_a_resumed_run_reads_as_one_that_was_not_interrupted(tmp_path):
    def steps(writer, start, end):
        for step in range(start, end):
            writer.write(step, {"a": step / 4, "h": Histogram(np.array([0.0, 1.0]), np.full(3, step))})
            if step % 2 == 0:
                writer.rollouts(step, [ROW])

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
        writer.rollouts(1, [ROW])


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
