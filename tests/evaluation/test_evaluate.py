"""Evaluation: the estimators against enumeration, every prompt once, failures, and what is written."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from p3o_jax.devices.sharding import MeshShape, make_mesh
from p3o_jax.evaluation.evaluate import _over_prompts, evaluate, majority, pass_at_k
from p3o_jax.evaluation.files import readable, table, write_evaluation
from p3o_jax.experience.prompts import encoded
from p3o_jax.experience.scoring import Scorer
from p3o_jax.rewards import Function, Reward
from p3o_jax.rewards.pool import Verifiers
from p3o_jax.sampler import Engine, Sampling
from p3o_jax.tasks import SortDigits
from p3o_jax.tasks.base import Prompt
from p3o_jax.tokenizers.text import CharTokenizer
from tests.made_rollouts import one_turn

MESH = make_mesh(MeshShape(), jax.devices()[:1])
TOKENIZER = CharTokenizer()


@dataclass(frozen=True)
class Fragile(SortDigits):
    """Judged by a verifier that hangs at a 9 and fails at a 0."""

    reward: Reward = Function("tests.rewards.verifiers:sorted_or_else")


@pytest.mark.parametrize(("n", "c", "k"), [(n, c, k) for n in (1, 2, 5) for c in range(n + 1) for k in range(1, n + 1)])
def test_pass_at_k_is_the_share_of_choices_of_k_with_a_correct_one(n, c, k):
    choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(choice) for choice in choices]))


def test_pass_at_k_is_unbiased():
    """Over samples of five, each correct with probability 0.3: 1 - 0.7 ** k."""
    for k in (1, 3, 5):
        expected = sum(
            0.3 ** sum(outcome) * 0.7 ** (5 - sum(outcome)) * pass_at_k(5, sum(outcome), k)
            for outcome in itertools.product([0, 1], repeat=5)
        )
        assert expected == pytest.approx(1 - 0.7**k)


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        ("aab", "a", 1),
        ("aab", "b", 0),
        ("ab", "a", 0.5),
        ("abbcc", "c", 0.5),
        ("a..", "a", 1),  # without an answer one does not vote
        ("..", "a", 0),
    ],
)
def test_the_majority(answers, right, expected):
    votes = [None if answer == "." else answer for answer in answers]
    assert majority(votes, [answer == right for answer in answers]) == expected


class Scripted(Engine):
    """A sampler that says what the script says: {prompt text: completions}, and the first of them if greedy."""

    def __init__(self, script):
        self.script, self.mesh, self.asked = script, MESH, []
        self.limits = SimpleNamespace()

    def generate(self, weights, asked):
        texts = [TOKENIZER.decode(ids) for ids in asked.prompts]
        self.asked.append((texts, asked.sampling))
        said = [self.script[text][s] for text in texts for s in range(asked.num_samples)]
        rows, width = len(said), 20
        tokens = np.full((rows, width), 7, np.int32)
        lengths = np.zeros(rows, np.int32)
        cut = np.asarray([text.endswith("...") for text in said])
        for row, text in enumerate(said):
            ids = [*TOKENIZER.encode(text), *([] if cut[row] else [0])]
            tokens[row, 3 : 3 + len(ids)], lengths[row] = ids, len(ids)
        group = np.repeat(np.asarray(asked.indices, np.int32), asked.num_samples)
        log_probs = np.zeros((rows, width), np.float32)
        certain = {"behaviour_log_probs": log_probs, "finish_reason": cut.astype(np.int32)}
        rollout = one_turn(tokens, 3, lengths, group=group, **certain)
        return jax.tree.map(jax.numpy.asarray, rollout)


PROMPTS = [Prompt(i, text, "".join(sorted(text[:-1])), {}) for i, text in enumerate(["21=", "43=", "65="])]


def run(script, task=SortDigits(length=2), **options):  # noqa: B008
    sampler = Scripted(script)
    settings = {"num_samples": 4, "greedy": True, "prompts_per_batch": 2, "keep_completions": True} | options
    with Scorer(task, TOKENIZER, Verifiers(processes=1, timeout_seconds=1)) as scorer:
        found = evaluate(
            sampler,
            None,
            scorer,
            encoded(PROMPTS, TOKENIZER),
            key=jax.random.key(0),
            sampling=Sampling(0.6, top_k=3),
            **settings,
        )
    return found, sampler


SCRIPT = {"21=": ["12", "21", "12", "21"], "43=": ["43", "34", "3...", ""], "65=": ["65", "65", "65", "6..."]}


def test_every_prompt_counts_once_and_the_last_batch_is_not_padded_into_the_result():
    found, sampler = run(SCRIPT)
    metrics = found.metrics
    # Correct of four: 2, 1 and 0. The second batch of two is one prompt and a copy.
    assert metrics["num_prompts"] == 3
    assert metrics["pass@1"] == pytest.approx((2 / 4 + 1 / 4 + 0) / 3)
    assert metrics["pass@2"] == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6) + 0) / 3)
    assert metrics["pass@4"] == pytest.approx(2 / 3)
    # 12 and 21 tie; 43, 34 and 3... tie, for nothing does not vote; 65 is wrong.
    assert metrics["majority@4"] == pytest.approx((1 / 2 + 1 / 3 + 0) / 3)
    assert metrics["greedy"] == pytest.approx(1 / 3)
    assert metrics["no_answer_fraction"] == pytest.approx(1 / 12)
    assert metrics["truncated_fraction"] == pytest.approx(2 / 12)
    assert metrics["response_tokens_mean"] == pytest.approx((3 * 4 + (3 + 3 + 4 + 1) + (3 * 3 + 4)) / 12)
    assert metrics["verifier_errors"] == metrics["verifier_timeouts"] == 0
    assert [texts for texts, _ in sampler.asked] == [["21=", "43="]] * 2 + [["65=", "65="]] * 2
    assert {sampling for _, sampling in sampler.asked} == {Sampling(0.6, top_k=3)}
    counts = Counter((row["prompt"], row["sample"]) for row in found.completions)
    assert counts == Counter((p.text, s) for p in PROMPTS for s in (0, 1, 2, 3, "greedy"))


def test_means_have_errors_over_prompts():
    """Of 2, 1 and 0 correct of four: 0.5, 0.25 and 0 deviate by 0.25 from their mean, over sqrt(3)."""
    metrics = run(SCRIPT)[0].metrics
    assert metrics["pass@1_standard_error"] == pytest.approx(0.25 / 3**0.5)
    assert metrics["reward_standard_error"] == pytest.approx(0.25 / 3**0.5)
    # 1, 1 and 0: mean 2 / 3, squared deviations 1 / 9, 1 / 9 and 4 / 9, over 2 and over 3
    assert metrics["pass@4_standard_error"] == pytest.approx((2 / 3 / 2 / 3) ** 0.5)
    assert metrics["greedy_standard_error"] == pytest.approx((2 / 3 / 2 / 3) ** 0.5)
    assert metrics["majority@4_standard_error"] == pytest.approx(np.std([1 / 2, 1 / 3, 0], ddof=1) / 3**0.5)
    # What reads a run by the ending of a name finds one accuracy.
    assert [tag for tag in metrics if f"eval/t/{tag}".endswith("/pass@1")] == ["pass@1"]


def test_one_prompt_has_no_error(monkeypatch):
    monkeypatch.setattr("tests.evaluation.test_evaluate.PROMPTS", PROMPTS[:1])
    metrics = run(SCRIPT)[0].metrics
    assert metrics["pass@1"] == 0.5
    assert not [tag for tag in metrics if tag.endswith("_standard_error")]


def test_an_error_is_of_the_size_of_what_prompts_do():
    """Over 400 evaluations of 40 prompts of unequal difficulty, pass@2 of 4 varies by about its error."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(400):
        correct = rng.random((40, 4)) < rng.random((40, 1))
        found.append(_over_prompts("x", [pass_at_k(4, int(c), 2) for c in correct.sum(axis=1)]))
    spread = np.std([one["x"] for one in found])
    assert np.mean([one["x_standard_error"] for one in found]) == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [(0.43, 0.0313, "0.430 ± 0.031"), (12.34, 1.5, "12.3 ± 1.5"), (812.3, 25, "812 ± 25"), (1.0, 0.0, "1 ± 0")],
)
def test_an_error_is_beside_its_value(value, error, text):
    metrics = {"num_prompts": 256, "pass@1": value, "pass@1_standard_error": error}
    assert list(readable(metrics)) == [("num_prompts", "256"), ("pass@1", text)]


