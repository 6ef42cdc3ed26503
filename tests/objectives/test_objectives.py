"""Limits and hand-computed values of the objectives, and what they report."""

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from p3o_jax.batch.types import Batch, Policy, Support
from p3o_jax.objectives import (
    P3O,
    P4O,
    Cispo,
    ConstantNormaliser,
    DecoupledCispo,
    DecoupledPpo,
    DrGrpo,
    Grpo,
    Gspo,
    GspoToken,
    MaskedIs,
    P3OSnapshot,
    Ppo,
    Reinforce,
    Rloo,
    Sapo,
    SequenceMean,
    TruncatedIs,
    Vcpo,
    objective_loss,
)
from tests.objectives.objective_cases import OBJECTIVES, loss_and_gradient, random_batch, two_tokens


# Worked out by hand: ratios 1 and 3, advantages 2 and -1, two tokens, log pi = -1.
# ESS = 2^2 / 5 = 0.8. Gradients are per token, times 2.
@pytest.mark.parametrize(
    ("objective", "loss", "gradient"),
    [
        # -min(rho, .8) A (-1) = 1.6, -.8; k3: 0 and log 3 + 1/3 - 1; slopes 0 and 1 - 1/3
        (P3O(), (1.6 - 0.8 + 0.2 * (np.log(3) - 2 / 3)) / 2, [-1.6, 0.8 + 0.2 * 2 / 3]),
        # rho log rho - rho + 1 = 3 log 3 - 2, slope 3 log 3
        (P3O(kl="importance"), (0.8 + 0.2 * (3 * np.log(3) - 2)) / 2, [-1.6, 0.8 + 0.2 * 3 * np.log(3)]),
        # rho - 1 - log rho = 2 - log 3, slope 2
        (P3O(kl="reverse"), (0.8 + 0.2 * (2 - np.log(3))) / 2, [-1.6, 0.8 + 0.2 * 2]),
        (Reinforce(), (2 - 1) / 2, [-2, 1]),
        (Rloo(), 2 - 1, [-4, 2]),  # a sum over the one sequence
        (DrGrpo(aggregation=ConstantNormaliser(tokens=8)), (-2 + 3) / 8, [-2 / 4, 3 / 4]),
        # r A = 2, -3: neither is clipped, as A < 0 is clipped from below only
        (Ppo(), (-2 + 3) / 2, [-2, 3]),
        (Ppo(dual_clip=2.0), (-2 + 2) / 2, [-2, 0]),
        (Cispo(clip_low=0.2, clip_high=0.2), (2 - 1.2) / 2, [-2, 1.2]),
        (TruncatedIs(cap=2.5), (2 - 2.5) / 2, [-2, 2.5]),
        (TruncatedIs(cap=2.5, level="sequence"), (2.5 * 2 - 2.5) / 2, [-5, 2.5]),  # 1 * 3 for both, capped
        (MaskedIs(low=0.5, high=2.0), 2 / 2, [-2, 0]),
        (MaskedIs(low=0.5, high=3.5), (2 - 3) / 2, [-2, 3]),
        # s = sqrt(3) > 1.2: clipped where A > 0; d(s A)/d log pi = s A / 2 for both tokens of the sequence
        (Gspo(clip_low=0.2, clip_high=0.2), (-1.2 * 2 + np.sqrt(3)) / 2, [np.sqrt(3) / 2, np.sqrt(3) / 2]),
        (GspoToken(clip_low=0.2, clip_high=0.2), (-1.2 * 2 + np.sqrt(3)) / 2, [0, np.sqrt(3)]),
        # 4 / tau sigmoid(tau (r - 1)): 2 at r = 1; slope r 4 s (1 - s)
        (
            Sapo(temperature_positive=1.0, temperature_negative=2.0),
            (-2 * 2 + 2 / (1 + np.exp(-4))) / 2,
            [-2, 3 * 4 * np.exp(-4) / (1 + np.exp(-4)) ** 2],
        ),
    ],
)
def test_by_hand(objective, loss, gradient):
    actual, _, actual_gradient = loss_and_gradient(objective, **two_tokens([1, 3], [2, -1]))
    assert actual == pytest.approx(loss, rel=2e-6, abs=1e-6)
    np.testing.assert_allclose(actual_gradient[0] * 2, gradient, rtol=4e-6, atol=1e-6)


