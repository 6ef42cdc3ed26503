"""The sampler's own copy of the policy: adapters merged, cast or quantised, on the sampler's mesh, with its version."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from p3o_jax import sharding
from p3o_jax.models.lora import merged
from p3o_jax.models.quantised import check_blocks, quantise_weights, quantised_specs
from p3o_jax.models.transformer import TransformerConfig, abstract_model, weight_specs
from p3o_jax.precision import Precision


class Weights(NamedTuple):
    """What is sampled from. The version travels with the weights, so that a rollout cannot name another one."""

    params: nnx.State
    version: Int[Array, ""]  # rollout steps that they had been trained for


class WeightFormat:
    """How the learner's parameters become the sampler's weights, and what those look like."""

    def __init__(self, config: TransformerConfig, vocab_size: int, precision: Precision, mesh: Mesh):
        """
        Raises:
            ValueError: weights or their blocks of scales do not divide over the mesh.
        """
        self._precision, self._lora, self._mesh = precision, config.lora, mesh
        plain = dataclasses.replace(config, dtype=precision.compute, lora=None)
        self.graphdef, abstract = abstract_model(plain, vocab_size, precision.activations)
        specs = weight_specs(abstract, mesh, sharding.SAMPLER_RULES)
        check_blocks(precision, abstract, specs, mesh)
        self._abstract = jax.eval_shape(lambda params: quantise_weights(params, precision), abstract)
        self.specs = quantised_specs(self._abstract, specs)
        """The partition of `Weights.params`, a tree like it."""
        self._synchronise = jax.jit(
            lambda params, version: Weights(quantise_weights(merged(params, self._lora), precision), version),
            out_shardings=Weights(self._shardings(self.specs), NamedSharding(mesh, PartitionSpec())),
        )

    def _shardings(self, specs: nnx.State) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs)

    def synchronise(self, params: nnx.State, version: int) -> Weights:
        """Learner parameters -> the sampler's weights, in one compiled call."""
        return self._synchronise(params, jnp.int32(version))

    def abstract(self) -> Weights:
        """Shapes, dtypes and shardings of what `synchronise` returns, for restoring a checkpoint."""

        def described(leaf: jax.ShapeDtypeStruct, place: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

        whole = NamedSharding(self._mesh, PartitionSpec())
        params = jax.tree.map(described, self._abstract, self._shardings(self.specs))
        return Weights(params, jax.ShapeDtypeStruct((), jnp.int32, sharding=whole))
