"""Operations counted by hand."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from p3o_jax.models.flops import ForwardFlops, forward_flops, training_flops, update_flops
from p3o_jax.models.lora import Lora
from p3o_jax.models.transformer import Transformer, TransformerConfig

MODEL = TransformerConfig(num_layers=3, embed_dim=10, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=7)


def test_by_hand():
    # A token of a layer: query 10x24, key and value 10x12 each, output 24x10, MLP 3 of 10x7; twice the products.
    assert 2 * (240 + 120 + 120 + 240 + 210) == 1860
    # Rows of 5 tokens have 15 causal pairs: a product of 6 in the scores and one in the values, for 4 heads.
    assert 15 * 2 * 2 * 6 * 4 == 1440
    assert forward_flops(MODEL, 11, rows=2, tokens=5) == ForwardFlops(
        layers=3 * 1860 * 2 * 5, attention=3 * 1440 * 2, head=2 * 10 * 11 * 2 * 5
    )


def test_an_update_is_three_forward_passes_and_what_is_recomputed():
    forward = forward_flops(MODEL, 11, 2, 5)
    full = update_flops(replace(MODEL, remat="full"), 11, 2, 5, extra_passes=1)
    assert full == (3 * forward.total, forward.total, forward.total)
    assert update_flops(replace(MODEL, remat="none"), 11, 2, 5).recomputed == forward.head
    assert update_flops(replace(MODEL, remat="dots"), 11, 2, 5).recomputed == forward.attention + forward.head


def test_adapters_by_hand():
    """Of width 10 into queries of 24 and an MLP of 7, at rank 2: 2 * 2 * (10 + 24 + 7 + 10) a token and layer."""
    adapted = replace(MODEL, lora=Lora(rank=2, targets=("query", "down")))
    forward = forward_flops(MODEL, 11, 2, 5)
    adapters = 3 * 2 * 5 * 2 * 2 * (10 + 24 + 7 + 10)
    expected = 2 * (forward.layers + forward.head) + 3 * forward.attention + 3 * adapters
    assert training_flops(adapted, 11, 2, 5) == expected
    assert training_flops(MODEL, 11, 2, 5) == 3 * forward.total


def test_against_the_compiler():
    """XLA counts elementwise operations too, and attention's masked half: with wide matrices both are small."""
    from flax import nnx

    config = TransformerConfig(num_layers=1, embed_dim=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=512)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, 512, nnx.Rngs(0))))

    def forward(state, tokens):
        model = nnx.merge(graphdef, state)
        hidden, _ = model.hidden(tokens, jnp.broadcast_to(jnp.arange(16), tokens.shape))
        return model.logits(hidden)

    compiled = jax.jit(forward).lower(state, jax.ShapeDtypeStruct((2, 16), jnp.int32)).compile()
    ours = forward_flops(config, 512, 2, 16)
    assert compiled.cost_analysis()["flops"] == pytest.approx(ours.total, rel=0.05)
