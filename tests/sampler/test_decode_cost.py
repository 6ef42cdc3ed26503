"""What a decoded token costs, read from the compiled program: no copy of the cache, and no more of it than is used."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from p3o_jax.devices import hlo, sharding
from p3o_jax.devices.precision import Precision
from p3o_jax.devices.sharding import MeshShape, make_mesh, to_global
from p3o_jax.forecast.programs import topology
from p3o_jax.models.kv_cache import KVCache, slot_buckets
from p3o_jax.models.transformer import Transformer, TransformerConfig
from p3o_jax.sampler import AS_THEY_ARE, Sampler, SamplingLimits
from p3o_jax.sampler.decode import Options

CONFIG = TransformerConfig(num_layers=3, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64)
SLOTS, TOKENS = 5, 16 + 1000  # odd numbers, so that nothing else has the size of the cache
OF_LAYER = SLOTS * CONFIG.num_kv_heads * TOKENS * CONFIG.head_dim * 4
"""Bytes of a layer's keys, or values."""


@pytest.mark.long
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_no_token_copies_the_cache(platform, monkeypatch):
    """With slots that are refilled: the cache is there once and written in place.

    On CPU layers are unstacked, and no weight is copied either, nor more of the cache than is read; for the others
    layers are a scan, whose slices XLA for CPU, which compiles it here, does copy.
    """
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    limits = SamplingLimits(16, TOKENS - 16, eos_ids=(0,), slots=SLOTS)
    mesh = make_mesh(devices=jax.devices()[:1])
    sampler = Sampler(CONFIG, 40, limits, Precision(), mesh)
    requests, truncation = sampler.requests([[1] * 16] * SLOTS, range(SLOTS), AS_THEY_ARE)
    arguments = (sampler.abstract_weights(), to_global(requests, mesh), jax.random.key(0))
    compiled = sampler.program.lower(*arguments, options=Options(2, False, truncation, None)).compile()
    decoding = hlo.instructions_in_open_loops(compiled.as_text())
    of_cache = [each.name for each in decoding if each.size_bytes in (OF_LAYER, CONFIG.num_layers * OF_LAYER)]
    assert "dynamic-update-slice" in of_cache  # a slot is refilled
    assert "copy" not in of_cache
    assert compiled.memory_analysis().temp_size_in_bytes < 1.6 * 2 * CONFIG.num_layers * OF_LAYER
    read = {each.size_bytes for each in decoding if each.name in ("slice", "dynamic-slice")}
    prefixes = {OF_LAYER * slots // TOKENS for slots in slot_buckets(TOKENS)}
    assert prefixes - {OF_LAYER} <= read
    weight = CONFIG.embed_dim * CONFIG.mlp_dim * 4
    assert (weight in read) == (OF_LAYER in read) == (platform == "tpu")


def test_attention_reads_the_slots_that_are_used():
    """A bucket holds the row it is for: the last position but one takes the smaller bucket, the next the larger."""
    assert slot_buckets(1016) == [256, 512, 1016]
    assert slot_buckets(256) == [256]
    assert slot_buckets(40) == [40]
    model = Transformer(CONFIG, 40, nnx.Rngs(0))
    heads = (CONFIG.num_layers, 1, CONFIG.num_kv_heads, 300, CONFIG.head_dim)
    poison = jnp.where(jnp.arange(300)[:, None] < 255, 0.1, jnp.nan) * jnp.ones(heads, jnp.float32)
    decode = jax.jit(lambda model, position: model.decode(jnp.array([1]), position, KVCache(poison, poison))[0])
    # Of 256 slots the last is the token's own; the next token's are all 300, of which the poisoned ones are read.
    assert bool(jnp.isfinite(decode(model, jnp.array([255]))).all())
    assert not bool(jnp.isfinite(decode(model, jnp.array([256]))).all())


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu")
def test_no_token_copies_the_cache_on_a_tpu():
    """XLA for TPU chooses layouts, and copies where a write and a read want different ones: they want the same."""
    mesh = make_mesh(MeshShape(data=2, tensor=2), topology("v5e:2x2"))
    config = TransformerConfig(num_layers=2, embed_dim=512, num_heads=8, num_kv_heads=4, head_dim=128, mlp_dim=1024)
    slots, tokens = 32, 1024
    limits = SamplingLimits(128, tokens - 128, eos_ids=(0,), slots=slots)
    sampler = Sampler(config, 1024, limits, Precision("bfloat16", "bfloat16", "bfloat16"), mesh)
    request, truncation = sampler.requests([[1] * 128], [0], AS_THEY_ARE)
    place = NamedSharding(mesh, sharding.batch_spec(mesh))
    requests = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((16, *leaf.shape[1:]), leaf.dtype, sharding=place), request
    )
    arguments = (sampler.abstract_weights(), requests, jax.eval_shape(lambda: jax.random.key(0)))
    compiled = sampler.program.lower(*arguments, options=Options(4, False, truncation, None)).compile()
    cache = config.num_layers * slots // 2 * config.num_kv_heads // 2 * tokens * config.head_dim * 2
    decoding = hlo.instructions_in_open_loops(compiled.as_text())
    assert "scatter" in [each.name for each in decoding if each.size_bytes == cache]
    assert not [each for each in decoding if each.name == "copy" and each.size_bytes >= cache // config.num_layers]
