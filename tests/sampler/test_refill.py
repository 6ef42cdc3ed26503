"""Rows of their own settings and lengths, in slots that are refilled: the same tokens, and the learner's log-probs."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from p3o_jax.batch.stats import RatioMoments
from p3o_jax.batch.types import FinishReason
from p3o_jax.devices.precision import Precision
from p3o_jax.devices.sharding import MeshShape, make_mesh, to_local
from p3o_jax.models.log_probs import token_log_probs
from p3o_jax.models.transformer import TransformerConfig, abstract_model
from p3o_jax.sampler import Requests, Sampler, Sampling, SamplingLimits, decode
from tests.sampler.test_sampler import CONFIG, LIMITS, PROMPTS, VOCAB, one_device, response, sample, weights_of

SETTINGS = [Sampling(0.7 + 0.1 * i, top_k=(None, 8)[i % 2], top_p=(1.0, 0.95)[i // 2 % 2]) for i in range(len(PROMPTS))]
ROOM = [9, 9, 2, 9, 1, 9, 5, 9]


@pytest.fixture(scope="module")
def together():
    """All rows at once, on one device."""
    return sample(num_samples=4, sampling=SETTINGS, response_limits=ROOM)


@pytest.mark.parametrize(
    ("mesh", "slots"),
    [
        (MeshShape(), 1),
        (MeshShape(), 5),
        (MeshShape(), 32),
        (MeshShape(data=8), 16),
        (MeshShape(data=2, fsdp=2, tensor=2), 12),
    ],
)
def test_refilled_rows_are_the_rows_of_one_batch(together, mesh, slots):
    """Tokens are equal, on one device and on eight, where no draw is as close as rounding; log-probs up to rounding."""
    mesh = one_device() if mesh == MeshShape() else make_mesh(mesh)
    got = sample(mesh, limits=replace(LIMITS, slots=slots), num_samples=4, sampling=SETTINGS, response_limits=ROOM)
    for name in ("response_length", "finish_reason", "group", "prompt_length", "temperature"):
        np.testing.assert_array_equal(getattr(got, name), getattr(together, name))
    for row in range(len(together.tokens)):
        end = got.prompt_length[row] + got.response_length[row]
        np.testing.assert_array_equal(got.tokens[row, :end], together.tokens[row, :end])
        np.testing.assert_allclose(
            response(got, row, "behaviour_log_probs"), response(together, row, "behaviour_log_probs"), atol=1e-5
        )


def test_a_row_alone_is_the_row_of_the_batch(together):
    for prompt in (1, 5):
        alone = sample(
            prompts=[PROMPTS[prompt]], indices=[prompt], num_samples=4, sampling=[SETTINGS[prompt]],
            response_limits=[ROOM[prompt]],
        )  # fmt: skip
        for i in range(4):
            assert response(alone, i) == response(together, 4 * prompt + i)


def test_every_row_has_its_own_limit(together):
    at_limit = together.response_length == np.repeat(ROOM, 4)
    assert (together.response_length <= np.repeat(ROOM, 4)).all()
    assert at_limit[np.repeat(ROOM, 4) < 9].sum() >= 4
    ended = together.finish_reason != FinishReason.LENGTH
    assert (at_limit | ended).all()
    assert ended.any()


def test_every_row_has_its_own_settings(together):
    np.testing.assert_allclose(together.temperature, np.repeat([one.temperature for one in SETTINGS], 4), rtol=1e-6)


def test_supports_are_those_of_the_truncated_distributions():
    """Where the distribution is cut its log-probs are -inf, the others are renormalised; after refills too."""
    settings = [Sampling(top_k=1 + i) for i in range(len(PROMPTS))]
    got = sample(
        limits=replace(LIMITS, slots=5), num_samples=4, sampling=settings, response_limits=ROOM, support="exact"
    )
    for row in range(len(got.tokens)):
        start = got.prompt_length[row]
        log_probs = got.support.behaviour_log_probs[row, start : start + got.response_length[row]]
        assert (np.isfinite(log_probs).sum(axis=-1) == 1 + row // 4).all()
        np.testing.assert_allclose(np.exp(log_probs).sum(axis=-1), 1, rtol=1e-5)


def test_an_end_token_in_a_prompt_ends_nothing():
    """Token 0 is the end and what rows are padded with; it is told from both by its place alone."""
    prompts = [[1, 0, 4], [0], *PROMPTS[2:]]
    got = sample(prompts=prompts, num_samples=4, sampling=SETTINGS, response_limits=ROOM)
    assert got.tokens[0, :3].tolist() == prompts[0]
    assert got.response_length.min() > 0
    ends = [response(got, row)[-1] for row in np.flatnonzero(got.finish_reason == FinishReason.EOS)]
    assert ends
    assert set(ends) == {0}


def test_one_program_for_each_bucket_of_lengths(monkeypatch):
    """And none for other prompts, settings or limits; a wider bucket changes no token."""
    traced, draw = [], decode.draw_responses
    monkeypatch.setattr(decode, "draw_responses", lambda *arguments: traced.append(1) or draw(*arguments))
    limits = SamplingLimits(prompt_tokens=20, response_tokens=3, eos_ids=(0,))
    sampler = Sampler(CONFIG, VOCAB, limits, Precision(), one_device())
    weights = sampler.publish(weights_of(CONFIG, VOCAB))

    def tokens(lengths, indices, temperature, room):
        prompts = [[1 + i % 9 for i in range(length)] for length in lengths]
        options = {"sampling": Sampling(temperature), "response_limits": [room] * len(lengths)}
        return to_local(sampler.generate(weights, Requests(prompts, indices, jax.random.key(3), **options)))

    short = tokens([5, 16], [0, 1], 1.0, 3)
    assert short.tokens.shape == (2, 23)
    tokens([1, 2], [7, 8], 0.5, 2)
    assert len(traced) == 1
    wide = tokens([5, 17], [0, 1], 1.0, 3)
    assert len(traced) == 2
    tokens([20, 3], [0, 1], 2.0, 1)
    assert len(traced) == 2
    assert response(wide, 0) == response(short, 0)


TEMPERATURES = (0.6, 1.0, 1.2)


@pytest.mark.parametrize(("format", "scale", "threshold"), [("float32", 2.0, 0.9999), ("bfloat16", 1.0, 0.999)])
def test_sampler_and_learner_agree_after_refills_and_weight_updates(format, scale, threshold):
    """The same weights and precision on both sides, ragged prompts, 3 updates: the ESS is 1 but for rounding.

    bfloat16 has under 3 digits, so its noise grows with the logits: there they are as at initialisation.
    """
    config: TransformerConfig = replace(CONFIG, dtype=format)
    limits = replace(LIMITS, slots=7)
    sampler = Sampler(config, VOCAB, limits, Precision(format, format, format), one_device())
    graphdef, _ = abstract_model(config, VOCAB)

    @jax.jit
    def learner(params, tokens, temperature):
        model = nnx.merge(graphdef, params)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32), inputs.shape)
        hidden, _ = model.hidden(inputs, positions)
        temperatures = jnp.broadcast_to(temperature[:, None], inputs.shape)
        return token_log_probs(hidden, model.output_weights(), targets, temperatures)[0]

    prompts = PROMPTS * len(TEMPERATURES)
    settings = [Sampling(temperature) for temperature in TEMPERATURES for _ in PROMPTS]
    for update in range(4):
        params = weights_of(CONFIG, VOCAB, scale, seed=update)
        rollout = to_local(
            sampler.generate(
                sampler.publish(params, update),
                Requests(prompts, range(len(prompts)), jax.random.key(update), 4, settings),
            )
        )
        assert set(rollout.policy_version.ravel().tolist()) == {update}
        log_ratio = learner(params, rollout.tokens, rollout.temperature) - rollout.behaviour_log_probs[:, 1:]
        at = np.arange(1, rollout.tokens.shape[1])
        start = rollout.prompt_length[:, None]
        mask = (at >= start) & (at < start + rollout.response_length[:, None])
        assert len(set(rollout.response_length.tolist())) > 3
        for temperature in TEMPERATURES:
            rows = np.isclose(rollout.temperature, temperature)
            assert float(RatioMoments.of(log_ratio[rows], mask[rows]).ess()) > threshold