def test_decoupled_by_hand():
    """pi / p = 1.5 and 1, p / mu = 2 and 4: w = min(p / mu, 3)."""
    arguments = two_tokens([3, 4], [1, -1])
    arguments["proximal_log_probs"] = arguments["log_probs"] - jnp.log(jnp.asarray([[1.5, 1.0]]))
    loss, logged, gradient = loss_and_gradient(DecoupledPpo(behaviour_weight_cap=3.0), **arguments)
    assert loss == pytest.approx((-2 * 1.2 + 3) / 2, rel=2e-6)
    np.testing.assert_allclose(gradient[0] * 2, [0, 3], rtol=2e-6)  # clipped at 1.2; w q A
    assert logged["policy/behaviour_weight_cap_fraction"] == 0.5
    assert logged["policy/clip_fraction"] == 0.5
    loss, _, gradient = loss_and_gradient(DecoupledCispo(), **arguments)
    assert loss == pytest.approx((2 * 1.2 - 4) / 2, rel=2e-6)
    np.testing.assert_allclose(gradient[0] * 2, [-2 * 1.2, 4], rtol=2e-6)


def test_the_common_terms_by_hand():
    """- 0.1 H + 0.5 k3(pi, reference); log-ratio to the reference log 2: log 2 + 1/2 - 1, slope 1/2."""
    arguments = two_tokens([1, 1], [0, 0], entropy=jnp.asarray([[3.0, 1.0]]))
    arguments["reference_log_probs"] = arguments["log_probs"] - np.float32(np.log(2))
    for form in ("reference", "k3"):
        objective = Grpo(entropy_coefficient=0.1, reference_kl_coefficient=0.5, reference_kl=form)
        loss, logged, gradient = loss_and_gradient(objective, **arguments)
        assert loss == pytest.approx(-0.1 * 2 + 0.5 * (np.log(2) - 0.5), rel=2e-6)
        np.testing.assert_allclose(gradient[0] * 2, [0.25, 0.25], rtol=2e-6)
        assert logged["loss/reference_kl"] == pytest.approx(np.log(2) - 0.5, rel=2e-6)
        assert logged["policy/entropy"] == 2


# Limits.


def test_on_fresh_data_p3o_is_reinforce_bit_for_bit():
    arguments = random_batch(drift=0.0)
    expected = loss_and_gradient(Reinforce(), **arguments)
    for form in ("k3", "reference", "importance", "reverse"):
        loss, logged, gradient = loss_and_gradient(P3O(kl=form), **arguments)
        assert logged["policy/ess"] == 1.0
        assert loss == expected[0]
        np.testing.assert_array_equal(gradient, expected[2])


@pytest.mark.parametrize("objective", [Ppo(), Sapo(), Cispo(), TruncatedIs(), MaskedIs(), GspoToken()])
def test_on_fresh_data_every_gradient_is_reinforce(objective):
    arguments = random_batch(drift=0.0)
    _, _, expected = loss_and_gradient(Reinforce(aggregation=objective.aggregation), **arguments)
    _, _, gradient = loss_and_gradient(objective, **arguments)
    np.testing.assert_allclose(gradient, expected, rtol=2e-6)


@pytest.mark.parametrize("kl", ["k3", "importance", "reverse", "exact"])
def test_p4o_is_p3o_if_the_snapshot_is_the_policy_or_the_behaviour(kl):
    """e_p = 1, so v_p = 0; or p = mu, so that both anchors are the same."""
    arguments = random_batch()
    support = arguments["support"]
    expected = loss_and_gradient(P3O(kl=kl), **arguments)
    for snapshot, distribution in (
        (arguments["log_probs"], arguments["support_log_probs"]),
        (arguments["behaviour_log_probs"], support.behaviour_log_probs),
    ):
        same = arguments | {
            "proximal_log_probs": snapshot,
            "support": Support(None, support.behaviour_log_probs, distribution),
        }
        loss, _, gradient = loss_and_gradient(P4O(kl=kl), **same)
        assert loss == pytest.approx(expected[0], rel=2e-6)
        np.testing.assert_allclose(gradient, expected[2], rtol=2e-6, atol=1e-8)


