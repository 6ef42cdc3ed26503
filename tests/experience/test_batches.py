"""From rollouts to batches: alignment, masks, refusals, and who does what."""

from __future__ import annotations

import numpy as np
import pytest

from p3o_jax.batch.types import Batch, FinishReason, Rollout, responses
from p3o_jax.experience.batches import (
    local_prompts,
    make_batch,
    minibatches,
    readable,
    rollout_metrics,
)
from p3o_jax.tasks import SortDigits

TASK = SortDigits(length=2)


def make_rollout() -> Rollout:
    """Prompts `21=` and `03=` with two responses each; garbage wherever nothing should be read."""
    encode = TASK.tokenizer.encode
    rows = [("21=", "12", True), ("21=", "2", True), ("03=", "030", False), ("03=", "03", True)]
    tokens = np.full((4, 8), 5, np.int32)
    log_probs = np.full((4, 8), np.nan, np.float32)
    versions = np.full((4, 8), 99, np.int32)
    actions = np.zeros((4, 8), bool)
    lengths = []
    for row, (prompt, response, ended) in enumerate(rows):
        ids = [*encode(prompt), *encode(response), *([0] if ended else [])]
        tokens[row, : len(ids)] = ids
        lengths.append(len(ids))
        actions[row, 3 : len(ids)] = True
        versions[row, 3 : len(ids)] = (4, 4, 3, 3)[row]
        # The log-prob of the token at position t is -t - row / 10.
        log_probs[row, 3 : len(ids)] = -np.arange(3, len(ids)) - row / 10
    return Rollout(
        tokens=tokens,
        length=np.asarray(lengths, np.int32),
        action_mask=actions,
        behaviour_log_probs=log_probs,
        temperature=np.asarray([0.6, 0.6, 1.2, 1.2], np.float32),
        policy_version=versions,
        source=np.asarray([0, 3, 0, 1], np.int32),
        finish_reason=np.asarray([0, 0, 1, 0], np.int32),
        group=np.asarray([7, 7, 9, 9], np.int32),
        task=np.asarray([0, 0, 2, 2], np.int32),
    )


def prompts():
    source = TASK.prompts("train", 0)
    return [source[0]._replace(index=7, text="21=", answer="12"), source[1]._replace(index=9, text="03=", answer="03")]


def test_columns_are_predictions():
    """Column t holds what concerns the token predicted from tokens[:t + 1]."""
    rollout = make_rollout()
    batch = make_batch(rollout, np.asarray([1, 2, 3, 4], np.float32), learner_temperature=None, step=5)
    for row in range(4):
        columns = np.flatnonzero(batch.mask[row])
        assert columns.tolist() == list(range(2, 2 + rollout.response_length[row]))
        for column in columns:
            assert batch.inputs.targets[row, column] == rollout.tokens[row, column + 1]
            assert batch.inputs.tokens[row, column] == rollout.tokens[row, column]
            assert batch.behaviour_log_probs[row, column] == np.float32(-(column + 1) - row / 10)
    np.testing.assert_array_equal(batch.advantages[:, 0], [1, 2, 3, 4])
    np.testing.assert_array_equal(batch.inputs.temperature[:, 0], np.float32([0.6, 0.6, 1.2, 1.2]))
    np.testing.assert_array_equal(batch.staleness[:, 3], [1, 1, 2, 2])
    np.testing.assert_array_equal(batch.source[:, 3], [0, 3, 0, 1])
    np.testing.assert_array_equal(batch.task[:, 3], [0, 0, 2, 2])
    of_learner = make_batch(rollout, np.zeros(4, np.float32), learner_temperature=1.0, step=5)
    assert set(of_learner.inputs.temperature.ravel().tolist()) == {1.0}


def test_rows_that_are_left_out_are_masked_whatever_is_in_them():
    rollout = make_rollout()
    whole = make_batch(rollout, np.ones(4, np.float32), learner_temperature=None, step=5)
    rollout.behaviour_log_probs[2] = np.nan  # not even looked at
    kept = np.asarray([True, False, False, True])
    batch = make_batch(rollout, np.ones(4, np.float32), learner_temperature=None, step=5, kept=kept)
    assert not batch.mask[~kept].any()
    np.testing.assert_array_equal(batch.mask[kept], whole.mask[kept])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.5])
def test_a_missing_log_prob_is_an_error_not_a_zero(value):
    rollout = make_rollout()
    rollout.behaviour_log_probs[2, 4] = value
    with pytest.raises(ValueError, match=r"1 behaviour log-probs .* row 2 \(prompt 9\) at token 4"):
        make_batch(rollout, np.zeros(4, np.float32), learner_temperature=None, step=5)


def test_arrays_of_other_lengths_are_refused():
    rollout = make_rollout()
    short = rollout._replace(behaviour_log_probs=rollout.behaviour_log_probs[:, 1:])
    with pytest.raises(ValueError, match="do not belong together"):
        make_batch(short, np.zeros(4, np.float32), learner_temperature=None, step=5)


def test_responses_are_ids_without_the_end():
    encode = TASK.tokenizer.encode
    assert responses(make_rollout()) == [encode("12"), encode("2"), encode("030"), encode("03")]


