"""The optimizer, from its configuration: AdamW with warm-up and clipping, by optax."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

# A bfloat16 number rounds back to itself when it changes by less than 2^-9 to 2^-8 of itself, 0.2 to 0.4 %.
BFLOAT16_BETA = 0.99


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv:1711.05101) behind a clip by global norm."""

    learning_rate: float = 1e-5
    """Peak learning rate."""
    warmup_updates: int = 0
    """Optimizer updates over which the learning rate rises linearly from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up; linear and cosine end at 0 with the run."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay; norms and biases are exempt."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the moments are kept in between updates; bfloat16 takes half the memory, and rounds them."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "epsilon", "weight_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"optimizer.{name} must be a finite number and not negative, got {value}")
        if self.warmup_updates < 0:
            raise ValueError(f"optimizer.warmup_updates must not be negative, got {self.warmup_updates}")
        if not (math.isfinite(self.clip_norm) and self.clip_norm > 0):
            raise ValueError(f"optimizer.clip_norm must be a finite number above 0, got {self.clip_norm}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} must be in [0, 1), got {getattr(self, name)}")
        if self.moment_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"optimizer.moment_dtype must be float32 or bfloat16, got {self.moment_dtype!r}")
        if self.moment_dtype == "bfloat16" and max(self.beta1, self.beta2) > BFLOAT16_BETA:
            raise ValueError(
                f"optimizer: beta1={self.beta1} and beta2={self.beta2} with moment_dtype=bfloat16 must not exceed "
                f"{BFLOAT16_BETA}: a moment that decays by less than its rounding would never decay"
            )


def learning_rate_schedule(config: OptimizerConfig, num_updates: int) -> optax.Schedule:
    """Learning rate by number of applied updates, of `num_updates` in the whole run."""
    peak, warmup = config.learning_rate, config.warmup_updates
    after = max(num_updates - warmup, 1)
    match config.decay:
        case "constant":
            rest = optax.constant_schedule(peak)
        case "linear":
            rest = optax.linear_schedule(peak, 0.0, after)
        case "cosine":
            rest = optax.cosine_decay_schedule(peak, after)
    # Update number `warmup` is the first at the peak; the very first is not at 0, which would waste it.
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return _loosely(optax.join_schedules([rise, rest], [warmup]) if warmup else rest)


def make_optimizer(config: OptimizerConfig, num_updates: int) -> optax.GradientTransformation:
    """The gradient transformation; its schedule counts the updates that were applied."""
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    chain = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        adam if config.moment_dtype == "float32" else _kept_in(jnp.bfloat16, adam),
        optax.add_decayed_weights(config.weight_decay, mask=decayed_weights),
        optax.scale_by_learning_rate(learning_rate_schedule(config, num_updates)),
    )
    return optax.GradientTransformation(chain.init, _loosely(chain.update))


def _kept_in(dtype: DTypeLike, adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Adam in float32 whose moments are rounded to a dtype between updates."""

    def cast(state: optax.ScaleByAdamState, dtype: DTypeLike) -> optax.ScaleByAdamState:
        mu, nu = jax.tree.map(lambda moment: moment.astype(dtype), (state.mu, state.nu))
        return state._replace(mu=mu, nu=nu)

    def update(gradients: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, Any]:
        updates, state = adam.update(gradients, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(adam.init(params), dtype), update)


def _loosely(function: Callable) -> Callable:
    """The function under JAX's standard dtype promotion, which optax needs where ours is strict."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args)

    return run


def decayed_weights(params: Any) -> Any:
    """Which weights decay: matrices that touch the residual stream, and adapters; neither norms nor biases."""
    return jax.tree.map(
        lambda param: param.replace(not {"embed", "rank"}.isdisjoint(param.get_metadata()["logical_axes"])),
        params,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )


def select(condition: Any, new: Any, old: Any) -> Any:
    """`new` where the scalar condition holds, else `old`, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
