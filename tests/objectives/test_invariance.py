"""One batch, one loss: however it is split, padded, packed or sharded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from p3o_jax.batch import metrics
from p3o_jax.batch.types import Batch, Policy
from p3o_jax.objectives import P3O, P4O, Gspo, Rloo, SequenceMean, objective_loss
from tests.objectives.objective_cases import OBJECTIVES, random_batch

DIFFERENTIATED = ("log_probs", "entropy", "support_log_probs")


def whole(objective, arguments):
    """Loss, metrics and gradients of the batch in one piece."""

    def loss(differentiated, rest):
        return objective_loss(objective, **differentiated, **rest)

    differentiated = {name: arguments[name] for name in DIFFERENTIATED}
    rest = {name: x for name, x in arguments.items() if name not in DIFFERENTIATED}
    return jax.value_and_grad(loss, has_aux=True)(differentiated, rest)


@functools.cache
def expected_of(name):
    """Of the random batch, for one of the objectives by name."""
    return whole(OBJECTIVES[name], random_batch())


def policy_and_batch(arguments):
    policy = Policy(arguments["log_probs"], arguments["entropy"], arguments["support_log_probs"])
    names = ("behaviour_log_probs", "advantages", "mask", "proximal_log_probs", "reference_log_probs", "support")
    return policy, Batch(**{name: arguments[name] for name in names})


# Of every kind of statistics and aggregation one; the others are among the long tests.
FEW = ("p3o", "p4o", "snapshot", "grpo", "gspo", "rloo", "vcpo", "truncated_is_sequence")
EVERY = [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in OBJECTIVES]
EIGHT_ROUNDINGS = 8 * 2.0**-23  # relative to the largest term of a sum, which may cancel


def assert_same(actual, expected):
    (loss, logged), gradient = actual
    (expected_loss, expected_logged), expected_gradient = expected
    # Token losses are of order 1, their mean may be much smaller.
    assert abs(loss - expected_loss) <= EIGHT_ROUNDINGS * max(1.0, abs(expected_loss))
    for name in gradient:
        limit = EIGHT_ROUNDINGS * np.abs(expected_gradient[name]).max()
        np.testing.assert_allclose(gradient[name], expected_gradient[name], rtol=0, atol=limit, err_msg=name)
    assert logged.keys() == expected_logged.keys()
    for name in logged:
        np.testing.assert_allclose(
            logged[name], expected_logged[name], rtol=EIGHT_ROUNDINGS, atol=EIGHT_ROUNDINGS, err_msg=name
        )


@pytest.mark.parametrize("name", EVERY)
def test_three_micro_batches_of_unequal_token_counts(name):
    objective, arguments = OBJECTIVES[name], random_batch()
    row = np.arange(8)
    owned = [row < 1, (row >= 1) & (row < 5), row >= 5]
    parts = [arguments | {"mask": arguments["mask"] & mine[:, None]} for mine in owned]  # all in one shape
    assert len({int(part["mask"].sum()) for part in parts}) == 3

    statistics, count = None, 0.0
    for part in parts:
        policy, batch = policy_and_batch(part)
        part_statistics = objective.statistics(policy, batch)
        statistics = part_statistics if statistics is None else metrics.combine(statistics, part_statistics)
        count += objective.aggregation.count(batch)

    def part_loss(policy, batch):
        per_token, logged = objective.loss(policy, batch, statistics)
        return jnp.sum(objective.aggregation.weights(batch) * per_token) / count, logged

    results = [jax.value_and_grad(part_loss, has_aux=True)(*policy_and_batch(part)) for part in parts]
    loss = sum(loss for (loss, _), _ in results)
    logged = results[0][0][1]
    for (_, more), _ in results[1:]:
        logged = metrics.combine(logged, more)
    gradient = jax.tree.map(lambda *parts: sum(parts), *(gradient for _, gradient in results))
    assert_same(((loss, metrics.values(logged)), gradient._asdict()), expected_of(name))


@pytest.mark.parametrize("name", ["p3o", "gspo"])
def test_a_named_axis_of_eight(name):
    """The collectives of `axis_name`, one row a device; one of the rows is fully masked. Eight devices: all below."""
    objective, arguments = OBJECTIVES[name], random_batch()
    rest = {key: x for key, x in arguments.items() if key not in DIFFERENTIATED}

    def loss(differentiated):
        def device(differentiated, rest):
            one_row = jax.tree.map(lambda x: x[None], {**differentiated, **rest})
            return objective_loss(objective, **one_row, axis_name="data")

        losses, logged = jax.vmap(device, axis_name="data")(differentiated, rest)
        return losses[0], jax.tree.map(lambda x: x[0], logged)

    result = jax.value_and_grad(loss, has_aux=True)({key: arguments[key] for key in DIFFERENTIATED})
    assert_same(result, expected_of(name))


def on_eight_devices(objective, arguments):
    """Loss, metrics and gradients from inside `shard_map`, which checks what is replicated."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    rest = {key: x for key, x in arguments.items() if key not in DIFFERENTIATED}

    def device(differentiated, rest):
        def loss(differentiated):
            return objective_loss(objective, **differentiated, **rest, axis_name="data")

        return jax.value_and_grad(loss, has_aux=True)(differentiated)

    data, replicated = PartitionSpec("data"), PartitionSpec()
    step = jax.shard_map(device, mesh=mesh, in_specs=(data, data), out_specs=((replicated, replicated), data))
    return jax.jit(step)({key: arguments[key] for key in DIFFERENTIATED}, rest)


