"""The sampler against enumeration, against the learner's forward pass, and its invariances."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from p3o_jax.batch.types import FinishReason, Rollout
from p3o_jax.devices.precision import Precision
from p3o_jax.devices.sharding import MeshShape, make_mesh, to_local
from p3o_jax.experience.batches import check_log_probs
from p3o_jax.models.log_probs import token_log_probs
from p3o_jax.models.transformer import Transformer, TransformerConfig, abstract_model
from p3o_jax.sampler import Requests, Sampler, Sampling, SamplingLimits

VOCAB = 12
CONFIG = TransformerConfig(
    num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=32, qk_norm=True, context_tokens=32
)
LIMITS = SamplingLimits(prompt_tokens=6, response_tokens=9, eos_ids=(0,), stop_ids=(3, 7))
PROMPTS = [[1, 2, 4], [5, 6, 8, 9, 10, 11], [2], [4, 4, 4, 4], [9, 8], [1, 2, 4, 5, 6], [11], [10, 1, 8]]


def weights_of(config: TransformerConfig, vocab: int, scale: float = 2.0, seed: int = 0):
    """Random weights with sharper logits than at initialisation."""
    params = nnx.state(Transformer(config, vocab, nnx.Rngs(seed)))
    return jax.tree.map(lambda leaf: leaf * scale if leaf.ndim > 1 else leaf, params)


def one_device():
    return make_mesh(devices=jax.devices()[:1])


@functools.cache
def sampler_of(mesh, limits: SamplingLimits = LIMITS) -> Sampler:
    """Shared by the tests, and with it what it has compiled."""
    return Sampler(CONFIG, VOCAB, limits, Precision(), mesh)


def sample(mesh=None, *, limits=LIMITS, prompts=PROMPTS, indices=None, seed=0, version=0, **options) -> Rollout:
    sampler = sampler_of(mesh or one_device(), limits)
    weights = sampler.publish(weights_of(CONFIG, VOCAB), version)
    indices = range(len(prompts)) if indices is None else indices
    options.setdefault("sampling", Sampling(options.pop("temperature", 1.0)))
    return to_local(sampler.generate(weights, Requests(prompts, list(indices), jax.random.key(seed), **options)))


@jax.jit
def learner_log_probs(tokens, temperature):
    """What the learner computes for the tokens of [B, S], by one forward pass."""
    model = nnx.merge(abstract_model(CONFIG, VOCAB)[0], weights_of(CONFIG, VOCAB))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32), inputs.shape)
    hidden, _ = model.hidden(inputs, positions)
    return token_log_probs(hidden, model.output_weights(), targets, jnp.full(inputs.shape, temperature, jnp.float32))[0]


def response(rollout: Rollout, row: int, of: str = "tokens") -> list:
    start = rollout.prompt_length[row]
    return getattr(rollout, of)[row, start : start + rollout.response_length[row]].tolist()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.2])
def test_log_probs_are_the_learners(temperature):
    """Ragged prompts, early stops, several stop tokens: the learner's forward pass gives the same numbers."""
    rollout = sample(num_samples=4, temperature=temperature)
    assert len(set(rollout.response_length.tolist())) > 3
    log_probs = learner_log_probs(rollout.tokens, temperature)
    for row in range(len(rollout.tokens)):
        start, length = rollout.prompt_length[row], rollout.response_length[row]
        expected = log_probs[row, start - 1 : start - 1 + length]
        np.testing.assert_allclose(response(rollout, row, "behaviour_log_probs"), expected, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.2])
def test_no_log_prob_is_above_0(temperature):
    """Of nearly certain tokens, as the loop computes them, where the compiler may round logits / T in two ways."""
    sampler = sampler_of(one_device(), SamplingLimits(6, 12, eos_ids=()))
    weights = sampler.publish(weights_of(CONFIG, VOCAB, scale=16.0))
    prompts = [[1 + i % 11, 2] for i in range(32)]
    options = {"key": jax.random.key(0), "num_samples": 8, "sampling": Sampling(temperature)}
    rollout = to_local(sampler.generate(weights, Requests(prompts, range(32), **options)))
    log_probs = rollout.behaviour_log_probs[:, 2:14]
    assert log_probs.max() <= 0
    assert (log_probs > -1e-6).mean() > 0.01


