"""Limits, hand-computed values, refusals and errors of the objectives."""

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
from p3o_jax.types import Batch, Policy, Support
from tests.objectives.objective_cases import OBJECTIVES, random_batch


def loss_and_gradient(objective, **arguments):
    """Op by op, in one shape for all (few programs): what is added is masked, and NaN."""
    rows, tokens = arguments["log_probs"].shape

    def pad(x):
        fill = jnp.zeros((), x.dtype) if x.dtype == jnp.bool_ else jnp.nan
        widths = ((0, 8 - rows), (0, 6 - tokens), *((0, 0),) * (x.ndim - 2))
        return jnp.pad(x, widths, constant_values=fill) if (rows, tokens) != (8, 6) else x

    arguments = jax.tree.map(pad, arguments)
    log_probs = arguments.pop("log_probs")
    (loss, logged), gradient = jax.value_and_grad(lambda x: objective_loss(objective, x, **arguments), has_aux=True)(
        log_probs
    )
    return float(loss), logged, np.asarray(gradient)[:rows, :tokens]


def two_tokens(ratios, advantages, **rest):
    """One row of tokens with log pi = -1 and these ratios."""
    log_probs = jnp.full((1, len(ratios)), -1.0)
    return {
        "log_probs": log_probs,
        "behaviour_log_probs": log_probs - jnp.log(jnp.asarray([ratios], jnp.float32)),
        "advantages": jnp.asarray([advantages], jnp.float32),
        "mask": jnp.ones((1, len(ratios)), bool),
    } | rest


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


# Refusals.


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_fully_masked_batch_is_worth_nothing(name):
    arguments = random_batch()
    arguments["mask"] = jnp.zeros_like(arguments["mask"])
    loss, logged, gradient = loss_and_gradient(OBJECTIVES[name], **arguments)
    assert loss == logged["loss/total"] == 0
    assert (gradient == 0).all()
    assert logged["policy/ess"] == 1


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_log_ratio_that_is_not_finite_refuses_the_batch(name):
    """log mu = -inf (the sampler says that its own token was impossible), and NaN, at one counted token."""
    for value in (-np.inf, np.nan):
        arguments = random_batch()
        assert arguments["mask"][0, 0]
        arguments["behaviour_log_probs"] = arguments["behaviour_log_probs"].at[0, 0].set(value)
        loss, logged, gradient = loss_and_gradient(OBJECTIVES[name], **arguments)
        assert np.isnan(loss)
        assert np.isnan(gradient[0, 0])
        assert logged["policy/nonfinite_log_ratio"] == 1
        assert np.isnan(logged["policy/ess"])


@pytest.mark.parametrize("name", [name for name, x in OBJECTIVES.items() if x.snapshot])
def test_a_snapshot_that_is_not_finite_refuses_the_batch(name):
    arguments = random_batch()
    arguments["proximal_log_probs"] = arguments["proximal_log_probs"].at[0, 0].set(-jnp.inf)
    assert np.isnan(loss_and_gradient(OBJECTIVES[name], **arguments)[0])


@pytest.mark.parametrize("log_ratio", [-300.0, -30.0, 30.0, 87.0])
@pytest.mark.parametrize("objective", [P3O(), P4O(), P3O(kl="reverse"), Grpo(), Cispo(), Sapo(), TruncatedIs()])
def test_extreme_ratios_stay_finite(objective, log_ratio):
    arguments = two_tokens([1, 1, 1], [1, 1, 1])
    behaviour = arguments["behaviour_log_probs"].at[0, 1].add(-log_ratio)
    arguments |= {"behaviour_log_probs": behaviour, "proximal_log_probs": behaviour}
    loss, _, gradient = loss_and_gradient(objective, **arguments)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


def test_bfloat16_log_probs_give_float32_losses():
    arguments = random_batch()
    low = {name: x.astype(jnp.bfloat16) for name, x in arguments.items() if name in ("log_probs", "entropy")}
    loss, logged = objective_loss(P3O(), **arguments | low)
    assert loss.dtype == jnp.float32
    assert all(value.dtype == jnp.float32 for value in logged.values())
    rounded = {name: x.astype(jnp.float32) for name, x in low.items()}
    assert loss == objective_loss(P3O(), **arguments | rounded)[0]


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


