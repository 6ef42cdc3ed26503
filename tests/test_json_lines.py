r"""A line ends at \n and nowhere else, in whatever reads what others wrote."""

from __future__ import annotations

import json

import pytest

from p3o_jax.json_lines import read_json_lines, read_text_lines
from p3o_jax.report.samples import _of_step
from p3o_jax.tasks import Dataset
from p3o_jax.writers import Writer, read_metrics
from tests.made_runs import rows_at

NO_ENDS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"


def test_separators_within_texts_end_no_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"a{NO_ENDS}b", "answer": str(i)} for i in range(3)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert read_json_lines(path) == rows
    assert len(Dataset("", str(path)).prompts("evaluation", 0)) == 1  # the same question


def test_rollouts_are_read_as_they_were_written(tmp_path):
    rows = [row | {"prompt": NO_ENDS, "tokens": [*row["tokens"][:-1], NO_ENDS]} for row in rows_at(1)]
    with Writer(tmp_path) as writer:
        writer.rollouts(1, rows)
    found = _of_step(tmp_path / "rollouts" / "step_1.jsonl", 10**6)
    assert found["total"] == 2 and found["prompts"][0]["prompt"] == NO_ENDS


@pytest.mark.parametrize("torn", ['{"step": 2, "a"', '{"step": 2, "a": "\u2028'.encode()[:-1], "1", b"\xff"])
def test_an_unfinished_last_line_is_left_out(tmp_path, torn):
    torn = torn if isinstance(torn, bytes) else torn.encode()
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "a": 0.5}\n' + torn)
    assert read_metrics(tmp_path) == [{"step": 1, "a": 0.5}]
    (tmp_path / "metrics.jsonl").write_bytes(torn + b'\n{"step": 1, "a": 0.5}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1 is damaged"):
        read_metrics(tmp_path)


def test_lines_of_text(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(f"\ufeffa{NO_ENDS}\r\nb\rc\n\n".encode())
    assert read_text_lines(path) == [f"a{NO_ENDS}", "b\rc", "", ""]
    path.write_bytes(b"a\xff")
    with pytest.raises(ValueError, match=r"prompts\.txt is not UTF-8"):
        read_text_lines(path)


def test_a_line_that_is_nested_too_deep_is_damaged(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(ValueError, match=r"d\.jsonl, line 1 is damaged"):
        read_json_lines(path)
    with pytest.raises(ValueError, match=r"d\.jsonl:1: not valid JSON"):
        Dataset("", str(path)).prompts("evaluation", 0)
