"""Data files that are damaged: their rows are read, or one line says which file, and which row."""

from __future__ import annotations

import json
import os

import pytest

from p3o_jax.tasks.records import open_records, text_of
from tests.alterations import check, outcomes

ROWS = [{"question": f"{i} + 1?", "answer": i + 1, "info": {"tags": ["x", "y"]}} for i in range(30)]


def test_altered_data_files(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'tasks'")
    import pyarrow

    good = tmp_path / "good"
    good.mkdir()
    (good / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (good / "b.json").write_text(json.dumps(ROWS))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), good / "c.parquet")
    check(outcomes("records", good, 0, 450))


def test_rows_that_are_nested_too_deep(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' + "[" * 200_000 + "\n")
    records = open_records(str(tmp_path / "a.jsonl"))[0]
    with pytest.raises(ValueError, match=r"a.jsonl:2: not valid JSON: it is nested too deep"):
        records[1]
    (tmp_path / "b.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"b.json is not valid JSON: it is nested too deep"):
        open_records(str(tmp_path / "b.json"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**5000], ids=["nan", "inf", "digits"])
def test_numbers_that_are_no_text(value):
    with pytest.raises(ValueError, match=r"^here: column 'answer' holds") as error:
        text_of(value, "answer", "here")
    assert len(str(error.value)) < 200


def test_a_parquet_file_that_says_a_value_a_billion_times(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'tasks'")
    import pyarrow

    file = tmp_path / "a.parquet"
    column = pyarrow.array([1] * 10**6)
    with parquet.ParquetWriter(file, pyarrow.schema([("a", pyarrow.int64())]), compression="zstd") as writer:
        writer.write_table(pyarrow.table({"a": column}))
    assert os.path.getsize(file) < 10**5
    with pytest.raises(ValueError, match=r"a.parquet is not a readable Parquet file: 1000000 rows in \d+ bytes"):
        open_records(str(file))


def test_values_that_python_has_not(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'tasks'")
    import pyarrow

    days = pyarrow.array([10**15], pyarrow.timestamp("ms"))
    parquet.write_table(pyarrow.table({"a": days, "question": ["x"]}), tmp_path / "a.parquet")
    records = open_records(str(tmp_path / "a.parquet"))[0]
    with pytest.raises(ValueError, match=r"a.parquet, row 1: "):
        records[0]
    assert list(records.scan(["question"])) == [{"question": "x"}]