# Errors.


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (P4O(), r"P4O needs proximal_log_probs \(a snapshot of the epoch\)"),
        (P3OSnapshot(kl="k3"), r"P3OSnapshot needs proximal_log_probs \(a snapshot of the rollout\)"),
        (Grpo(ratio_to="proximal"), "Grpo needs proximal_log_probs"),
        (Vcpo(ratio_to="proximal"), "Vcpo needs proximal_log_probs"),
        (DecoupledPpo(), "DecoupledPpo needs proximal_log_probs"),
        (P3O(kl="exact"), r"P3O needs support \("),
        (P3O(entropy_coefficient=0.1), "P3O needs entropy"),
        (Grpo(reference_kl_coefficient=0.1), "Grpo needs reference_log_probs"),
    ],
)
def test_what_is_missing_is_named(objective, message):
    with pytest.raises(ValueError, match=message):
        objective_loss(objective, **two_tokens([1, 1], [1, 1]))


def test_a_support_that_does_not_fit_the_form():
    arguments = random_batch()
    with pytest.raises(ValueError, match="whole vocabulary"):
        objective_loss(P3O(kl="top_k"), **arguments)
    few = Support(jnp.zeros((8, 6, 2), int), *(x[..., :2] for x in arguments["support"][1:]))
    arguments |= {"support": few, "support_log_probs": arguments["support_log_probs"][..., :2]}
    with pytest.raises(ValueError, match="a few tokens"):
        objective_loss(P3O(kl="exact"), **arguments)
    missing = few._replace(behaviour_log_probs=None)
    with pytest.raises(ValueError, match=r"support\.behaviour_log_probs"):
        objective_loss(P3O(kl="top_k"), **arguments | {"support": missing})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("log_probs", jnp.zeros(2), r"log_probs has shape \(2,\)"),
        ("behaviour_log_probs", jnp.zeros((1, 3)), r"behaviour_log_probs has shape \(1, 3\), which must be \(1, 2\)"),
        ("advantages", jnp.zeros(2), r"advantages has shape \(2,\)"),
        ("advantages", jnp.zeros((1, 1)), r"advantages has shape \(1, 1\)"),
        ("mask", jnp.ones((2, 2), bool), r"mask has shape \(2, 2\)"),
        ("entropy", jnp.zeros(2), r"entropy has shape \(2,\)"),
        ("segment_ids", jnp.zeros((1, 2)), "segment_ids has dtype float32: give integers"),
        ("log_probs", jnp.zeros((1, 2), int), "log_probs has dtype int32: give floating-point"),
        ("support_log_probs", jnp.zeros((1, 3, 4)), r"support_log_probs has shape \(1, 3, 4\)"),
    ],
)
def test_shapes_and_dtypes_are_checked(name, value, message):
    with pytest.raises(ValueError, match=message):
        objective_loss(P3O(), **two_tokens([1, 1], [1, 1]) | {name: value})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: P3O(kl="k2"), r"P3O\.kl='k2': give one of k3, reference"),
        (lambda: P3O(ess_scope="step"), r"P3O\.ess_scope='step'"),
        (lambda: P3O(entropy_coefficient=-0.1), r"P3O\.entropy_coefficient=-0\.1: give a finite number of at least 0"),
        (lambda: P3OSnapshot(weight="none"), r"P3OSnapshot\.weight='none'"),
        (lambda: Grpo(clip_low=-0.1), r"Grpo\.clip_low=-0\.1"),
        (lambda: Grpo(dual_clip=1.0), r"Grpo\.dual_clip=1\.0: give a finite number above 1"),
        (lambda: Grpo(ratio_to="old"), r"Grpo\.ratio_to='old'"),
        (lambda: DrGrpo(aggregation=SequenceMean()), r"DrGrpo\.aggregation=SequenceMean\(\)"),
        (lambda: DecoupledPpo(behaviour_weight_cap=0.0), r"DecoupledPpo\.behaviour_weight_cap=0\.0"),
        (lambda: TruncatedIs(cap=float("nan")), r"TruncatedIs\.cap=nan"),
        (lambda: TruncatedIs(level="row"), r"TruncatedIs\.level='row'"),
        (lambda: MaskedIs(low=2.0, high=1.0), r"MaskedIs\.high=1\.0"),
        (lambda: Sapo(temperature_negative=0.0), r"Sapo\.temperature_negative=0\.0"),
        (lambda: ConstantNormaliser(tokens=0), r"ConstantNormaliser\.tokens=0"),
    ],
)
def test_a_wrong_field_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
