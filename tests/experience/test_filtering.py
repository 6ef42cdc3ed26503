"""Groups without variance: kept, dropped from numerator and denominator, or replaced; and a run that does so."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from p3o_jax.batch.types import Rollout
from p3o_jax.config import Config
from p3o_jax.devices.sharding import MeshShape, make_mesh
from p3o_jax.experience.filtering import FilteredGroups
from p3o_jax.experience.scoring import Scores
from p3o_jax.experience.source import Experience, Sampled
from p3o_jax.learner.optimizer import OptimizerConfig
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.objectives import Reinforce
from p3o_jax.runs.stopwatch import Stopwatch
from p3o_jax.tasks import SortDigits
from p3o_jax.tasks.base import Prompt
from p3o_jax.train import train
from p3o_jax.writers import read_metrics

MESH = make_mesh(MeshShape(), jax.devices()[:1])


def batch_of(rewards: dict[int, list[float | None]]):
    """One batch: prompts by index, with the rewards of their two responses; None: its verifier failed."""
    values = [reward for pair in rewards.values() for reward in pair]
    rows = len(values)
    group = np.repeat(np.asarray(list(rewards), np.int32), 2)
    rollout = Rollout(
        tokens=np.repeat(group[:, None], 16, axis=1),
        length=group + 1,
        action_mask=(np.arange(16) > 0) & (np.arange(16) <= group[:, None]),  # as many tokens as the group's number
        behaviour_log_probs=np.zeros((rows, 16), np.float32),
        temperature=np.ones(rows, np.float32),
        policy_version=np.zeros((rows, 16), np.int32),
        source=np.zeros(rows, np.int32),
        finish_reason=np.zeros(rows, np.int32),
        group=group,
        task=np.zeros(rows, np.int32),
    )
    known = np.asarray([value is not None for value in values])
    no = np.zeros(rows, bool)
    numbers = np.asarray([value or 0.0 for value in values], np.float32)
    names = [f"{index}" for index in group]
    scores = Scores(names, numbers, known, no, names, {"part": numbers}, [""] * rows, ~known, no, no)
    prompts = [Prompt(index, "", "", {}) for index in rewards]
    return Experience(prompts, rollout, scores, known, prompts[-1].index + 1, Sampled(rollout, scores), {})


FIRST = batch_of({0: [1, 1], 1: [0, 1], 2: [0, 0], 3: [1, None]})
SECOND = batch_of({4: [0, 1], 5: [0, 0], 6: [1, 0], 7: [0, 1]})
THIRD = batch_of({8: [0, 0], 9: [0, 1], 10: [1, 0], 11: [1, 0]})


def gather(zero_variance, batches, max_batches=9):
    source = Given(list(batches))
    clock = Stopwatch(1, "sample")
    found = FilteredGroups(source, zero_variance, max_batches, MESH).next(1, None, clock, lambda: None)
    clock.end()
    assert found.cursor == batches[source.taken - 1].cursor
    return source.taken, found


class Given:
    """A source of batches made before."""

    def __init__(self, batches):
        self.batches, self.taken = batches, 0

    def next(self, step, weights, clock, pause):
        self.taken += 1
        return self.batches[self.taken - 1]


def test_kept():
    taken, found = gather("keep", [FIRST])
    assert taken == 1
    assert found.rollout.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found.kept.tolist() == [True] * 7 + [False]  # whose verifier failed
    assert found.metrics["rollout/dropped/zero_variance"] == found.metrics["rollout/dropped/surplus"] == 0
    assert found.metrics["rollout/dropped/verifier_failed"] == 1


def test_dropped():
    taken, found = gather("drop", [FIRST])
    assert taken == 1
    assert found.kept.tolist() == [False, False, True, True, False, False, False, False]
    # Groups 0 and 2, and the one known row of group 3, which has nothing to be compared with.
    assert found.metrics["rollout/dropped/zero_variance"] == 5
    assert found.metrics["rollout/dropped_response_tokens_mean"] == (0 + 0 + 2 + 2 + 3 + 3) / 6


def test_resampled_until_there_are_enough_in_the_order_they_came():
    taken, found = gather("resample", [FIRST, SECOND, THIRD])
    assert taken == 2
    assert found.rollout.group.tolist() == [1, 1, 4, 4, 6, 6, 7, 7]
    assert found.kept.all()
    assert found.scores.completions == [str(group) for group in found.rollout.group]
    assert found.scores.parts["part"].tolist() == found.scores.rewards.tolist() == [0, 1, 0, 1, 1, 0, 0, 1]
    assert len(found.sampled.rollout.group) == 16 and len(found.prompts) == 8
    assert found.metrics["rollout/sampled_batches"] == 2


def test_what_is_more_than_needed_is_counted_apart():
    _, found = gather("resample", [FIRST, batch_of({4: [0, 1], 5: [0, 0], 6: [0, 0], 7: [0, 1]}), THIRD])
    assert found.rollout.group.tolist() == [1, 1, 4, 4, 7, 7, 9, 9]
    assert found.metrics["rollout/dropped/zero_variance"] == 5 + 4 + 2
    assert found.metrics["rollout/dropped/surplus"] == 4  # groups 10 and 11
    assert found.metrics["rollout/dropped/verifier_failed"] == 1
    dropped = [value for tag, value in found.metrics.items() if tag.startswith("rollout/dropped/")]
    assert sum(dropped) + found.kept.sum() == len(found.sampled.rollout.group)


def test_a_row_that_failed_and_was_more_than_needed_is_counted_once():
    """Group 7 comes last and is not needed; the verifier of its second row failed."""
    _, found = gather("resample", [FIRST, batch_of({4: [0, 1], 5: [0, 1], 6: [0, 1], 7: [0, None]})])
    counts = [found.metrics[f"rollout/dropped/{reason}"] for reason in ("zero_variance", "surplus", "verifier_failed")]
    assert sum(counts) + found.kept.sum() == len(found.sampled.rollout.group) == 16


def test_where_the_limit_comes_first_the_rest_is_masked():
    taken, found = gather("resample", [FIRST, SECOND], max_batches=1)
    assert taken == 1
    assert found.rollout.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found.kept.tolist() == [False, False, True, True, False, False, False, False]


@dataclass(frozen=True)
class FirstDigit(SortDigits):
    """A reward that an untrained policy earns now and then."""

    def reward(self, prompt, completion):
        return float(completion[:1] == prompt.answer[:1])


CONFIG = Config(
    task=FirstDigit(length=3),
    model=TransformerConfig(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32),
    objective=Reinforce(),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    zero_variance="resample",
    prompts_per_step=8,
    samples_per_prompt=4,
    num_steps=3,
    evaluate_every=0,
    evaluation_prompts=8,
    save_every=1,
    write_rollouts_every=1,
)


def run(path, config=CONFIG, **options):
    train(config, path, devices=jax.devices()[:1], **options)
    lines = [{tag: x for tag, x in line.items() if not tag.startswith("time/")} for line in read_metrics(path)]
    rollouts = [
        [json.loads(row) for row in (path / "rollouts" / f"step_{line['step']}.jsonl").read_text().splitlines()]
        for line in lines
    ]
    return lines, rollouts


@pytest.mark.slow
def test_a_run_that_resamples(tmp_path):
    lines, rollouts = run(tmp_path / "whole")
    position = 0
    for line, rows in zip(lines, rollouts, strict=True):
        batches = line["rollout/sampled_batches"]
        indices = [row["prompt_index"] for row in rows]
        assert len(rows) == 32 and len(set(indices)) == 8
        # Every batch of the stream is taken once, whatever became of its prompts.
        assert position <= min(indices) and max(indices) < position + 8 * batches
        position += int(8 * batches)
        groups = [{row["reward"] for row in rows if row["prompt_index"] == index} for index in set(indices)]
        assert all(len(rewards) > 1 for rewards in groups)
        assert line["reward/zero_variance_group_fraction"] > 0  # of all that was sampled
        dropped = line["rollout/dropped/zero_variance"] + line["rollout/dropped/surplus"]
        assert dropped == 32 * batches - 32 > 0
    # Interrupted after the second step, it goes on with the same prompts.
    run(tmp_path / "parts", replace(CONFIG, num_steps=2))
    assert run(tmp_path / "parts", CONFIG, resume=True) == (lines, rollouts)


def test_what_is_dropped_is_in_neither_numerator_nor_denominator(tmp_path):
    (kept,), (rows,) = run(tmp_path / "keep", replace(CONFIG, zero_variance="keep", num_steps=1))
    (dropped,), (again,) = run(tmp_path / "drop", replace(CONFIG, zero_variance="drop", num_steps=1))
    assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in again]
    varied = {row["prompt_index"] for row in rows if row["advantage"] != 0}
    tokens = [sum(len(row["token_ids"]) for row in rows if row["prompt_index"] in which) for which in (
        {row["prompt_index"] for row in rows}, varied)]  # fmt: skip
    assert tokens[1] < tokens[0]
    assert abs(kept["loss/score"]) > 1e-3
    # The same sum, as advantages of the others are 0, over fewer tokens.
    assert dropped["loss/score"] * tokens[1] == pytest.approx(kept["loss/score"] * tokens[0], rel=1e-4)
    assert dropped["rollout/dropped/zero_variance"] == 32 - 4 * len(varied)


def test_a_group_of_one_has_no_variance_to_wait_for():
    from p3o_jax.batch.advantages import BatchWhitening

    with pytest.raises(ValueError, match=r"zero_variance='resample': a group of samples_per_prompt=1 has no variance"):
        replace(CONFIG, samples_per_prompt=1, advantages=BatchWhitening())
