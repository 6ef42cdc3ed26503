"""KL terms against exact enumeration: a vocabulary of 5, sequences of 3, float64.

The policy is a table: one row of logits a prefix, 1 + 5 + 25 of them. All 125 sequences
are the batch, and the expectation over samples of mu is their sum, weighted by mu(y).
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from p3o_jax.batch.stats import RatioMoments
from p3o_jax.batch.types import Batch, Policy, Support
from p3o_jax.objectives import P3O, P4O, P3OSnapshot, Reinforce, Rloo, TruncatedIs, kl

V, T = 5, 3
SEQUENCES = np.stack(np.meshgrid(*[np.arange(V)] * T, indexing="ij"), -1).reshape(-1, T)
# The row of the table that predicts token t: prefixes are numbered by length, then in order.
PREFIX = np.stack([np.zeros(V**T, int), 1 + SEQUENCES[:, 0], 1 + V + V * SEQUENCES[:, 0] + SEQUENCES[:, 1]], -1)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def tables(distance, seed=0):
    """Logits of pi, and of two anchors at a distance from it."""
    rng = np.random.default_rng(seed)
    pi = rng.normal(size=(1 + V + V * V, V))
    return (jnp.asarray(pi + scale * rng.normal(size=pi.shape)) for scale in (0.0, distance, 0.5 * distance))


def full(logits):
    """log-probs of every next token at every place of every sequence, [125, 3, 5]."""
    return jax.nn.log_softmax(logits)[PREFIX]


def of_tokens(log_probs):
    return jnp.take_along_axis(log_probs, SEQUENCES[..., None], axis=-1)[..., 0]


def probability(logits):
    return jnp.exp(of_tokens(full(logits)).sum(-1))


def batch_of(mu, snapshot=None, advantages=0.0):
    shape = SEQUENCES.shape
    distributions = [None if x is None else full(x) for x in (mu, snapshot)]
    return Batch(
        mask=jnp.ones(shape, bool),
        behaviour_log_probs=of_tokens(distributions[0]),
        advantages=jnp.broadcast_to(jnp.asarray(advantages), shape),
        proximal_log_probs=None if snapshot is None else of_tokens(distributions[1]),
        support=Support(None, *distributions),
    )


def policy_of(pi):
    return Policy(of_tokens(full(pi)), None, full(pi))


def expectation(per_token, mu):
    """Over all samples of mu, of the token mean."""
    return jnp.sum(probability(mu) * per_token.mean(-1))


def divergences(pi, anchor, mu, of):
    """E over prefixes of mu of of(pi_v, anchor_v), summed over next tokens v: exact, no sampled token."""
    return expectation(of(jnp.exp(full(pi)), jnp.exp(full(anchor))).sum(-1), mu)


forward_kl = partial(divergences, of=lambda p, q: p * jnp.log(p / q))  # KL(pi, anchor)
reverse_kl = partial(divergences, of=lambda p, q: q * jnp.log(q / p))  # KL(anchor, pi)
chi2 = partial(divergences, of=lambda p, q: q**2 / p - q)  # chi2(anchor, pi)


def estimated(objective, pi, mu, snapshot=None):
    return expectation(objective.divergence(policy_of(pi), batch_of(mu, snapshot)), mu)


def assert_equal_with_gradient(estimate, exact, pi):
    value, gradient = jax.value_and_grad(estimate)(pi)
    expected, expected_gradient = jax.value_and_grad(exact)(pi)
    assert value.dtype == jnp.float64
    assert value == pytest.approx(float(expected), rel=1e-12)
    scale = np.abs(expected_gradient).max()
    np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=1e-12 * scale)


NEAR_AND_FAR = pytest.mark.parametrize("distance", [0.01, 0.3, 2.0])


@NEAR_AND_FAR
def test_importance_exact_and_top_k_of_everything_are_the_forward_kl(distance):
    pi, mu, _ = tables(distance)
    for form in ("importance", "exact"):
        assert_equal_with_gradient(
            lambda x, form=form: estimated(P3O(kl=form), x, mu), lambda x: forward_kl(x, mu, mu), pi
        )
    everything = jnp.argsort(full(mu), axis=-1)[..., ::-1]
    batch = batch_of(mu)
    batch = batch._replace(support=Support(everything, jnp.take_along_axis(full(mu), everything, -1)))

    def top_v(x):
        policy = Policy(of_tokens(full(x)), None, jnp.take_along_axis(full(x), everything, -1))
        return expectation(P3O(kl="top_k").divergence(policy, batch), mu)

    assert_equal_with_gradient(top_v, lambda x: forward_kl(x, mu, mu), pi)


@NEAR_AND_FAR
def test_reverse_is_the_reverse_kl(distance):
    pi, mu, _ = tables(distance)
    assert_equal_with_gradient(lambda x: estimated(P3O(kl="reverse"), x, mu), lambda x: reverse_kl(x, mu, mu), pi)


@NEAR_AND_FAR
def test_k3_is_chi_squared_less_the_reverse_kl(distance):
    """Under samples of mu. The log-ratios stay inside +-10, so that nothing is clipped."""
    pi, mu, _ = tables(distance)
    assert np.abs(full(pi) - full(mu)).max() < 10
    for form in ("k3", "reference"):
        assert_equal_with_gradient(
            lambda x, form=form: estimated(P3O(kl=form), x, mu), lambda x: chi2(x, mu, mu) - reverse_kl(x, mu, mu), pi
        )


def test_k3_is_biased_for_the_kl_it_stands_for():
    """Little near mu, where all divergences agree to second order, and badly far from it."""
    for distance, least, most in ((0.01, 0.0, 0.05), (2.0, 0.5, np.inf)):
        pi, mu, _ = tables(distance)
        exact = jax.grad(lambda x, mu=mu: forward_kl(x, mu, mu))(pi)
        k3 = jax.grad(lambda x, mu=mu: estimated(P3O(kl="k3"), x, mu))(pi)
        bias = np.linalg.norm(k3 - exact) / np.linalg.norm(exact)
        assert least <= bias < most


def test_k3_is_unbiased_under_samples_of_the_policy():
    """Its value, which is what it was proposed for; its gradient is not even then."""
    pi, mu, _ = tables(1.0)
    per_token = P3O(kl="k3").divergence(policy_of(pi), batch_of(mu))
    assert expectation(per_token, pi) == pytest.approx(float(forward_kl(pi, mu, pi)), rel=1e-12)


@NEAR_AND_FAR
def test_sampled_forms_of_another_anchor_than_mu(distance):
    """Samples are mu's, the anchor is a snapshot: importance and reverse are unbiased all the same."""
    pi, mu, snapshot = tables(distance)
    for form, exact in (("importance", forward_kl), ("exact", forward_kl), ("reverse", reverse_kl)):
        assert_equal_with_gradient(
            lambda x, form=form: estimated(P3OSnapshot(kl=form), x, mu, snapshot),
            lambda x, exact=exact: exact(x, snapshot, mu),
            pi,
        )


