"""Weights and activations in eight bits and fewer, and their products, by qwix.

    x ~ scale * q        scale = max |x| / largest q        float32, over what shares it

Of integer weights the largest is half a step more, as qwix has it: 7.5 steps in int4, whose lowest q, -8, is used too.

A quantised weight is a `qwix.QArray` in the place of the array, in the same tree: `scan` slices it by layer and `jit`
shards it. What qwix has no public function for is here: scales that devices which share an input agree on, so that a
row's numbers do not depend on the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from p3o_jax.devices import sharding
from p3o_jax.devices.precision import DTYPES, Precision, has_scales
from p3o_jax.models.lora import Target, num_inputs


def largest(dtype: DTypeLike) -> float:
    """The largest number of a format, to which the largest magnitude is scaled."""
    info = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    return float(info.max)


def quantise(
    x: Float[Array, "..."], dtype: DTypeLike, axes: int | tuple[int, ...] = -1
) -> tuple[Array, Float[Array, "..."]]:
    """Values in `dtype` and float32 scales, of size 1 along `axes`, which share one. Casts saturate: what rounds above
    the largest number becomes that, never NaN or infinity. A number that is not finite gives NaN."""
    x = x.astype(jnp.float32)
    magnitude = sharding.max_over_shards(jnp.abs(x).max(axis=axes, keepdims=True))
    limit = largest(dtype)
    tiny = float(np.finfo(np.float32).tiny)
    scale = jnp.where(magnitude > limit * tiny, magnitude / limit, jnp.where(magnitude >= 0, 1.0, magnitude))
    scaled = jnp.clip(x / scale, -limit, limit)
    return (jnp.round(scaled) if jnp.issubdtype(dtype, jnp.integer) else scaled).astype(dtype), scale


def dequantised(weight: Array | qwix.QArray, dtype: DTypeLike) -> Array:
    """A weight as plain numbers."""
    return (qwix.dequantize(weight) if isinstance(weight, qwix.QArray) else weight).astype(dtype)


def product(x: Float[Array, "..."], weight: Array | qwix.QArray, inputs: int, activations: str) -> Array:
    """x [..., I] times a weight [I, O], each with `inputs` axes I, in the dtype of x.

    In the formats of `precision.multiplied_as`, quantised ones accumulated in int32 or float32.
    """
    dtype = x.dtype
    if has_scales(activations):
        contracted = tuple(range(x.ndim - inputs, x.ndim))
        quantised = qwix.QArray(*quantise(x, DTYPES[activations], contracted))
        if isinstance(weight, qwix.QArray) and _go_together(quantised, weight, inputs):
            axes = ((contracted, tuple(range(inputs))), ((), ()))
            with jax.numpy_dtype_promotion("standard"):  # qwix multiplies int32 sums by float32 scales
                return qwix.dot_general(quantised, weight, axes, preferred_element_type=jnp.float32).astype(dtype)
        x = dequantised(quantised, dtype)
    return jnp.tensordot(x, dequantised(weight, dtype), inputs)


def _go_together(x: qwix.QArray, weight: qwix.QArray, inputs: int) -> bool:
    """Whether they are of the same kind, and no inputs have a scale of their own."""
    of_x, of_weight = (jnp.issubdtype(array.qvalue.dtype, jnp.integer) for array in (x, weight))
    return of_x == of_weight and weight.scale.shape[:inputs] == (1,) * inputs


def quantise_weights(weights: nnx.State, precision: Precision) -> nnx.State:
    """The sampler's copy of a model's weights, in its format; quantised from bfloat16, the precision they travel in.

    A copy even where nothing changes, since the learner donates its buffers.
    """

    def prepare(path: Any, param: nnx.Variable) -> nnx.Variable:
        value = param.get_value()
        if not has_scales(precision.weights):
            return param.replace(jnp.array(value, DTYPES[precision.weights], copy=True))
        value = value.astype(jnp.bfloat16)
        scales = _scales(path, value.ndim, precision)
        if scales is None:
            return param.replace(value)
        own, blocks = scales
        exact = value.astype(jnp.float32)  # qwix computes, and keeps scales, in the dtype it is given
        return param.replace(qwix.quantize(exact, DTYPES[precision.weights], channelwise_axes=own, tiled_axes=blocks))

    return _map(prepare, weights)


def quantised_specs(abstract: nnx.State, specs: nnx.State, mesh: Mesh) -> nnx.State:
    """The partition of what `quantise_weights` gives, whose shapes are given, from that of the plain weights. Scales
    that do not divide as their weight does are whole on every device."""

    def spec_of(path: Any, param: nnx.Variable, spec: nnx.Variable) -> nnx.Variable:
        value, spec = param.get_value(), spec.get_value()
        if not isinstance(value, qwix.QArray):
            return param.replace(spec)
        axes = tuple(spec) + (None,) * (value.ndim - len(spec))
        shared = zip(axes, value.scale.shape, strict=True)
        of_scale = [axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in shared]
        return param.replace(qwix.QArray(spec, PartitionSpec(*of_scale), qtype=value.qtype))

    return _map(spec_of, abstract, specs)


def check_fits(precision: Precision, abstract: nnx.State, specs: nnx.State, mesh: Mesh) -> None:
    """Refuses parts and blocks of scales that do not fit a model, before anything compiles.

    Args:
        precision: the sampler's.
        abstract: shapes of the plain weights.
        specs: their partition.
        mesh: the mesh of the specs.

    Raises:
        ValueError: a block does not divide the inputs that a device holds of a weight, or the model has no part that is
            to be included.
    """

    def check(path: Any, param: nnx.Variable, spec: nnx.Variable) -> nnx.Variable:
        shape = NamedSharding(mesh, spec.get_value()).shard_shape(param.get_value().shape)
        _, blocks = _scales(path, len(shape), precision) or ([], {})
        for axis, block in blocks.items():
            if shape[axis] % block:
                raise ValueError(
                    f"precision.block_size={block} does not divide the {shape[axis]} "
                    f"{param.get_metadata()['logical_axes'][axis]} that a device holds of weight "
                    f"{jax.tree_util.keystr(path)}; choose a divisor of {shape[axis]}"
                )
        return param

    if "head" in precision.include and "head" not in abstract:
        raise ValueError("precision.include has head, but the embedding of this model is its head: include embedding")
    if has_scales(precision.weights):
        _map(check, abstract, specs)


def _map(function: Callable[..., nnx.Variable], weights: nnx.State, *others: nnx.State) -> nnx.State:
    def is_weight(node: Any) -> bool:
        return isinstance(node, nnx.Variable)

    return jax.tree_util.tree_map_with_path(function, weights, *others, is_leaf=is_weight)


def _scales(path: Any, ndim: int, precision: Precision) -> tuple[list[int], dict[int, int]] | None:
    """Axes of a weight along which every index has its own scale, and axes whose blocks have; None: not quantised.

    Along the axes that are contracted with the input scales are shared. A layer's weights are stacked along axis 0, and
    always have their own; the scale of a norm is a vector, and has one.
    """
    name = str(path[-1].key)
    layers = [0] if len(path) > 1 else []
    if name in get_args(Target):
        contracted = list(range(1, 1 + num_inputs(name)))
    elif name in precision.include:
        contracted = [1]
    elif name.endswith("norm") and "norms" in precision.include:
        return layers, {}
    else:
        return None
    own = [axis for axis in range(ndim) if axis not in contracted]
    if precision.scales == "tensor":
        return layers, {}
    if precision.scales == "channel":
        return own, {}
    return sorted(own + contracted[:-1]), {contracted[-1]: precision.block_size}
