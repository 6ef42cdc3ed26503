"""The optimizer, from its configuration: AdamW with warm-up and clipping, by optax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx


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

    def __post_init__(self) -> None:
        if self.learning_rate < 0:
            raise ValueError(f"optimizer.learning_rate must not be negative, got {self.learning_rate}")
        if self.warmup_updates < 0:
            raise ValueError(f"optimizer.warmup_updates must not be negative, got {self.warmup_updates}")
        if not self.clip_norm > 0:
            raise ValueError(f"optimizer.clip_norm must be positive, got {self.clip_norm}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} must be in [0, 1), got {getattr(self, name)}")


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
    chain = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config, num_updates),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decayed_weights,
        ),
    )
    return optax.GradientTransformation(chain.init, _loosely(chain.update))


def _loosely(function: Callable) -> Callable:
    """The function under JAX's standard dtype promotion, which optax needs where ours is strict."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args)

    return run


def decayed_weights(params: Any) -> Any:
    """Which weights decay: those that touch the residual stream as matrices; neither norms nor biases."""
    return jax.tree.map(
        lambda param: param.replace("embed" in param.get_metadata()["logical_axes"]),
        params,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )


def select(condition: Any, new: Any, old: Any) -> Any:
    """`new` where the scalar condition holds, else `old`, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
