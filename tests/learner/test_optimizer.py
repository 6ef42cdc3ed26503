"""The optimizer against optax's AdamW, and moments in bfloat16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from p3o_jax.learner.optimizer import OptimizerConfig, decayed_weights, make_optimizer

PARAMS = nnx.State(
    {
        "matrix": nnx.Param(jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), logical_axes=("embed", "mlp")),
        "norm": nnx.Param(jnp.ones(3), logical_axes=("norm",)),
    }
)


def gradients(step: int):
    keys = iter(jax.random.split(jax.random.key(step), 2))
    return jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape) * (1 + step % 3), PARAMS)


def run(optimizer, steps: int = 20):
    """Parameters and optimizer state after some steps."""

    def step(carry, gradient):
        params, state = carry
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(gradients, range(steps)))
    return jax.jit(lambda: jax.lax.scan(step, (PARAMS, optimizer.init(PARAMS)), stacked)[0])()


def moments(state):
    return [leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim > 0]


def test_it_is_adamw_behind_a_clip():
    config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5)
    with jax.numpy_dtype_promotion("standard"):
        adamw = optax.adamw(1e-2, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decayed_weights)
        expected, _ = run(optax.chain(optax.clip_by_global_norm(0.5), adamw))
    got, state = run(make_optimizer(config, 20))
    assert set(moments(state)) == {jnp.dtype("float32")}
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_bfloat16_moments_are_stored_rounded_and_lead_almost_the_same_way():
    config = OptimizerConfig(learning_rate=1e-2, clip_norm=1e9)
    (exact, _), (rounded, state) = (
        run(make_optimizer(c, 20))
        for c in (config, OptimizerConfig(learning_rate=1e-2, clip_norm=1e9, moment_dtype="bfloat16"))
    )
    assert moments(state) == [jnp.dtype("bfloat16")] * 4
    for a, b, start in zip(*map(jax.tree.leaves, (rounded, exact, PARAMS)), strict=True):
        assert a.dtype == jnp.float32
        error, moved = np.abs(a - b).max(), np.abs(b - start).max()
        assert 0 < error < 0.02 * moved


def test_bfloat16_moments_decay():
    """At the largest beta that is allowed, a moment forgets gradients that stopped; beyond it, it would not."""
    optimizer = make_optimizer(OptimizerConfig(beta2=0.99, moment_dtype="bfloat16"), 1)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    _, state = optimizer.update(gradients(0), optimizer.init(PARAMS), PARAMS)
    step = jax.jit(lambda state: optimizer.update(zeros, state, PARAMS)[1])
    before = state[1].nu
    for _ in range(300):
        state = step(state)
    for late, early in zip(jax.tree.leaves(state[1].nu), jax.tree.leaves(before), strict=True):
        assert (late < 0.3 * early).all()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moment_dtype": "bfloat16", "beta2": 0.999}, "would never decay"),
        ({"moment_dtype": "float16"}, "float32 or bfloat16"),
        ({"beta1": 1.0}, r"optimizer.beta1 must be in \[0, 1\)"),
        ({"clip_norm": 0.0}, "optimizer.clip_norm must be a finite number above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**fields)
