"""Counting collectives in compiled programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from p3o_jax.devices.hlo import Collective, collectives
from p3o_jax.devices.sharding import MeshShape, make_mesh

# As TPU writes it: layouts, no trip count, a fused reduce-scatter, an asynchronous gather.
TPU_TEXT = """HloModule jit_f, is_scheduled=true

%region_1 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}

%all-reduce-scatter.3 (input: f32[2560,9728]) -> f32[160,9728] {
  %input = f32[2560,9728]{1,0:T(8,128)} parameter(0)
  %all-reduce.9 = f32[2560,9728]{1,0:T(8,128)} all-reduce(%input), channel_id=9, to_apply=%region_1
  ROOT %slice.1 = f32[160,9728]{1,0:T(8,128)} slice(%all-reduce.9), slice={[0:160], [0:9728]}
}

%condition (p: (s32[], bf16[8,16])) -> pred[] {
  %constant.4 = s32[]{:T(128)} constant(36)
  %p = (s32[]{:T(128)}, bf16[8,16]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%i, %constant.4), direction=LT
}

%body (p.1: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %p.1 = (s32[]{:T(128)}, bf16[8,16]{1,0:T(8,128)(2,1)}) parameter(0)
  %w = bf16[8,16]{1,0:T(8,128)(2,1)} get-tuple-element(%p.1), index=1
  %ag = (bf16[8,16]{1,0:T(8,128)(2,1)}, bf16[64,16]{1,0:T(8,128)(2,1)}) all-gather-start(%w), dimensions={0}
  %agd = bf16[64,16]{1,0:T(8,128)(2,1)} all-gather-done(%ag)
  ROOT %t = (s32[], bf16[8,16]) tuple(%i, %w)
}

ENTRY %main (x: f32[2560,9728]) -> f32[160,9728] {
  %x = f32[2560,9728]{1,0:T(8,128)} parameter(0)
  %init = (s32[]{:T(128)}, bf16[8,16]{1,0:T(8,128)(2,1)}) tuple(%zero, %start)
  %while.1 = (s32[]{:T(128)}, bf16[8,16]{1,0:T(8,128)(2,1)}) while(%init), condition=%condition, body=%body
  %pmax.1 = f32[]{:T(128)} all-reduce(%m), channel_id=1, to_apply=%region_1, metadata={op_name="jit(f)/pmax"}
  ROOT %out = f32[160,9728]{1,0:T(8,128)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3
}
"""


def test_tpu_text():
    assert collectives(TPU_TEXT) == [
        Collective("reduce-scatter", 2560 * 9728 * 4, 1, ""),  # what is reduced, not the part that is kept
        Collective("all-gather", 64 * 16 * 2, 36, ""),  # what is gathered, once a layer
        Collective("all-reduce", 4, 1, "jit(f)/pmax"),
    ]


@pytest.mark.parametrize("length", [1, 5])
def test_a_compiled_loop_counts_as_often_as_it_runs(length):
    mesh = make_mesh(MeshShape(data=4, fsdp=2))

    def local(weights, x):
        def layer(x, weight):
            return jnp.tanh(x @ jax.lax.all_gather(weight, "fsdp", axis=0, tiled=True)), None

        out, _ = jax.lax.scan(layer, x, weights)
        return jax.lax.psum(out.sum(), ("data", "fsdp"))

    run = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "fsdp"), P(("data", "fsdp"))), out_specs=P())
    shapes = jax.ShapeDtypeStruct((length, 6, 6), jnp.float32), jax.ShapeDtypeStruct((8, 6), jnp.float32)
    found = collectives(jax.jit(run).lower(*shapes).compile().as_text())
    gathers = [each for each in found if each.kind == "all-gather"]
    assert sum(each.executions for each in gathers) == length
    assert {each.size_bytes for each in gathers} == {6 * 6 * 4}
    (reduction,) = [each for each in found if each.kind == "all-reduce"]
    assert (reduction.size_bytes, reduction.executions) == (4, 1)
