"""What an objective refuses: batches that are not finite, and arguments that do not fit."""

import jax.numpy as jnp
import numpy as np
import pytest

from p3o_jax.batch.types import Support
from p3o_jax.objectives import (
    P3O,
    P4O,
    Cispo,
    ConstantNormaliser,
    DecoupledPpo,
    DrGrpo,
    Grpo,
    MaskedIs,
    P3OSnapshot,
    Sapo,
    SequenceMean,
    TruncatedIs,
    Vcpo,
    objective_loss,
)
from tests.objectives.objective_cases import OBJECTIVES, loss_and_gradient, random_batch, two_tokens


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


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["mask", "behaviour_log_probs"])
def test_what_every_objective_needs_is_named_too(name):
    with pytest.raises(ValueError, match=f"{name} is None: every objective needs it"):
        objective_loss(P3O(), **two_tokens([1, 1], [1, 1]) | {name: None})


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


@pytest.mark.usefixtures("unchecked")
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


@pytest.mark.usefixtures("unchecked")
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