def test_what_is_logged_of_rollouts():
    metrics = rollout_metrics(make_rollout(), step=4, longest=3)
    assert metrics["rollout/response_tokens_mean"] == (3 + 2 + 3 + 3) / 4
    assert metrics["rollout/truncated_fraction"] == 0.25
    assert metrics["rollout/staleness_mean"] == (3 + 3) / (3 + 2 + 3 + 3)  # of tokens
    lengths = metrics["rollout/response_tokens_histogram"]
    assert lengths.edges.tolist() == [1, 2, 3, 4]
    assert lengths.counts.tolist() == [0, 0, 1, 3, 0]  # a bin a length, and the open ends


def test_long_lengths_share_bins():
    actions = np.arange(1001) < np.asarray([[1], [33], [34], [1000]])
    long = make_rollout()._replace(action_mask=actions, policy_version=np.full(actions.shape, 4))
    lengths = rollout_metrics(long, step=4, longest=1000)["rollout/response_tokens_histogram"]
    assert lengths.edges[[0, 1, -1]].tolist() == [1, 34, 1001]
    assert lengths.counts[[0, 1, 2, -2, -1]].tolist() == [0, 2, 1, 1, 0]


def test_readable_rollouts_align_tokens_and_log_probs():
    rollout = make_rollout()
    policy = rollout.behaviour_log_probs[:, 1:] + np.arange(7, dtype=np.float32) / 8  # of the token at t: t / 8 - 1 / 8
    row = readable(prompts(), rollout, *np.ones((2, 4), np.float32), policy, tokenizer=TASK.tokenizer)[1]
    assert row["prompt"] == "21="
    assert row["tokens"] == ["2", ""]
    assert row["behaviour_log_probs"] == pytest.approx([-3.1, -4.1])
    assert row["log_ratios"] == pytest.approx([2 / 8, 3 / 8])
    assert row["finish_reason"] == FinishReason.EOS.name.lower()


def test_minibatches_are_the_same_parts_in_every_epoch():
    batch = make_batch(make_rollout(), np.asarray([1, 2, 3, 4], np.float32), learner_temperature=None, step=5)
    seen = [part.advantages[:, 0].tolist() for part in minibatches(batch, 2, epochs=2, group_size=2)]
    assert seen == [[1, 4], [2, 3], [1, 4], [2, 3]]  # one row of each group, twice over
    (whole,) = minibatches(batch, 1, epochs=1, group_size=2)
    assert whole.advantages[:, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("group_size", [1, 3, 4])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_an_update_sees_the_same_rows_on_any_number_of_hosts(processes, group_size):
    prompts, count = np.arange(24), 3
    whole = rows_of(prompts, group_size)
    parts = [rows_of(np.asarray(local_prompts(prompts.tolist(), processes, i)), group_size) for i in range(processes)]
    updates = [list(minibatches(batch, count, 1, group_size)) for batch in parts]
    for m, expected in enumerate(minibatches(whole, count, 1, group_size)):
        assert len(expected.advantages) == 24 * group_size // count
        assert {len(of_process[m].advantages) for of_process in updates} == {len(expected.advantages) // processes}
        got = np.concatenate([of_process[m].advantages for of_process in updates])
        np.testing.assert_array_equal(got, expected.advantages)


def rows_of(prompts, group_size):
    """A batch whose advantages say which prompt and sample a row is."""
    rows = (prompts[:, None] + np.arange(group_size) / 100).reshape(-1, 1)
    return Batch(mask=rows > -1, behaviour_log_probs=rows, advantages=rows)


def test_a_row_may_have_several_turns_and_versions():
    """Actions at 3, 4 and 6, of which the last is of a newer policy; the token at 5 is somebody else's."""
    rollout = make_rollout()
    rollout.action_mask[2] = [False, False, False, True, True, False, True, False]
    rollout.policy_version[2] = [99, 99, 99, 3, 3, 99, 5, 99]
    rollout.behaviour_log_probs[2] = [np.nan, np.nan, np.nan, -1, -2, np.nan, -3, np.nan]
    batch = make_batch(rollout, np.ones(4, np.float32), learner_temperature=None, step=5)
    assert np.flatnonzero(batch.mask[2]).tolist() == [2, 3, 5]
    assert batch.staleness[2][batch.mask[2]].tolist() == [2, 2, 0]
    row = readable(
        prompts(), rollout, *np.ones((2, 4), np.float32), np.zeros((4, 7), np.float32), tokenizer=TASK.tokenizer
    )
    assert row[2]["behaviour_log_probs"] == [-1, -2, -3] and row[2]["policy_version"] == [3, 3, 5]
    assert rollout_metrics(rollout, step=5, longest=3)["rollout/staleness_mean"] == (3 + 2 + 2 * 2 + 3 * 2) / 11


def test_a_version_that_the_learner_has_not_reached_is_refused():
    with pytest.raises(ValueError, match="tokens of policy version 4 for a learner that has made 3 steps"):
        make_batch(make_rollout(), np.ones(4, np.float32), learner_temperature=None, step=3)