@pytest.mark.parametrize("name", ["p3o", "gspo"])
def test_eight_devices(name):
    assert_same(on_eight_devices(OBJECTIVES[name], random_batch()), expected_of(name))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in ("p3o", "gspo")])
def test_eight_devices_every_objective(name):
    test_eight_devices(name)


def test_the_gradient_of_replicated_parameters_inside_shard_map():
    """As in a learner: differentiated through parameters that all devices share."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    arguments = random_batch()
    names = ("behaviour_log_probs", "advantages", "mask")
    rest = {name: arguments[name] for name in names}

    def loss(parameter, log_probs, rest, axis_name=None):
        return objective_loss(P3O(), log_probs * parameter, **rest, axis_name=axis_name)[0]

    def device(parameter, log_probs, rest):
        return jax.grad(loss)(parameter, log_probs, rest, "data")

    data, replicated = PartitionSpec("data"), PartitionSpec()
    step = jax.shard_map(device, mesh=mesh, in_specs=(replicated, data, data), out_specs=replicated)
    parameter = jnp.float32(1.1)
    # NaN * 1.1 at masked places would reach the parameter: clean what the model would compute.
    clean = jnp.where(arguments["mask"], arguments["log_probs"], 0.0)
    sharded = jax.jit(step)(parameter, clean, rest)
    assert sharded == pytest.approx(float(jax.grad(loss)(parameter, clean, rest)), rel=2e-6)


def test_global_arrays_under_jit():
    """Without `axis_name`: arrays that are sharded over eight devices, and the compiler."""
    sharding = NamedSharding(jax.make_mesh((8,), ("data",), (AxisType.Auto,)), PartitionSpec("data"))
    arguments = random_batch()
    result = jax.jit(lambda arguments: whole(P4O(), arguments))(jax.device_put(arguments, sharding))
    assert_same(result, expected_of("p4o"))


@pytest.mark.parametrize("name", EVERY)
def test_padding_and_masked_rows_change_nothing(name):
    """58 more columns of NaN, beside a row that is masked throughout: same loss, same gradient."""

    def widen(x):
        fill = jnp.zeros((), x.dtype) if x.dtype == jnp.bool_ else jnp.nan
        return jnp.pad(x, ((0, 0), (0, 58), *((0, 0),) * (x.ndim - 2)), constant_values=fill)

    (loss, logged), gradient = whole(OBJECTIVES[name], jax.tree.map(widen, random_batch()))
    for key, x in gradient.items():
        assert (np.asarray(x[:, 6:]) == 0).all()
        assert (np.asarray(x[-1]) == 0).all()
        gradient[key] = x[:, :6]
    assert_same(((loss, logged), gradient), expected_of(name))


@pytest.mark.parametrize("objective", [P3O(aggregation=SequenceMean()), Rloo(), Gspo(clip_low=0.05, clip_high=0.05)])
def test_packed_rows_are_the_sequences_they_hold(objective):
    arguments = random_batch()
    names = ("log_probs", "behaviour_log_probs", "advantages", "mask")
    padded = {name: arguments[name] for name in names}
    packed = {name: x.reshape(2, -1) for name, x in padded.items()}  # four sequences of six places a row
    ids = np.repeat(np.arange(4), 6)[None].repeat(2, 0)
    ids = jnp.asarray(np.where(packed["mask"], ids, 10**6))  # not read where masked

    def loss(log_probs, rest):
        return objective_loss(objective, log_probs, **rest)[0]

    value, gradient = jax.value_and_grad(loss)(padded.pop("log_probs"), padded)
    packed_value, packed_gradient = jax.value_and_grad(loss)(packed.pop("log_probs"), packed | {"segment_ids": ids})
    assert packed_value == pytest.approx(float(value), rel=2e-6)
    np.testing.assert_allclose(packed_gradient.reshape(8, 6), gradient, rtol=2e-6, atol=1e-7)


def test_vmap_is_a_loop():
    batches = [random_batch(seed) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    losses = jax.vmap(lambda arguments: objective_loss(P4O(), **arguments)[0])(stacked)
    for loss, arguments in zip(losses, batches, strict=True):
        assert loss == pytest.approx(float(objective_loss(P4O(), **arguments)[0]), rel=1e-6)