def test_distribution_equals_enumeration_at_a_temperature():
    """Every response of up to 3 tokens over a vocabulary of 4: frequencies and stored log-probs against the
    probabilities of the model, enumerated with whole forward passes."""
    config = TransformerConfig(num_layers=1, embed_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=16)
    vocab, temperature, count = 4, 0.7, 40_000
    limits = SamplingLimits(prompt_tokens=2, response_tokens=3, eos_ids=(0,))
    sampler = Sampler(config, vocab, limits, Precision(), one_device())
    params = weights_of(config, vocab)
    model = nnx.merge(abstract_model(config, vocab)[0], params)

    @jax.jit
    def all_log_probs(tokens):
        positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
        hidden, _ = model.hidden(tokens[None], positions)
        return jax.nn.log_softmax(model.logits(hidden)[0] / temperature)

    exact: dict[tuple, list[float]] = {}
    for candidate in itertools.product(range(vocab), repeat=3):
        ids = candidate[: candidate.index(0) + 1] if 0 in candidate else candidate
        if ids not in exact:
            log_probs = all_log_probs(jnp.array([2, 1, *candidate]))
            exact[ids] = [float(log_probs[1 + i, token]) for i, token in enumerate(ids)]
    assert sum(np.exp(sum(steps)) for steps in exact.values()) == pytest.approx(1.0, abs=1e-5)

    rollout = to_local(
        sampler.generate(
            sampler.publish(params), Requests([[2, 1]], [0], jax.random.key(0), count, Sampling(temperature))
        )
    )
    counts: dict[tuple, int] = dict.fromkeys(exact, 0)
    for row in range(count):
        ids = tuple(response(rollout, row))
        if counts[ids] == 0:
            np.testing.assert_allclose(response(rollout, row, "behaviour_log_probs"), exact[ids], atol=1e-5)
        counts[ids] += 1
    expected = {ids: count * np.exp(sum(steps)) for ids, steps in exact.items()}
    common = [ids for ids in exact if expected[ids] >= 10]
    chi2 = sum((counts[ids] - expected[ids]) ** 2 / expected[ids] for ids in common)
    # Mean len(common) - 1, standard deviation sqrt(2 (len(common) - 1)): five deviations above.
    freedom = len(common) - 1
    assert freedom > 15
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("shape", [None, MeshShape(data=4, tensor=2)])
def test_distributions_are_those_sampled_from(shape):
    """The whole distribution has the sampled token's log-prob at its place; the top k are its largest."""
    mesh = make_mesh(shape) if shape else None
    options = {"temperature": 0.7, "num_samples": 2}
    whole, top = (sample(mesh, support=support, **options) for support in ("exact", 5))
    np.testing.assert_array_equal(whole.tokens, sample(mesh, **options).tokens)
    assert whole.support.indices is None
    assert whole.support.behaviour_log_probs.shape == (*whole.tokens.shape, VOCAB)
    for row in range(len(whole.tokens)):
        start = whole.prompt_length[row]
        at = slice(start, start + whole.response_length[row])
        log_probs = whole.support.behaviour_log_probs[row, at]
        np.testing.assert_allclose(np.exp(log_probs).sum(-1), 1, rtol=1e-5)
        own = np.take_along_axis(log_probs, whole.tokens[row, at, None], -1)[:, 0]
        np.testing.assert_array_equal(own, whole.behaviour_log_probs[row, at])
        np.testing.assert_allclose(top.support.behaviour_log_probs[row, at], -np.sort(-log_probs)[:, :5], atol=1e-6)
        found = np.take_along_axis(log_probs, top.support.indices[row, at], -1)
        np.testing.assert_allclose(found, top.support.behaviour_log_probs[row, at], atol=1e-6)