def test_it_does_not_depend_on_the_size_of_batches():
    small, large = run(SCRIPT)[0], run(SCRIPT, prompts_per_batch=8)[0]
    assert small.metrics == large.metrics
    assert sorted(small.completions, key=str) == sorted(large.completions, key=str)


def test_a_verifier_that_fails_is_counted_as_failed_and_as_not_correct():
    script = SCRIPT | {"43=": ["34", "9", "0", "34"]}
    found, _ = run(script, Fragile(length=2), greedy=False)
    assert found.metrics["verifier_timeouts"] == found.metrics["verifier_errors"] == 1
    assert found.metrics["pass@1"] == pytest.approx((2 / 4 + 2 / 4 + 0) / 3)
    failed = [row for row in found.completions if row["verifier_failure"]]
    assert [(row["completion"], row["verifier_failure"]) for row in failed] == [("9", "timeout"), ("0", "error")]
    assert all(row["reward"] is None and not row["correct"] for row in failed)


def test_only_the_most_likely_completion():
    found, _ = run(SCRIPT, num_samples=0)
    assert found.metrics["greedy"] == pytest.approx(1 / 3)
    assert not [tag for tag in found.metrics if "@" in tag]
    assert found.metrics["response_tokens_mean"] == 3
    assert len(found.completions) == 3


def test_what_is_written(tmp_path):
    found, _ = run(SCRIPT)
    write_evaluation(tmp_path / "a" / "b", "sums", found.metrics, found.completions, {"temperature": 0.6})
    written = json.loads((tmp_path / "a" / "b" / "sums.json").read_text())
    assert written == {"task": "sums", "results": found.metrics, "settings": {"temperature": 0.6}}
    lines = (tmp_path / "a" / "b" / "sums.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == found.completions
    assert "- pass@1: 0.25 ± 0.14\n" in (tmp_path / "a" / "b" / "sums.md").read_text()
    assert "| right | 21= | 12 | 12 | 12 | 1 |" in (tmp_path / "a" / "b" / "sums.md").read_text()


def test_a_table_keeps_its_shape():
    row = run(SCRIPT)[0].completions[0]
    nasty = row | {"completion": "a|b\nc\\" + "x" * 1000, "answer": "<b>"}
    lines = table("t", {}, [nasty]).splitlines()
    assert lines[-1].count(" | ") == 5
    assert "a\\|b<br>c\\\\" in lines[-1] and "&lt;b>" in lines[-1]
    assert len(lines[-1]) < 600


@pytest.mark.parametrize("count", [1, 7])
def test_all_samples_of_a_prompt_are_told_apart(count):
    digits = {prompt.text: [str(i) for i in range(count)] for prompt in PROMPTS}
    found, _ = run(digits, num_samples=count, greedy=False)
    assert f"pass@{count}" in found.metrics
    assert found.metrics["pass@1"] == 0
