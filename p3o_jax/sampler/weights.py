"""The sampler's own copy of the policy: adapters merged, cast or quantised, on the sampler's mesh, with its version."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from p3o_jax.devices import sharding
from p3o_jax.devices.precision import Precision
from p3o_jax.models.lora import merged
from p3o_jax.models.quantised import check_fits, quantise_weights, quantised_specs
from p3o_jax.models.transformer import TransformerConfig, abstract_model, weight_specs


class Weights(NamedTuple):
    """What is sampled from. The version travels with the weights, so that a rollout cannot name another one."""

    params: nnx.State
    version: Int[Array, ""]  # rollout steps that they had been trained for


class WeightFormat:
    """How the learner's parameters become the sampler's weights, and what those look like."""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        precision: Precision,
        mesh: Mesh,
        learner_mesh: Mesh | None = None,
    ):
        """
        Args:
            config: of the learner's model.
            vocab_size: tokens.
            precision: the format.
            mesh: the sampler's.
            learner_mesh: where the parameters are; None: on the sampler's mesh.

        Raises:
            ValueError: weights or their blocks of scales do not divide over the mesh.
        """
        learner_mesh = mesh if learner_mesh is None else learner_mesh
        plain = dataclasses.replace(config, dtype=precision.compute, lora=None)
        self.graphdef, abstract = abstract_model(plain, vocab_size, precision.activations)
        specs = weight_specs(abstract, mesh, sharding.SAMPLER_RULES)
        check_fits(precision, abstract, specs, mesh)
        self._abstract = jax.eval_shape(lambda params: quantise_weights(params, precision), abstract)
        self.specs = quantised_specs(self._abstract, specs, mesh)
        """The partition of `Weights.params`, a tree like it."""
        stays, whole = (
            _placed(
                quantised_specs(self._abstract, weight_specs(abstract, learner_mesh, rules), learner_mesh), learner_mesh
            )
            for rules in (sharding.LEARNER_RULES, sharding.SAMPLER_RULES)
        )
        self._place = _placed(self.specs, mesh)

        def quantise(params: nnx.State, version: Int[Array, ""]) -> Weights:
            weights = quantise_weights(merged(params, config.lora), precision)
            # Sharded as the learner's until they are narrow, and only then gathered over `fsdp`.
            weights = jax.lax.with_sharding_constraint(weights, stays.params)
            if self._same_devices:
                weights = jax.lax.with_sharding_constraint(weights, whole.params)
            return Weights(weights, version)

        self._same_devices = list(mesh.devices.flat) == list(learner_mesh.devices.flat)
        self.quantise = jax.jit(quantise, out_shardings=self._place if self._same_devices else stays)
        """(params, version) -> weights, on the sampler's mesh if it has the learner's devices, else where they were."""

    def convert(self, params: nnx.State, version: int) -> Weights:
        """Learner parameters -> the sampler's weights: one compiled call, and one transfer if the sampler has devices
        of its own."""
        weights = self.quantise(params, jnp.int32(version))
        return weights if self._same_devices else jax.device_put(weights, self._place)

    def abstract(self) -> Any:
        """`Weights` of shapes, dtypes and shardings of what `convert` returns, for restoring a checkpoint."""
        shapes = Weights._make((self._abstract, jax.ShapeDtypeStruct((), jnp.int32)))

        def described(leaf: jax.ShapeDtypeStruct, place: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

        return jax.tree.map(described, shapes, self._place)


def _placed(specs: nnx.State, mesh: Mesh) -> Any:
    """Makes `Weights` of shardings from this partition."""
    whole = NamedSharding(mesh, PartitionSpec())
    return Weights._make((jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs), whole))
