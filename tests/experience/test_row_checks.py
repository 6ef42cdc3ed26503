"""Rows that cannot be used are found before a run, by file and line, and left out or refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from p3o_jax.commands import convert
from p3o_jax.experience import row_cache, row_checks
from p3o_jax.experience.row_checks import Checks, usable
from p3o_jax.rewards import ExactMatch, Function, MathVerify, NumericMatch, Part, Reward, Tags, WeightedSum
from p3o_jax.rewards.pool import Verifiers
from p3o_jax.tasks import Dataset, Mixture, Share, SortDigits
from p3o_jax.tokenizers.text import ByteTokenizer, CharTokenizer

VERIFIERS = Verifiers(processes=1, timeout_seconds=3)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "p3o_jax" / "rows"


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(prompt, answer="1") -> dict:
    return {"prompt": prompt, "answer": answer}


def texts(task, split):
    source = task.prompts(split, 0)
    return [source[i].text for i in range(len(source))]


LETTERS = CharTokenizer("abc ")
TOKENS = Checks(LETTERS, None)
GOLDS = Checks(None, VERIFIERS)


def split_files(tmp_path, train, evaluation, **options) -> Dataset:
    return Dataset(write(tmp_path / "t.jsonl", train), write(tmp_path / "e.jsonl", evaluation), **options)


def test_a_row_for_training_that_the_tokenizer_refuses_is_left_out(tmp_path, caplog):
    dataset = split_files(tmp_path, [row("a"), row("a z"), row("b"), row("y")], [row("c")])
    checked = usable(dataset, TOKENS)
    assert texts(checked, "train") == ["a", "b"] and checked == dataset
    assert "t: left out 2 rows that cannot be used, 3 stay" in caplog.text
    assert "t.jsonl:2: character 'z' at position 2" in caplog.text and "t.jsonl:4: character 'y'" in caplog.text


def test_a_row_for_evaluation_that_the_tokenizer_refuses_is_refused(tmp_path):
    dataset = split_files(tmp_path, [row("a")], [row("b"), row("x\ny")])
    with pytest.raises(
        ValueError, match=r"t: 1 row cannot be used: .*e\.jsonl:2: character 'x'.*unusable_rows=leave_out"
    ):
        usable(dataset, TOKENS)
    assert texts(usable(replace(dataset, unusable_rows="leave_out"), TOKENS), "evaluation") == ["b"]
    assert texts(usable(dataset, replace(TOKENS, unusable_rows="leave_out")), "evaluation") == ["b"]


def test_prompts_that_are_too_long_are_counted(tmp_path, caplog):
    dataset = split_files(tmp_path, [row("a"), row("abc"), row("ab")], [row("c")], prompt_tokens=2)
    assert len(texts(usable(dataset, TOKENS), "train")) == 3  # the stream passes them over
    assert "t: 1 of 3 prompts for training are longer than prompt_tokens=2" in caplog.text
    with pytest.raises(ValueError, match="t: all 1 prompts for training are longer than 2 tokens"):
        usable(split_files(tmp_path, [row("abc")], [row("c")], prompt_tokens=2), TOKENS)


def test_what_is_demonstrated_must_fit(tmp_path, caplog):
    rows = [row("a", "a"), row("b", "abc"), row("abc", "b"), row("c", "z")]
    dataset = split_files(tmp_path, rows, [row("cc", "cccc")], prompt_tokens=2, response_tokens=3)
    assert texts(usable(dataset, replace(TOKENS, demonstrated=True)), "train") == ["a"]
    assert "t.jsonl:2: a demonstration of 1 + 4 tokens, but prompt_tokens=2 and response_tokens=3" in caplog.text


def test_many_faults_are_counted_and_the_first_are_listed(tmp_path):
    dataset = Dataset("", write(tmp_path / "d.jsonl", [row(f"a {i}") for i in range(2000)]))
    with pytest.raises(
        ValueError, match=r"d: 2000 rows cannot be used: .*d\.jsonl:1: .*; and 1995 more\. Mend"
    ) as caught:
        usable(dataset, TOKENS)
    assert len(str(caught.value)) < 1000 and "\n" not in str(caught.value)


@pytest.mark.usefixtures("unchecked")
def test_rows_without_text_or_answer_can_be_left_out(tmp_path, caplog):
    rows = [row("a"), row(" "), row("b", ""), row("c", None), {"prompt": "d"}, row("e", [1]), row("\ud800"), row("f")]
    path = write(tmp_path / "d.jsonl", rows)
    with pytest.raises(ValueError, match=r"d: 6 rows cannot be used: .*d\.jsonl:2: column 'prompt' is empty; .*:3:"):
        Dataset("", path).prompts("evaluation", 0)
    assert texts(Dataset("", path, unusable_rows="leave_out"), "evaluation") == ["a", "f"]
    assert "d: left out 6 rows that cannot be used, 2 stay" in caplog.text
    with pytest.raises(ValueError, match=r"d: no row can be used: .*no column 'question'"):
        Dataset("", path, prompt="question", unusable_rows="leave_out").prompts("evaluation", 0)
    with pytest.raises(ValueError, match="unusable_rows must be one of refuse, leave_out, got 'skip'"):
        Dataset("", path, unusable_rows="skip")


@pytest.mark.parametrize(
    ("reward", "bad"),
    [
        (NumericMatch(), "none"),
        (WeightedSum((Part("answer", NumericMatch()), Part("form", Tags(("x",))))), "many"),
        (ExactMatch(), "."),
    ],
)
def test_answers_that_are_not_equal_to_themselves(tmp_path, reward, bad):
    dataset = Dataset("", write(tmp_path / "d.jsonl", [row("a"), row("b", bad), row("c", "3")]), reward=reward)
    with pytest.raises(ValueError, match=r"d: 1 row cannot be used: .*d\.jsonl:2: the (answer|row has no answer)"):
        usable(dataset, GOLDS)
    assert texts(usable(replace(dataset, unusable_rows="leave_out"), GOLDS), "evaluation") == ["a", "c"]


def test_answers_are_judged_by_math_verify_in_its_processes(tmp_path):
    pytest.importorskip("math_verify", reason="needs the extra 'tasks'")
    rows = [row("a", "\\frac{1}{2}"), row("b", "$\\{"), row("c", "x^2")]
    dataset = Dataset("", write(tmp_path / "d.jsonl", rows), reward=MathVerify())
    with pytest.raises(ValueError, match=r"1 row cannot be used: .*d\.jsonl:2: the answer"):
        usable(dataset, GOLDS)


@dataclass(frozen=True)
class Hangs(Reward):
    """Hangs at an answer."""

    def gold_completions(self, prompt):
        return (prompt.answer,)

    def __call__(self, prompt, completion):
        return float(9**9**9 > 0) if completion == "9" else 1.0


def test_a_verifier_that_hangs_on_an_answer_is_killed(tmp_path):
    dataset = Dataset("", write(tmp_path / "d.jsonl", [row("a"), row("b", "9"), row("c")]), reward=Hangs())
    checks = replace(GOLDS, verifiers=Verifiers(processes=1, timeout_seconds=0.5))
    with pytest.raises(ValueError, match=r"d\.jsonl:2: the verifier of its answer was killed after 0\.5 s"):
        usable(dataset, checks)


def test_a_reward_that_looks_at_no_answer_refuses_none(tmp_path):
    reward = Function("tests.rewards.verifiers:obedient")
    dataset = Dataset("", write(tmp_path / "d.jsonl", [row("a", "?")]), reward=reward)
    assert usable(dataset, GOLDS) is dataset
    assert row_cache.of_reward(reward) is None and row_cache.of_reward(Hangs()) is None


def test_what_is_found_is_kept_until_something_changes(tmp_path, cache, monkeypatch):
    path = write(tmp_path / "d.jsonl", [row("a"), row("b", "none"), row("c", "3")])
    dataset = Dataset("", path, unusable_rows="leave_out")
    looks = []
    look = row_checks._prompts
    monkeypatch.setattr(row_checks, "_prompts", lambda *options: looks.append(options[1]) or look(*options))
    both = replace(TOKENS, verifiers=VERIFIERS)
    for _ in range(2):
        assert texts(usable(replace(dataset), both), "evaluation") == ["a", "c"]
    assert len(looks) == 2 and len(list(cache.iterdir())) == 2  # prompts and answers, once each
    usable(replace(dataset), replace(both, tokenizer=ByteTokenizer()))
    assert len(looks) == 3
    usable(replace(dataset, reward=NumericMatch(0.1)), both)
    assert len(looks) == 4
    write(tmp_path / "d.jsonl", [row("a"), row("z", "none"), row("c", "3"), row("b", "4")])
    with pytest.raises(ValueError, match=r"d\.jsonl:2: "):
        usable(replace(dataset, unusable_rows="refuse"), both)
    for file in cache.iterdir():
        file.write_text("{damaged")
    with pytest.raises(ValueError, match=r"d\.jsonl:2: "):
        usable(replace(dataset, unusable_rows="refuse"), both)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    dataset = split_files(tmp_path, [row("a"), row("z")], [row("c")])
    assert texts(usable(dataset, TOKENS), "train") == ["a"]


def test_the_datasets_of_a_mixture_and_nothing_that_is_drawn(tmp_path):
    one = Dataset(write(tmp_path / "a.jsonl", [row(f"a {'b' * i}") for i in range(60)] + [row("z")]), label="one")
    two = Dataset(write(tmp_path / "b.jsonl", [row(f"b {'c' * i}") for i in range(60)]), label="two")
    mixture = Mixture((Share(one), Share(two)))
    checked = usable(mixture, replace(TOKENS, unusable_rows="leave_out"))
    assert len(checked.components[0].prompts("train", 0)) + len(checked.components[0].prompts("evaluation", 0)) == 60
    assert usable(SortDigits(), TOKENS) == SortDigits()


def test_converting_refuses_and_reports_alike(tmp_path):
    rows = [{"question": "q", "answer": "so #### 7"}, {"question": "r", "answer": "so it is"}]
    path, out = write(tmp_path / "g.jsonl", rows), tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match=r"gsm8k: 1 row cannot be used: .*g\.jsonl:2: the answer"):
        convert.run(["gsm8k", path, str(out)])
    convert.run(["gsm8k", path, str(out), "--unusable-rows", "leave_out"])
    assert len(out.read_text().split("\n")) == 2


def test_parquet(tmp_path):
    pytest.importorskip("pyarrow", reason="needs the extra 'tasks'")
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "d.parquet"
    rows = [row("a") | {"level": 1}, row("z") | {"level": 2}, row("b", "none") | {"level": 3}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(
        ValueError, match=r"2 rows cannot be used: .*d\.parquet, row 2: char.*d\.parquet, row 3: the answer"
    ):
        usable(Dataset("", str(path)), replace(TOKENS, verifiers=VERIFIERS))