def test_a_row_does_not_depend_on_its_batch():
    together = sample(num_samples=2)
    alone = sample(prompts=PROMPTS[3:4], indices=[3], num_samples=2)
    for i, row in enumerate((6, 7)):
        assert response(alone, i) == response(together, row)


def test_order_moves_rows_and_changes_nothing_else():
    forward = sample()
    backward = sample(prompts=PROMPTS[::-1], indices=range(len(PROMPTS))[::-1])
    for row in range(len(PROMPTS)):
        assert response(forward, row) == response(backward, len(PROMPTS) - 1 - row)


@pytest.mark.parametrize("shape", [MeshShape(data=8), MeshShape(data=2, fsdp=2, tensor=2), MeshShape(data=4, tensor=2)])
def test_tokens_do_not_depend_on_the_mesh(shape):
    """Log-probs may differ by rounding, where sums are in another order; no draw here is that close."""
    expected, got = sample(num_samples=2), sample(make_mesh(shape), num_samples=2)
    for row in range(len(expected.tokens)):
        assert response(got, row) == response(expected, row)
        a, b = (response(rollout, row, "behaviour_log_probs") for rollout in (got, expected))
        np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_array_equal(got.finish_reason, expected.finish_reason)


def test_samples_steps_and_prompts_have_their_own_randomness():
    options = {"prompts": [PROMPTS[1]] * 2, "indices": [0, 1], "num_samples": 8, "temperature": 3.0}
    rollout = sample(**options)
    groups = [[response(rollout, row) for row in rows] for rows in (range(8), range(8, 16))]
    assert groups[0] != groups[1]
    assert all(len({tuple(ids) for ids in group}) > 4 for group in groups)
    again = sample(**options, seed=1)
    assert not np.array_equal(again.tokens, rollout.tokens)


