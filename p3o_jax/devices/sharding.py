"""The mesh, the table from logical to mesh axes, and every collective of the program.

The learner and the sampler run under `jax.shard_map`, manual over all mesh axes, so
what is communicated is what is written here. An axis of size 1 never appears in a
partition spec and costs no collective; outside a mesh all functions are identities,
so the model also runs as a plain function on one device.

    slice    rows; weights are replicated between slices of a pod, whose network is slow
    data     rows; weights are replicated, gradients summed once a step (over `slice` too)
    fsdp     rows; weights are sharded, gathered layer by layer where they are used
    tensor   heads, MLP and vocabulary; rows are replicated
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

BATCH_AXES = ("slice", "data", "fsdp")
MESH_AXES = (*BATCH_AXES, "tensor")

# Logical axis of a weight -> mesh axis it is sharded over in the learner.
LEARNER_RULES: Mapping[str, str | None] = {
    "layers": None,
    "embed": "fsdp",
    "vocabulary": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "norm": None,
    "rank": None,
}
# The sampler holds whole weights, but for the tensor axis: decoding must not gather them at every token.
SAMPLER_RULES: Mapping[str, str | None] = {**LEARNER_RULES, "embed": None}


@dataclass(frozen=True)
class MeshShape:
    """How many devices work along each axis; `data=-1` takes all that the others leave."""

    data: int = -1
    """Devices that share the rows and hold whole weights; -1: all that remain."""
    fsdp: int = 1
    """Devices that share the rows and the weights."""
    tensor: int = 1
    """Devices that share heads, MLP and vocabulary of the same rows."""
    slice: int = 1
    """Slices (pods joined by a slower network) that share the rows; the axes above are within one."""


def make_mesh(shape: MeshShape = MeshShape(), devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of the given shape over `devices` (default: all).

    Raises:
        ValueError: the shape does not use every device exactly once.
    """
    devices = jax.devices() if devices is None else list(devices)
    inner = shape.slice * shape.fsdp * shape.tensor
    if min(shape.slice, shape.fsdp, shape.tensor) < 1 or (shape.data != -1 and shape.data < 1):
        raise ValueError(f"mesh: sizes must be positive (data may be -1), got {shape}")
    data = len(devices) // inner if shape.data == -1 else shape.data
    if data * inner != len(devices) or data == 0:
        slices = f"slice x data x fsdp x tensor = {shape.slice} x" if shape.slice > 1 else "data x fsdp x tensor ="
        raise ValueError(
            f"mesh: {slices} {shape.data} x {shape.fsdp} x {shape.tensor} does not use each of the "
            f"{len(devices)} devices once; choose sizes whose product is {len(devices)}"
        )
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    if num_slices > 1 and shape.slice != num_slices:
        raise ValueError(f"mesh: {num_slices} slices of devices need mesh.slice={num_slices}, not {shape.slice}")
    within = (1, data, shape.fsdp, shape.tensor)
    if num_slices == 1:  # `slice` is then an axis like any other
        sizes = (shape.slice, *within[1:])
        return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)
    across = (num_slices, 1, 1, 1)
    grid = mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def split_devices(devices: Sequence[jax.Device], num_last: int) -> tuple[list[jax.Device], list[jax.Device]]:
    """The devices, and the last `num_last` of them apart, as many of every host; with 0 both have all.

    Raises:
        ValueError: the hosts cannot give as many each and keep some.
    """
    if num_last == 0:
        return list(devices), list(devices)
    by_host: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_host.setdefault(device.process_index, []).append(device)
    of_host, rest = divmod(num_last, len(by_host))
    if rest or of_host >= min(map(len, by_host.values())):
        raise ValueError(
            f"sampler_devices={num_last}: each of the {len(by_host)} hosts must give as many, and keep some of its "
            f"{len(devices) // len(by_host)} for the learner"
        )
    apart = {device for of_one in by_host.values() for device in of_one[-of_host:]}
    return [d for d in devices if d not in apart], [d for d in devices if d in apart]


def platform() -> str:
    """What the program being traced will run on, "cpu", "gpu" or "tpu": the mesh's devices, which may be described
    rather than present, or else this machine's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def num_batch_shards(mesh: Mesh) -> int:
    """Over how many devices the rows of a batch are spread."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def batch_spec(mesh: Mesh, *leading: None) -> PartitionSpec:
    """Rows over the batch axes; `leading` Nones for axes before the rows."""
    axes = tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1)
    return PartitionSpec(*leading, axes) if axes else PartitionSpec()


def weight_spec(logical_axes: Sequence[str], mesh: Mesh, rules: Mapping[str, str | None]) -> PartitionSpec:
    """The partition of a weight with these logical axes; axes of size 1 are left out."""
    mesh_axes = (rules[name] for name in logical_axes)
    return PartitionSpec(*(axis if axis and mesh.shape[axis] > 1 else None for axis in mesh_axes))


def to_global(tree: Any, mesh: Mesh) -> Any:
    """Global arrays sharded by rows from this process's rows (numpy, first axis).

    Every process passes the rows of its own devices, in order.
    """
    sharding = NamedSharding(mesh, batch_spec(mesh))
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, np.asarray(rows)), tree)


def to_local(tree: Any) -> Any:
    """This process's rows of global arrays sharded by rows, as numpy: the inverse of `to_global`."""

    def rows(array: jax.Array) -> np.ndarray:
        if array.is_fully_addressable:
            return np.asarray(array)
        shards = {s.index[0].start or 0: s.data for s in array.addressable_shards}  # replicas share an index
        return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])

    return jax.tree.map(rows, tree)


