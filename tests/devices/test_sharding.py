"""The mesh and what crosses it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from p3o_jax.devices import sharding
from p3o_jax.devices.sharding import LEARNER_RULES, SAMPLER_RULES, MeshShape, make_mesh


def test_data_takes_what_the_others_leave():
    assert tuple(make_mesh(MeshShape(tensor=2)).shape.items())[1:] == (("data", 4), ("fsdp", 1), ("tensor", 2))
    assert make_mesh(MeshShape(fsdp=2), jax.devices()[:2]).shape["data"] == 1


@pytest.mark.parametrize(
    "shape", [MeshShape(data=3), MeshShape(tensor=3), MeshShape(data=2, fsdp=2), MeshShape(fsdp=16)]
)
def test_a_mesh_that_does_not_use_every_device_once_is_refused(shape):
    with pytest.raises(ValueError, match="does not use each of the 8 devices once; choose sizes whose product is 8"):
        make_mesh(shape)


@pytest.mark.parametrize("shape", [MeshShape(data=0), MeshShape(fsdp=0), MeshShape(tensor=-1)])
def test_sizes_must_be_positive(shape):
    with pytest.raises(ValueError, match="must be positive"):
        make_mesh(shape)


def test_axes_of_size_one_are_in_no_spec():
    axes = ("embed", "heads", "head_dim")
    assert sharding.weight_spec(axes, make_mesh(MeshShape(fsdp=2, tensor=2)), LEARNER_RULES) == P(
        "fsdp", "tensor", None
    )
    assert sharding.weight_spec(axes, make_mesh(MeshShape(fsdp=8)), LEARNER_RULES) == P("fsdp", None, None)
    assert sharding.weight_spec(axes, make_mesh(MeshShape(fsdp=4, tensor=2)), SAMPLER_RULES) == P(None, "tensor", None)
    assert sharding.batch_spec(make_mesh(MeshShape(tensor=8))) == P()


def test_rows_go_to_the_mesh_and_come_back():
    rows = {"x": np.arange(48).reshape(16, 3), "y": np.arange(16)}
    mesh = make_mesh(MeshShape(data=2, fsdp=2, tensor=2))
    placed = sharding.to_global(rows, mesh)
    assert len({shard.device for shard in placed["x"].addressable_shards}) == 8
    jax.tree.map(np.testing.assert_array_equal, sharding.to_local(placed), rows)


def test_slices_share_rows_and_hold_whole_weights():
    mesh = make_mesh(MeshShape(slice=2, fsdp=2, tensor=2))
    assert dict(mesh.shape) == {"slice": 2, "data": 1, "fsdp": 2, "tensor": 2}
    assert sharding.batch_spec(mesh) == P(("slice", "fsdp"))
    assert sharding.num_batch_shards(mesh) == 4
    assert sharding.weight_spec(("embed", "heads"), mesh, LEARNER_RULES) == P("fsdp", "tensor")
    with pytest.raises(ValueError, match="slice x data x fsdp x tensor = 3 x"):
        make_mesh(MeshShape(slice=3))