@NEAR_AND_FAR
def test_the_mixture_anchor_of_p4o(distance):
    pi, mu, snapshot = tables(distance)
    mixture = jnp.log(0.3 * jax.nn.softmax(mu) + 0.7 * jax.nn.softmax(snapshot))
    for form, exact in (("importance", forward_kl), ("exact", forward_kl), ("reverse", reverse_kl)):

        def estimate(x, form=form):
            per_token = P4O(kl=form).divergence_from_mixture(policy_of(x), batch_of(mu, snapshot), 0.3, 0.7)
            return expectation(per_token, mu)

        assert_equal_with_gradient(estimate, lambda x, exact=exact: exact(x, mixture, mu), pi)


@NEAR_AND_FAR
def test_top_k_is_a_lower_bound_that_grows_with_k(distance):
    pi, mu, _ = tables(distance)
    exact = forward_kl(pi, mu, mu)
    likeliest = jnp.argsort(full(mu), axis=-1)[..., ::-1]
    bounds = []
    for k in range(1, V + 1):
        kept = [jnp.take_along_axis(full(x), likeliest[..., :k], -1) for x in (pi, mu)]
        bounds.append(float(expectation(kl.distribution("top_k", *kept), mu)))
    assert bounds[-1] == pytest.approx(float(exact), rel=1e-12)
    # One token can be left out for nothing: its probability is what the others leave.
    assert bounds[-2] == pytest.approx(float(exact), rel=1e-12)
    assert all(0 < low < high for low, high in itertools.pairwise(bounds[:-1]))


def test_top_k_in_float32_does_not_see_rounding_as_a_bucket():
    """The k tokens hold all but rounding of the mass: log(1e-8 / 3e-7) of nothing must not be a gradient."""
    rng = np.random.default_rng(0)
    log_p, log_q = (jax.nn.log_softmax(jnp.asarray(rng.normal(size=(50, 3, 17)), jnp.float32)) for _ in range(2))
    value, gradient = jax.value_and_grad(lambda x: kl.distribution("top_k", x, log_q).sum())(log_p)
    expected, expected_gradient = jax.value_and_grad(lambda x: kl.distribution("exact", x, log_q).sum())(log_p)
    assert value == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6)