def gather_over_processes(values: np.ndarray) -> np.ndarray:
    """[processes, ...] host values; every process must call it."""
    values = np.asarray(values)
    return values[None] if jax.process_count() == 1 else multihost_utils.process_allgather(values)


def sum_over_processes(values: np.ndarray) -> np.ndarray:
    """Host values summed over all processes; every process must call it."""
    return np.asarray(gather_over_processes(values).sum(axis=0))


# Collectives, for use inside `shard_map`.


def _varying(value: Array) -> frozenset[str]:
    """The mesh axes along which a value is known to differ."""
    return jax.typeof(value).mat.varying


def _active(*axes: str) -> tuple[str, ...]:
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in axes if axis in mesh.manual_axes and mesh.shape[axis] > 1)


def batch_axes() -> tuple[str, ...]:
    """The active axes that rows are spread over: what a batch statistic is reduced over."""
    return _active(*BATCH_AXES)


def gather_weight(weight: Array, logical_axes: Sequence[str], dtype: DTypeLike) -> Array:
    """A weight as it is multiplied: in the compute dtype, whole along `fsdp`, still sharded over `tensor`.

    It travels in the compute dtype; its gradient is reduce-scattered in the weight's own, float32.
    """
    mesh_axes = [LEARNER_RULES[name] for name in logical_axes]
    # The sampler's weights are whole.
    if not _active("fsdp") or "fsdp" not in mesh_axes or "fsdp" not in _varying(weight):
        return weight.astype(dtype)
    return _gather(mesh_axes.index("fsdp"), jnp.dtype(dtype), weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(axis: int, dtype: jnp.dtype, weight: Array) -> Array:
    return jax.lax.all_gather(weight.astype(dtype), "fsdp", axis=axis, tiled=True)


def _gather_forward(axis: int, dtype: jnp.dtype, weight: Array):
    return _gather(axis, dtype, weight), jnp.zeros((), weight.dtype)


def _gather_backward(axis: int, dtype: jnp.dtype, like: Any, gradient: Array):
    gradient = gradient.astype(like.dtype)
    return (jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=axis, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)


def sum_over_tensor(partial: Array) -> Array:
    """Completes a product whose contracted axis is sharded over `tensor`."""
    return jax.lax.psum(partial, "tensor") if _active("tensor") else partial


def max_over_tensor(partial: Array) -> Array:
    """The maximum over shards of `tensor`; not differentiated."""
    partial = jax.lax.stop_gradient(partial)
    return jax.lax.pmax(partial, "tensor") if _active("tensor") else partial


def max_over_shards(partial: Array) -> Array:
    """The maximum over the devices of a `tensor` group where they hold different parts; not differentiated."""
    return max_over_tensor(partial) if _active("tensor") and "tensor" in _varying(partial) else partial


def gather_over_tensor(part: Array) -> Array:
    """The last axis whole, on every device of a `tensor` group. A sum of disjoint parts rather than a gather,
    so that its type says that the devices agree."""
    if not _active("tensor"):
        return part
    width = part.shape[-1]
    whole = jnp.zeros((*part.shape[:-1], width * jax.lax.axis_size("tensor")), part.dtype)
    offset = (0,) * (part.ndim - 1) + (tensor_index() * width,)
    return jax.lax.psum(jax.lax.dynamic_update_slice(match_variance(whole, part), part, offset), "tensor")


def tensor_index() -> Array | int:
    """Which shard along `tensor` this device holds."""
    return jax.lax.axis_index("tensor") if _active("tensor") else 0


def sum_over_batch(partial: Any) -> Any:
    """A tree of local sums, summed over all rows."""
    axes = batch_axes()
    return jax.tree.map(lambda leaf: jax.lax.psum(leaf, axes), partial) if axes else partial


def vary_over_batch(tree: Any) -> Any:
    """Marks replicated weights as differing between row shards, so that their gradients stay local
    until `reduce_gradients` sums them once, rather than at every use."""

    def vary(leaf: Array) -> Array:
        missing = tuple(axis for axis in batch_axes() if axis not in _varying(leaf))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, tree)


def reduce_gradients(gradients: Any, params: Any) -> Any:
    """Sums gradients over the axes that `vary_over_batch` added to `params`: once an update, all weights at once."""
    leaves, treedef = jax.tree.flatten(gradients)
    added = [tuple(axis for axis in batch_axes() if axis not in _varying(p)) for p in jax.tree.leaves(params)]
    for axes in set(added) - {()}:
        mine = [i for i, of_leaf in enumerate(added) if of_leaf == axes]
        for i, reduced in zip(mine, jax.lax.psum([leaves[i] for i in mine], axes), strict=True):
            leaves[i] = reduced
    return jax.tree.unflatten(treedef, leaves)


def match_variance(value: Array, like: Any) -> Array:
    """`value` marked as varying over the mesh axes that `like`, a tree, varies over (for a scan's first carry)."""
    wanted = frozenset().union(*(_varying(leaf) for leaf in jax.tree.leaves(like)))
    missing = tuple(wanted - _varying(value))
    return jax.lax.pcast(value, missing, to="varying") if missing else value


def sum_as_varied(gradient: Array, like: Array) -> Array:
    """`gradient` summed over the mesh axes that `like`, whose gradient it is, does not vary over."""
    axes = tuple(_varying(gradient) - _varying(like))
    return jax.lax.psum(gradient, axes) if axes else gradient
