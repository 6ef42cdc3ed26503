"""Settings, the distributions they define against brute force, and draws against those distributions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from p3o_jax.devices.precision import Precision
from p3o_jax.devices.sharding import make_mesh, to_local
from p3o_jax.models.transformer import Transformer, TransformerConfig, abstract_model
from p3o_jax.sampler import Requests, Sampler, Sampling, SamplingLimits
from p3o_jax.sampler.sampling import RowSampling, Truncation, _invert, draw, sampled_log_probs

SETTINGS = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=1.3, top_k=5),
    Sampling(top_p=0.7),
    Sampling(min_p=0.1),
    Sampling(temperature=1.5, top_k=9, top_p=0.8, min_p=0.05),
    Sampling(temperature=0.8, top_k=1),
    Sampling(top_k=1000, top_p=1e-9),
]


def exact(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution from its definition, in float64, one step after the other over the sorted tokens."""
    scaled = logits.astype(np.float64) / sampling.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if sampling.top_k is not None:
        # Fewer than k tokens are more likely: all tokens that tie for the last place stay.
        probs[[(probs > p).sum() >= sampling.top_k for p in probs]] = 0
        probs /= probs.sum()
    if sampling.top_p < 1:
        # The more likely tokens have not got the mass yet.
        probs[[probs[probs > p].sum() >= sampling.top_p for p in probs]] = 0
        probs /= probs.sum()
    probs[probs < sampling.min_p * probs.max()] = 0
    return probs / probs.sum()


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    """Rows of 37 tokens, with ties among the likely ones: quarters have few values."""
    values = np.random.default_rng(0).normal(size=(len(SETTINGS), 37)) * 2
    values[::2] = np.round(values[::2] * 4) / 4
    return values.astype(np.float32)


def test_each_row_has_the_distribution_of_its_settings(logits):
    truncation = Truncation.of(SETTINGS)
    got = np.asarray(sampled_log_probs(logits, RowSampling.of(SETTINGS), truncation))
    assert got.dtype == np.float32
    for of_row, row, sampling in zip(got, logits, SETTINGS, strict=True):
        expected = exact(row, sampling)
        np.testing.assert_array_equal(np.isneginf(of_row), expected == 0)
        np.testing.assert_allclose(np.exp(of_row), expected, rtol=2e-6)
    kept = np.isfinite(got).sum(axis=1)
    assert kept[0] == kept[1] == 37
    assert kept[-2] == kept[-1] == 1
    assert len(set(kept.tolist())) > 4


@pytest.mark.parametrize("sampling", SETTINGS)
def test_what_is_not_asked_for_is_not_computed(logits, sampling):
    """The program for one row's settings alone gives what the one for all settings gives."""
    rows = RowSampling.of([sampling] * len(logits))
    alone = sampled_log_probs(logits, rows, Truncation.of([sampling]))
    together = sampled_log_probs(logits, rows, Truncation.of(SETTINGS))
    np.testing.assert_array_equal(alone, together)


def test_ties_do_not_depend_on_the_order_of_the_vocabulary():
    """By hand: 4 tokens of 1/4. k=2 cannot choose two of them; half the mass needs all four at once."""
    logits = np.zeros((2, 4), np.float32)
    rows = [Sampling(top_k=2), Sampling(top_p=0.5)]
    got = sampled_log_probs(logits, RowSampling.of(rows), Truncation.of(rows))
    np.testing.assert_allclose(np.exp(got), 0.25)


def test_the_order_is_top_k_then_top_p_then_min_p():
    """By hand: 0.4, 0.3, 0.2, 0.1. k=2 leaves 4/7 and 3/7, and the first has half of that mass; without k it takes
    two tokens to have half. min-p 0.8 cuts the second (0.75 of the first) only where top-p left it."""
    logits = np.log(np.asarray([[0.4, 0.3, 0.2, 0.1]] * 3, np.float32))
    rows = [Sampling(top_k=2, top_p=0.5), Sampling(top_p=0.5), Sampling(top_p=0.5, min_p=0.8)]
    got = np.exp(sampled_log_probs(logits, RowSampling.of(rows), Truncation.of(rows)))
    np.testing.assert_allclose(got, [[1, 0, 0, 0], [4 / 7, 3 / 7, 0, 0], [1, 0, 0, 0]], rtol=1e-6)


def test_log_probs_that_are_tempered_again_would_differ():
    """Temperature divides logits: the truncated log-probs of T=2 are not half of those of T=1."""
    logits = np.asarray([[2.0, 1.0, -1.0]], np.float32)
    once, twice = (sampled_log_probs(logits, RowSampling.of([Sampling(t)])) for t in (1.0, 2.0))
    np.testing.assert_allclose(np.exp(twice).sum(), 1, rtol=1e-6)
    assert abs(np.exp(np.asarray(once) / 2).sum() - 1) > 0.5


@pytest.mark.parametrize("truncation", [Truncation(), Truncation(top_p=True)])
@pytest.mark.parametrize("temperature", [1e-37, 0.3, 0.7, 1.0, 1.2, 1e6])
def test_no_log_prob_is_above_0(temperature, truncation):
    """Of logits as a compiled program makes them, where one token is nearly certain."""
    inputs = np.random.default_rng(0).normal(size=(512, 16)).astype(np.float32)
    weights = np.random.default_rng(1).normal(size=(16, 24)).astype(np.float32) * 8
    rows = RowSampling.of([Sampling(temperature)] * len(inputs))
    got = np.asarray(jax.jit(lambda x, w: sampled_log_probs(x @ w, rows, truncation))(inputs, weights))
    assert got.max() <= 0
    assert not np.isnan(got).any()
    np.testing.assert_allclose(np.exp(got.astype(np.float64)).sum(axis=-1), 1, rtol=1e-5)
    if temperature < 1:
        assert np.exp(got.max(axis=-1)).max() > 1 - 1e-6