def test_exact_where_a_probability_is_zero():
    half, zero = np.log(0.5), -np.inf
    log_p, log_q = jnp.asarray([[[half, half, zero]]]), jnp.log(jnp.asarray([[[0.25, 0.25, 0.5]]]))
    value, gradient = jax.value_and_grad(lambda x: kl.distribution("exact", x, log_q).sum())(log_p)
    assert value == pytest.approx(np.log(2))
    assert np.isfinite(gradient).all()
    assert kl.distribution("exact", log_q, log_p) == np.inf  # a truncated sampler has no support there


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("k3", [1 - np.exp(5), 1 - np.exp(10)]),  # -147.4, -22025.5
        ("reference", [1 - np.exp(5), 1.0]),
        ("importance", [-5 * np.exp(-5), -20 * np.exp(-20)]),  # -0.034, -4e-8
        ("reverse", [np.exp(-5) - 1, np.exp(-20) - 1]),  # -0.993, -1
    ],
)
def test_gradients_by_hand(form, expected):
    """At log_ratio -5, and at -20, beyond the clip of 10."""
    r = jnp.asarray([[-5.0, -20.0]])
    gradient = jax.grad(lambda r: kl.sampled(form, r).sum())(r)
    np.testing.assert_allclose(gradient[0], expected, rtol=1e-12)


@pytest.mark.parametrize("form", kl.SAMPLED_FORMS)
def test_fresh_data_has_no_kl_and_no_gradient(form):
    value, gradient = jax.value_and_grad(lambda r: kl.sampled(form, r).sum())(jnp.zeros((2, 3), jnp.float32))
    assert value == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("form", ["k3", "importance", "reverse"])
def test_small_ratios_keep_their_digits_in_float32(form):
    """Near 0 all three are r^2 / 2 with gradient r: a float32 that takes 1 from nearly 1 would lose them."""
    r = jnp.asarray([[1e-3, -3e-4]], jnp.float32)
    value = kl.sampled(form, r)
    gradient = jax.grad(lambda r: kl.sampled(form, r).sum())(r)
    np.testing.assert_allclose(gradient, r, rtol=2e-3)
    np.testing.assert_allclose(value, r**2 / 2, rtol=2e-3)


# Policy gradients.


def test_scores_are_the_policy_gradient():
    """Fresh samples: REINFORCE, P3O, and RLOO's sum; stale samples: importance-weighted, uncapped."""
    pi, mu, _ = tables(1.0)
    reward = jnp.asarray(np.random.default_rng(1).normal(size=(V**T, 1)))

    def expected_reward(x):
        return jnp.sum(probability(x) * reward[:, 0])

    exact = jax.grad(expected_reward)(pi)

    def estimate(objective, sampler):
        batch = batch_of(sampler, advantages=reward)

        def loss(x):
            policy = policy_of(x)
            per_token, _ = objective.loss(policy, batch, objective.statistics(policy, batch))
            return -T * expectation(per_token, sampler)  # a response's sum, not its mean

        return jax.grad(loss)(pi)

    for objective in (Reinforce(), Rloo(), P3O()):
        np.testing.assert_allclose(estimate(objective, pi), exact, atol=1e-12)
    np.testing.assert_allclose(estimate(TruncatedIs(level="sequence", cap=1e9), mu), exact, atol=1e-12)
    # Token weights leave the prefix uncorrected: biased, and so is no correction at all.
    for objective in (TruncatedIs(cap=1e9), Reinforce()):
        assert np.abs(estimate(objective, mu) - exact).max() > 1e-2


def test_p3o_score_by_hand():
    """sum_y mu(y) min(rho, e) A grad log pi, with grad log pi = one-hot - pi written out in numpy."""
    pi, mu, _ = tables(1.0)
    reward = np.random.default_rng(1).normal(size=(V**T, 1))
    ess = RatioMoments(*(jnp.asarray(x) for x in (0.0, 1.0, 1.0, 2.0, 0.0)))  # 1 * 1 / (1 * 2) = 0.5
    batch = batch_of(mu, advantages=reward)
    objective = P3O(kl="exact")

    def loss(x):
        return expectation(objective.loss(policy_of(x), batch, ess)[0], mu)

    gradient = jax.grad(loss)(pi)
    distribution, tokens = np.exp(full(pi)), of_tokens(full(pi))
    weight = np.asarray(probability(mu))[:, None] * np.minimum(np.exp(tokens - batch.behaviour_log_probs), 0.5)
    one_hot = np.eye(V)[SEQUENCES]
    expected = np.zeros_like(pi)
    np.add.at(expected, PREFIX, -(weight * reward)[..., None] * (one_hot - distribution) / T)
    expected += 0.5 * np.asarray(jax.grad(lambda x: forward_kl(x, mu, mu))(pi))
    np.testing.assert_allclose(gradient, expected, atol=1e-13)