def test_p4o_is_p3o_to_the_snapshot_if_the_behaviour_is_the_policy():
    """mu = pi, so e_b = 1 and v_b = 0. Ratios 1 and 3 to the snapshot: ESS 0.8, both capped by it."""
    arguments = two_tokens([1, 3], [2, -1])
    snapshot = arguments["behaviour_log_probs"]
    expected = loss_and_gradient(P3O(), **arguments)
    fresh = arguments | {"behaviour_log_probs": arguments["log_probs"], "proximal_log_probs": snapshot}
    loss, logged, gradient = loss_and_gradient(P4O(), **fresh)
    assert (logged["policy/mixture_behaviour_share"], logged["policy/mixture_proximal_share"]) == (0, 1)
    assert loss == pytest.approx(expected[0], rel=2e-6)
    np.testing.assert_allclose(gradient, expected[2], rtol=2e-6)


def test_the_limits_of_p4o_are_continuous():
    """A snapshot that approaches the policy: the loss approaches P3O's, from either side of it."""
    arguments = random_batch()
    expected = loss_and_gradient(P3O(), **arguments)[0]
    rng = np.random.default_rng(3)
    direction = jnp.asarray(rng.normal(size=arguments["log_probs"].shape), jnp.float32)
    for sign in (1, -1):
        distances = []
        for size in (0.3, 0.03, 0.003):
            snapshot = arguments["log_probs"] + sign * size * direction
            loss = loss_and_gradient(P4O(), **arguments | {"proximal_log_probs": snapshot})[0]
            distances.append(abs(loss - expected))
        assert distances[0] > 10 * distances[1] > 100 * distances[2] >= 0
        assert distances[2] < 1e-5


def test_snapshot_weights():
    """ESS 0.8: sqrt(1 / 0.8 - 1) = 0.5 or 1 - 0.8. The KL is to the snapshot: ratio 2 to it, log 2 - 1/2."""
    arguments = two_tokens([1, 3], [0, 0])
    arguments["proximal_log_probs"] = arguments["log_probs"] - np.float32(np.log(2))
    for weight, expected in (("coefficient_of_variation", 0.5), ("one_minus_ess", 0.2)):
        loss, logged, _ = loss_and_gradient(P3OSnapshot(kl="k3", weight=weight), **arguments)
        assert loss == pytest.approx(expected * (np.log(2) - 0.5), rel=4e-6)
        assert logged["loss/snapshot_kl"] == pytest.approx(np.log(2) - 0.5, rel=4e-6)


def test_controls_of_the_snapshot_anchor_are_a_few_lines():
    """Constant weight and cap 1, as an experiment would write them."""

    @dataclass(frozen=True, kw_only=True)
    class Control(P3OSnapshot):
        constant: float

        def kl_weight(self, ess):
            return self.constant

        def cap(self, ess):
            return 1.0

    arguments = two_tokens([0.5, 3], [1, 1])
    arguments["proximal_log_probs"] = arguments["log_probs"] - np.float32(np.log(2))
    loss, _, gradient = loss_and_gradient(Control(kl="k3", constant=0.3), **arguments)
    assert loss == pytest.approx((0.5 + 1) / 2 + 0.3 * (np.log(2) - 0.5), rel=4e-6)
    np.testing.assert_allclose(gradient[0] * 2, [-0.5 + 0.15, -1 + 0.15], rtol=4e-6)


def test_vcpo_slows_down_by_the_root_of_the_ess():
    arguments = two_tokens([1, 3], [2, -1])
    policy = Policy(arguments["log_probs"])
    batch = Batch(arguments["mask"], arguments["behaviour_log_probs"], arguments["advantages"])
    token = Vcpo(level="token")
    assert token.learning_rate_factor(token.statistics(policy, batch)) == pytest.approx(np.sqrt(0.8), rel=1e-6)
    rows = batch._replace(segment_ids=jnp.asarray([[0, 1]]))  # two sequences of one token each
    for sequences, expected in ((batch, 1.0), (rows, np.sqrt(0.8))):
        factor = Vcpo().learning_rate_factor(Vcpo().statistics(policy, sequences))
        assert factor == pytest.approx(expected, rel=1e-6)
    assert Grpo().learning_rate_factor(None) == 1.0


# Scope and metrics.


