"""LoRA: weights that stay, and low-rank matrices beside them that are trained     (arXiv:2106.09685)

y = x W + (alpha / rank) (x A) B          A ~ N(0, 1 / inputs), B = 0 at first

The adapters are parameters of their own type, `nnx.LoRAParam`: a learner of a model that has any trains those alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

Target = Literal["query", "key", "value", "attention_out", "gate", "up", "down"]


@dataclass(frozen=True)
class Lora:
    """Which weights have adapters, and of what size."""

    rank: int = 16
    """Columns of A and rows of B."""
    alpha: float = 32.0
    """The product A B counts alpha / rank times."""
    targets: tuple[Target, ...] = ("query", "key", "value", "attention_out", "gate", "up", "down")
    """Weights of each layer that have an adapter."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank must be positive, got {self.rank}")
        if not self.alpha > 0:
            raise ValueError(f"lora.alpha must be positive, got {self.alpha}")
        known = Target.__args__  # type: ignore[attr-defined]
        if not self.targets or set(self.targets) - set(known) or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"lora.targets must be different names among {', '.join(known)}, got {self.targets}")

    @property
    def scale(self) -> float:
        """Of the product A B."""
        return self.alpha / self.rank


def num_inputs(target: str) -> int:
    """How many leading axes of a layer's weight are contracted with its input."""
    return 2 if target == "attention_out" else 1


def attach(layers: nnx.Module, lora: Lora, rngs: nnx.Rngs) -> None:
    """Adds `TARGET_a` [L, inputs, rank] and `TARGET_b` [L, rank, outputs] beside each weight [L, inputs, outputs]."""
    for target in lora.targets:
        weight = getattr(layers, target)
        axes, inputs = weight.get_metadata()["logical_axes"], 1 + num_inputs(target)
        into = (*weight.shape[:inputs], lora.rank)
        out_of = (weight.shape[0], lora.rank, *weight.shape[inputs:])
        noise = jax.random.normal(rngs.params(), into, jnp.float32) * math.prod(into[1:-1]) ** -0.5
        setattr(layers, f"{target}_a", nnx.LoRAParam(noise, logical_axes=(*axes[:inputs], "rank")))
        zeros = jnp.zeros(out_of, jnp.float32)
        setattr(layers, f"{target}_b", nnx.LoRAParam(zeros, logical_axes=("layers", "rank", *axes[inputs:])))


def product(x: Array, a: Array, b: Array, scale: float, inputs: int) -> Array:
    """(x A) B times `scale`, in the dtype of x."""
    return jnp.tensordot(jnp.tensordot(x, a, inputs), b, 1) * jnp.asarray(scale, x.dtype)


def split(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """What is trained and what stays: the adapters and the rest if there are adapters, else everything and nothing."""
    adapters, rest = nnx.split_state(params, nnx.LoRAParam, ...)
    return (adapters, rest) if jax.tree.leaves(adapters) else (rest, adapters)


def without_adapters(params: nnx.State) -> nnx.State:
    """The weights of the model proper."""
    return nnx.split_state(params, nnx.LoRAParam, ...)[1]


def with_weights(params: nnx.State, weights: nnx.State) -> nnx.State:
    """The adapters of `params`, if it has any, beside other weights."""
    return nnx.merge_state(nnx.split_state(params, nnx.LoRAParam, ...)[0], weights)


def join(some: nnx.State, others: nnx.State) -> nnx.State:
    """The inverse of `split`."""
    return nnx.merge_state(some, others)


def merged(params: nnx.State, lora: Lora | None) -> nnx.State:
    """The same function as a model without adapters: W + (alpha / rank) A B, in float32."""
    if lora is None:
        return params
    adapters, weights = split(params)
    pure: dict[str, Any] = nnx.to_pure_dict(weights)
    pairs = nnx.to_pure_dict(adapters)["layers"]
    for target in lora.targets:
        delta = jax.vmap(partial(jnp.tensordot, axes=1))(pairs[f"{target}_a"], pairs[f"{target}_b"])
        pure["layers"][target] = pure["layers"][target] + lora.scale * delta
    weights = jax.tree.map(lambda leaf: leaf, weights)  # a copy, which `replace_by_pure_dict` changes
    nnx.replace_by_pure_dict(weights, pure)
    return weights
