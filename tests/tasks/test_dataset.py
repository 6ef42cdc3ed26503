"""Datasets: columns, splits, what is left out, published layouts, and what is said of files that are not right."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path

import pytest

from p3o_jax.commands import convert
from p3o_jax.rewards import Completion, NumericMatch
from p3o_jax.tasks import Dataset, layouts
from p3o_jax.tasks.base import split_of

LAYOUTS = Path(__file__).parent.parent / "data" / "layouts"


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make(path="", evaluation_path="", **options) -> Dataset:
    return Dataset(str(path), str(evaluation_path), **{"reward": NumericMatch(), **options})


def texts(dataset, split):
    source = dataset.prompts(split, 0)
    return [source[i].text for i in range(len(source))]


@pytest.fixture
def sums(tmp_path):
    return write(tmp_path / "sums.jsonl", [{"prompt": f"{i} + 1", "answer": i + 1, "level": i % 3} for i in range(200)])


def test_rows_are_prompts_with_their_answers_and_all_else(sums):
    dataset = make(sums, before="What is ", after="?")
    source = dataset.prompts("train", 0)
    first = source[0]
    assert first.text == "What is 0 + 1?"
    assert first.answer == "1"
    assert first.metadata == {"prompt": "0 + 1", "answer": 1, "level": 0}
    assert [source[i].index for i in range(5)] == list(range(5))
    assert dataset.reward(first, "It is 1.") == 1
    assert dataset.name == "sums"


def test_a_tenth_is_held_out_by_content(sums):
    dataset = make(sums)
    train, evaluation = texts(dataset, "train"), texts(dataset, "evaluation")
    assert len(train) + len(evaluation) == 200
    assert {split_of(text) for text in evaluation} == {"evaluation"}
    assert 8 <= len(evaluation) <= 35
    assert not set(train) & set(evaluation)


def test_what_is_evaluated_is_not_trained_on(sums, tmp_path, caplog):
    evaluation = write(tmp_path / "test.jsonl", [{"prompt": f" {i}  + 1", "answer": i + 1} for i in range(10)])
    dataset = make(sums, evaluation)
    assert len(texts(dataset, "train")) == 190
    assert len(texts(dataset, "evaluation")) == 10
    assert "10 rows repeat an earlier prompt" in caplog.text
    assert "10 of them for training although they are in the evaluation file" in caplog.text


def test_repeated_prompts_are_left_out_and_counted(tmp_path, caplog):
    rows = [
        {"prompt": "a", "answer": 1},
        {"prompt": "b", "answer": 2},
        {"prompt": "A ", "answer": 1},
        {"prompt": "b", "answer": 3},
    ]
    dataset = make("", write(tmp_path / "f.jsonl", rows))
    source = dataset.prompts("evaluation", 0)
    assert [(source[i].text, source[i].answer) for i in range(len(source))] == [("a", "1"), ("b", "2")]
    assert "f: 2 rows repeat an earlier prompt and are left out (1 of them with another answer" in caplog.text
    assert "2 rows stay" in caplog.text


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "directory"])
def test_all_kinds_of_files_give_the_same(tmp_path, kind):
    rows = [
        {"prompt": [{"role": "user", "content": f"q {i} ≈"}], "of": {"truth": str(i)}, "x": None} for i in range(30)
    ]
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in rows))  # blank lines, and no end of line at the end
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "directory":
        for i, row in enumerate(rows):
            (path / str(i % 3)).mkdir(parents=True, exist_ok=True)
            (path / str(i % 3) / f"{i:03}.json").write_text(json.dumps(row))
    else:
        pytest.importorskip("pyarrow", reason="needs the extra 'tasks'")
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    dataset = make("", path, prompt="prompt.0.content", answer="of.truth")
    source = dataset.prompts("evaluation", 0)
    found = [source[i] for i in range(len(source))]
    assert Counter((row.text, row.answer) for row in found) == Counter((f"q {i} ≈", str(i)) for i in range(30))
    assert found[3].metadata["x"] is None


def test_a_file_in_parts(tmp_path):
    for part in range(3):
        write(tmp_path / f"train-{part}.jsonl", [{"prompt": f"{part} {i}", "answer": i} for i in range(5)])
    assert len(list(make(tmp_path / "train-*.jsonl").rows())) == 15


def test_a_verifier_is_sent_no_file(sums):
    dataset = make(sums)
    texts(dataset, "train")
    assert len(pickle.dumps(dataset)) < 600
    assert pickle.loads(pickle.dumps(dataset)) == dataset


GOOD = [{"prompt": f"p{i}", "answer": i} for i in range(9)]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, r"d\.jsonl is empty$"),
        ("\n \n", {}, r"d\.jsonl has no rows$"),
        ([*GOOD[:6], "{oops"], {}, r"d\.jsonl:7: not valid JSON: Expecting property name .*"),
        ([*GOOD[:2], "", "[1]"], {}, r"d\.jsonl:4: not a JSON object"),
        (GOOD, {"prompt": "question"}, r"d\.jsonl:1: no column 'question'; there are prompt, answer"),
        (GOOD, {"answer": "answer.value"}, r"d\.jsonl:1: no column 'answer\.value'; answer has a int"),
        ([*GOOD, {"prompt": "x"}], {}, r"d\.jsonl:10: no column 'answer'; there are prompt"),
        (
            [{"prompt": ["a"], "answer": 1}],
            {},
            r"d\.jsonl:1: column 'prompt' holds a list, not text .*: choose another",
        ),
        ([{"prompt": "a", "answer": None}], {}, r"d\.jsonl:1: column 'answer' holds nothing, not text"),
        ([{"prompt": "a", "answer": True}], {}, r"d\.jsonl:1: column 'answer' holds a bool"),
        ([{"prompt": " ", "answer": 1}], {}, r"d\.jsonl:1: column 'prompt' is empty"),
        ([{"prompt": "\ud800", "answer": 1}], {}, r"d\.jsonl:1: column 'prompt' is no valid Unicode"),
    ],
)
def test_a_file_that_is_not_right_is_said_in_one_line(tmp_path, content, options, message):
    path = tmp_path / "d.jsonl"
    if not isinstance(content, str):
        content = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in content)
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        make(path, **options).prompts("train", 0)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there_or_of_another_kind(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl: no such file"):
        make(tmp_path / "none.jsonl").prompts("train", 0)
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"a\.csv: not one of \.jsonl, \.json, \.parquet"):
        make(tmp_path / "a.csv").prompts("train", 0)
    (tmp_path / "b.json").write_text('{"prompt": 1}\n{"prompt": 2}\n')
    with pytest.raises(ValueError, match=r"b\.json is not valid JSON: .* \(one object a line is \.jsonl\)"):
        make(tmp_path / "b.json").prompts("train", 0)
    with pytest.raises(ValueError, match="needs a path"):
        make()
    with pytest.raises(ValueError, match="no prompts for train: no path is given"):
        make("", write(tmp_path / "e.jsonl", GOOD)).prompts("train", 0)


def test_a_parquet_file_that_is_cut_off(tmp_path):
    pytest.importorskip("pyarrow", reason="needs the extra 'tasks'")
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(GOOD), path)
    with pytest.raises(ValueError, match=r"d\.parquet, row 1: no column 'question'; there are prompt, answer"):
        make(path, prompt="question").prompts("train", 0)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"d\.parquet is not a readable Parquet file"):
        make(path).prompts("train", 0)


@pytest.mark.parametrize(
    ("layout", "file", "answers"),
    [
        ("gsm8k", "gsm8k.jsonl", ["#### 7", "2400.00 dollars"]),
        ("math", "math.jsonl", ["\\boxed{0.75}"]),
        ("math500", "math500.jsonl", ["\\boxed{\\sqrt{8}}"]),
        ("deepscaler", "deepscaler.json", ["\\boxed{2}", "\\boxed{2^{10}}"]),
        ("dapo_math", "dapo_math.jsonl", ["Answer: 35"]),  # three times the same row
        ("aime", "aime_2024.jsonl", ["\\boxed{104}"]),
        ("aime", "aime_2025.jsonl", ["\\boxed{70}"]),
        ("aime", "aime_2025_questions.jsonl", ["\\boxed{049}"]),
        ("amc", "amc.jsonl", ["\\boxed{142}"]),
        ("amc", "amc23.jsonl", ["\\boxed{27}"]),
    ],
)
def test_published_layouts(layout, file, answers):
    pytest.importorskip("math_verify", reason="needs the extra 'tasks'")
    dataset = getattr(layouts, layout)(str(LAYOUTS / file))
    rows = list(dataset.rows())
    assert len(rows) == len(answers)
    for answer in answers:
        assert sum(dataset.reward(row, Completion(answer)) for row in rows) == 1
    assert not any(dataset.reward(row, Completion("\\boxed{-5}")) for row in rows)
    assert dataset.name == layout
    assert ("\\boxed{}" in rows[0].text) != ("Answer:" in rows[0].text)


def test_a_competition_without_known_columns(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"q": "a", "answer": 1}])
    with pytest.raises(
        ValueError, match=r"d\.jsonl:1: none of the columns problem, Problem, question; there are q, answer"
    ):
        layouts.aime(path)


def test_converting(tmp_path, capsys):
    pytest.importorskip("math_verify", reason="needs the extra 'tasks'")
    output = tmp_path / "dapo.jsonl"
    convert.run(["dapo_math", str(LAYOUTS / "dapo_math.jsonl"), str(output)])
    assert capsys.readouterr().out == f"{output}: 1 rows\n"
    (row,) = make(output).rows()
    assert "What is 5 times 7?" in row.text
    assert row.answer == "35"
    with pytest.raises(FileExistsError, match="exists"):
        convert.run(["dapo_math", str(LAYOUTS / "dapo_math.jsonl"), str(output)])