def test_a_token_without_probability_is_never_drawn():
    """At both ends of the random numbers, and with totals that rounding moves."""
    for size in (3, 40):
        weights = np.zeros((2, size), np.float32)
        weights[:, 1:-1] = np.random.default_rng(size).uniform(0.01, 1, (2, size - 2))
        assert _invert(weights, np.float32([0, 0])).tolist() == [1, 1]
        assert _invert(weights, np.float32([1 - 2**-23, 1 - 2**-23])).tolist() == [size - 2] * 2
        assert _invert(weights, np.float32([1, 1])).tolist() == [size - 2] * 2  # beyond what there can be


def test_draws_from_a_large_vocabulary():
    """5,000 tokens in blocks, the probabilities falling by a factor of 10^4: chi-square over tokens expected often."""
    vocab, count = 5_000, 100_000
    logits = -np.linspace(0, np.log(1e4), vocab).astype(np.float32)
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    keys = jax.random.split(jax.random.key(0), (20, count // 20))
    rows = jnp.broadcast_to(log_probs, (count // 20, vocab))
    tokens = np.asarray(jax.lax.map(lambda part: draw(rows, part), keys)).reshape(-1)
    expected = count * np.exp(log_probs.astype(np.float64))
    counts = np.bincount(tokens, minlength=vocab)
    often = expected >= 5
    freedom = int(often.sum()) - 1
    assert freedom > 1_000
    chi2 = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert abs(chi2 - freedom) < 5 * np.sqrt(2 * freedom)


MODEL = TransformerConfig(num_layers=1, embed_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=16)
VOCAB = 24


@pytest.fixture(scope="module")
def tiny():
    """A sampler of one token, its weights, and the exact logits after the prompt 2, 1."""
    limits = SamplingLimits(prompt_tokens=2, response_tokens=1, eos_ids=(0,))
    sampler = Sampler(MODEL, VOCAB, limits, Precision(), make_mesh(devices=jax.devices()[:1]))
    params = jax.tree.map(lambda leaf: leaf * 0.5, nnx.state(Transformer(MODEL, VOCAB, nnx.Rngs(0))))
    model = nnx.merge(abstract_model(MODEL, VOCAB)[0], params)
    hidden, _ = jax.jit(model.hidden)(jnp.asarray([[2, 1]]), jnp.asarray([[0, 1]]))
    return sampler, sampler.publish(params), np.asarray(model.logits(hidden)[0, -1])


@pytest.mark.parametrize("sampling", SETTINGS[1:6], ids=["temperature", "top_k", "top_p", "min_p", "all"])
def test_200_000_samples_match_the_exact_distribution(tiny, sampling):
    """Chi-square with its mean, the degrees of freedom f, and its deviation sqrt(2 f): five above are refused."""
    sampler, weights, logits = tiny
    count = 200_000
    rollout = to_local(sampler.generate(weights, Requests([[2, 1]], [0], jax.random.key(7), count, sampling)))
    probs = exact(logits, sampling)
    tokens = rollout.tokens[:, 2]
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[probs == 0].sum() == 0
    kept = probs > 0
    expected = count * probs[kept]
    freedom = int(kept.sum()) - 1
    assert freedom >= 3
    assert expected.min() > 5
    chi2 = ((counts[kept] - expected) ** 2 / expected).sum()
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom)
    np.testing.assert_allclose(rollout.behaviour_log_probs[:, 2], np.log(probs[tokens]), atol=2e-6)
    np.testing.assert_allclose(rollout.temperature, sampling.temperature)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive and finite, got 0.0"),
        ({"temperature": -1.0}, "temperature must be positive and finite, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be positive and finite, got nan"),
        ({"temperature": 1e-50}, "temperature must be positive and finite, got 1e-50"),
        ({"top_k": 0}, "top_k must be a whole number, at least 1 and below 2.*got 0"),
        ({"top_k": 2**31}, "top_k must be .* got 2147483648"),
        ({"top_k": 2.5}, "top_k must be .* got 2.5"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"min_p": -0.1}, "min_p must be between 0 and 1, got -0.1"),
        ({"min_p": float("nan")}, "min_p must be between 0 and 1, got nan"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


def test_whether_anything_is_cut():
    assert not Sampling(temperature=0.3).is_truncated
    assert all(Sampling(**one).is_truncated for one in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
@pytest.mark.parametrize("value", [True, np.True_, "1"])
def test_what_is_no_number_is_no_setting(name, value):
    with pytest.raises(ValueError, match=f"sampling: {name} must be"):
        Sampling(**{name: value})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("changes", [{"num_samples": True}, {"num_samples": 1.0}, {"support": True}])
def test_what_is_no_count_is_no_request(changes):
    with pytest.raises(ValueError, match=f"sampler: {next(iter(changes))} must be"):
        Requests([[1]], [0], jax.random.key(0), **changes)