def test_finish_reasons_lengths_and_groups():
    rollout = sample(num_samples=16, version=5, temperature=1.2)
    seen = set()
    for row in range(len(rollout.tokens)):
        ids, reason = response(rollout, row), rollout.finish_reason[row]
        seen.add(int(reason))
        ends = {FinishReason.EOS: ids[-1] == 0, FinishReason.STOP: ids[-1] in (3, 7), FinishReason.LENGTH: True}
        assert ends[reason]
        assert not set(ids[:-1]) & {0, 3, 7}
        if reason == FinishReason.LENGTH:
            assert len(ids) == LIMITS.response_tokens
            assert ids[-1] not in (0, 3, 7)
        prompt = PROMPTS[row // 16]
        assert rollout.tokens[row, : rollout.prompt_length[row]].tolist() == prompt
    assert seen == set(FinishReason)
    np.testing.assert_array_equal(rollout.group, np.repeat(np.arange(len(PROMPTS)), 16))
    assert set(rollout.policy_version.ravel().tolist()) == {5}
    np.testing.assert_allclose(rollout.temperature, 1.2)


def test_greedy_takes_the_most_likely_token():
    rollout = sample(greedy=True)
    # Each row's tokens, with every token of the vocabulary in the place of one of them.
    for at in range(2, LIMITS.response_tokens):
        variants = np.repeat(rollout.tokens[:, None], VOCAB, axis=1)
        places = np.minimum(rollout.prompt_length + at, rollout.prompt_length + rollout.response_length - 1)
        variants[np.arange(len(PROMPTS)), :, places] = np.arange(VOCAB)
        log_probs = learner_log_probs(variants.reshape(-1, variants.shape[-1]), 1.0)
        log_probs = np.asarray(log_probs).reshape(len(PROMPTS), VOCAB, -1)
        best = log_probs[np.arange(len(PROMPTS)), :, places - 1].argmax(axis=-1)
        np.testing.assert_array_equal(best, rollout.tokens[np.arange(len(PROMPTS)), places])


def test_weights_that_are_not_finite_are_seen_in_the_log_probs():
    """Of what is drawn and of what is most likely: an evaluation of such weights is an error, not a score of 0."""
    sampler = sampler_of(one_device())
    params = jax.tree.map(lambda leaf: leaf * jnp.nan, weights_of(CONFIG, VOCAB))
    weights = sampler.publish(params)
    for greedy in (False, True):
        rollout = to_local(sampler.generate(weights, Requests(PROMPTS, range(8), jax.random.key(0), greedy=greedy)))
        with pytest.raises(ValueError, match=r"log-probs are missing or positive.*are the weights finite"):
            check_log_probs(rollout, rollout.action_mask)


def test_bfloat16_is_a_setting_and_says_so_in_its_log_probs():
    """The sampler's own precision: log-probs differ from float32's, and are those of what it computed."""
    sampler = Sampler(CONFIG, VOCAB, LIMITS, Precision("bfloat16", "bfloat16", "bfloat16"), one_device())
    weights = sampler.publish(weights_of(CONFIG, VOCAB))
    assert {leaf.dtype for leaf in jax.tree.leaves(weights.params)} == {jnp.dtype("bfloat16")}
    rollout = to_local(sampler.generate(weights, Requests(PROMPTS, range(len(PROMPTS)), jax.random.key(0))))
    assert rollout.behaviour_log_probs.dtype == np.float32
    reference = sample()
    differences = [
        abs(a[0] - b[0])
        for row in range(len(PROMPTS))
        for a, b in [(response(rollout, row, "behaviour_log_probs"), response(reference, row, "behaviour_log_probs"))]
        if response(rollout, row)[0] == response(reference, row)[0]
    ]
    assert 1e-4 < max(differences) < 0.2


def test_synchronise_copies():
    """The learner donates its buffers, so the sampler's weights must not be the same ones."""
    sampler = Sampler(CONFIG, VOCAB, LIMITS, Precision(), one_device())
    params = weights_of(CONFIG, VOCAB)
    weights = sampler.publish(params)
    jax.tree.map(lambda leaf: leaf.delete(), params)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(weights))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sample(sampling=[Sampling()]), "1 sampling for 8 prompts"),
        (lambda: sample(indices=[1, 2]), "2 indices for 8 prompts"),
        (lambda: sample(response_limits=[9] * 7 + [10]), "response limit is 10, allowed are 1 to 9"),
        (lambda: sample(response_limits=[0] * 8), "response limit is 0"),
        (lambda: sample(response_limits=[2.9] * 8), "response limit must be a whole number, got .*2.9"),
        (lambda: sample(indices=[*range(7), 2**31]), "prompt index is 2147483648, allowed are 0 to 2147483647"),
        (lambda: sample(indices=[*range(7), -1]), "prompt index is -1"),
        (lambda: sample(indices=[0.5] * 8), "prompt index must be a whole number"),
        (lambda: sample(prompts=[[1, 12]]), "token of prompt 0 is 12, allowed are 0 to 11"),
        (lambda: sample(prompts=[[-3]]), "token of prompt 0 is -3"),
        (lambda: sample(prompts=[[1.0]]), "token of prompt 0 must be a whole number"),
        (lambda: sample(prompts=[]), "0 prompts of each of 1 processes do not divide"),
        (lambda: sample(make_mesh(), prompts=PROMPTS[:3]), "3 prompts of each of 1 processes do not divide over 8"),
        (lambda: sample(num_samples=0), "num_samples must be a whole number, at least 1, got 0"),
        (lambda: sample(support=0), "support must be None, 'exact' or a number of tokens, got 0"),
        (lambda: sample(support="top_k"), "got 'top_k'"),
        (lambda: sample(make_mesh(), limits=replace(LIMITS, slots=12)), "slots=12 must be a .* multiple of the 8"),
        (lambda: sample(prompts=[[1] * 7]), "7 tokens, allowed are 1 to 6"),
        (lambda: sample(prompts=[[]]), "0 tokens"),
        (lambda: sample(temperature=0.0), "temperature must be positive"),
        (lambda: sample(greedy=True, support="exact"), "greedy=True does not sample"),
        (lambda: sample(limits=SamplingLimits(6, 9, (12,))), r"\[12\] are outside the vocabulary"),
        (lambda: sample(limits=SamplingLimits(30, 9, (0,))), "exceed model.context_tokens=32"),
    ],
)
def test_wrong_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