def test_ess_scope_says_what_the_learner_should_merge():
    assert P3O().statistics_scope == P4O().statistics_scope == Vcpo().statistics_scope == "batch"
    assert P3O(ess_scope="micro_batch").statistics_scope == "micro_batch"
    assert Grpo().statistics_scope is None
    assert (Grpo().snapshot, Grpo(ratio_to="proximal").snapshot, P3OSnapshot().snapshot) == (None, "epoch", "rollout")
    assert (P3O().support, P3O(kl="top_k").support, P4O(kl="exact").support) == (None, "behaviour", "both")
    assert P3OSnapshot().support == "proximal"


def test_p3o_has_no_number_to_tune():
    own = {field.name for field in fields(P3O)} - {field.name for field in fields(Reinforce)}
    assert own == {"kl", "ess_scope"}
    assert P3O() == P3O(kl="k3", ess_scope="batch")


def test_every_objective_reports_the_same_metrics():
    required = {"policy/ess", "policy/ratio_mean", "policy/ratio_max", "policy/log_ratio_abs_mean", "policy/chi2"}
    required |= {"policy/log_ratio_abs_max", "policy/outside_0.2_fraction", "policy/behaviour_kl_proxy"}
    required |= {"policy/entropy", "policy/nonfinite_log_ratio", "policy/log_ratio_histogram"}
    required |= {"loss/score", "loss/total"}
    for name, objective in OBJECTIVES.items():
        loss, logged = objective_loss(objective, **random_batch())
        assert required <= logged.keys(), name
        assert all(np.isfinite(value).all() for value in logged.values()), name
        assert logged["loss/total"] == pytest.approx(float(loss), rel=1e-6)


def test_cap_fraction_by_hand():
    _, logged, _ = loss_and_gradient(P3O(), **two_tokens([1, 3, 0.1], [1, 1, 1]))
    # ESS = 4.1^2 / 10.01 / 3 = 0.56: two of three ratios are above it.
    assert logged["policy/cap_fraction"] == pytest.approx(2 / 3)


def test_sequence_mean_by_hand():
    """Sequences of 1 and 3 tokens, log pi = -1, A = 1 and 5: (1 + 5) / 2, not (1 + 15) / 4."""
    mask = jnp.asarray([[True, False, False], [True, True, True]])
    arguments = {
        "log_probs": jnp.full((2, 3), -1.0),
        "behaviour_log_probs": jnp.full((2, 3), -1.0),
        "advantages": jnp.asarray([1.0, 5.0]),
        "mask": mask,
    }
    assert objective_loss(Reinforce(aggregation=SequenceMean()), **arguments)[0] == 3
    assert objective_loss(Reinforce(), **arguments)[0] == 4
    assert objective_loss(Reinforce(aggregation=ConstantNormaliser(tokens=4)), **arguments)[0] == 2  # 16 / (2 * 4)


@pytest.mark.parametrize("objective", [Reinforce(aggregation=SequenceMean()), Gspo(clip_low=9.0, clip_high=9.0)])
def test_sequences_weigh_the_same_in_float64_too(objective):
    """Lengths of 3 and 7, whose inverses in float32 are 3e-8 off: loss and gradient have the digits of float64."""
    rng = np.random.default_rng(0)
    log_probs, behaviour, advantages = rng.normal(size=(3, 2, 7))
    mask = np.arange(7) < np.array([[3], [7]])
    lengths = mask.sum(axis=1, keepdims=True)
    if isinstance(objective, Gspo):
        sequence = (np.where(mask, log_probs - behaviour, 0).sum(axis=1, keepdims=True) / lengths) + 0 * log_probs
        per_token = -np.exp(sequence) * advantages
        of_sequence = np.where(mask, per_token / lengths, 0).sum(axis=1, keepdims=True)
        expected_gradient = np.where(mask, of_sequence / lengths / 2, 0)
    else:
        per_token = -advantages * log_probs
        expected_gradient = np.where(mask, -advantages / lengths / 2, 0)
    with jax.enable_x64(True):
        (loss, metrics), gradient = jax.value_and_grad(
            lambda x: objective_loss(objective, x, behaviour_log_probs=behaviour, advantages=advantages, mask=mask),
            has_aux=True,
        )(jnp.asarray(log_probs))
    assert loss.dtype == metrics["loss/total"].dtype == gradient.dtype == jnp.float64
    expected = np.where(mask, per_token / lengths, 0).sum() / 2
    assert loss == pytest.approx(expected, rel=1e-13)
    assert metrics["loss/total"] == pytest.approx(expected, rel=1e-13)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-12, atol=1e-15)
