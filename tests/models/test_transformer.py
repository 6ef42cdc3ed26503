"""The model against an independent float64 implementation, and its invariances."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from p3o_jax.models.transformer import Transformer, TransformerConfig, abstract_model

VOCAB = 11
CONFIGS = {
    "llama": TransformerConfig(num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=24),
    "qwen2.5": TransformerConfig(
        num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=1, head_dim=4, mlp_dim=24,
        attention_bias=True, tied_embeddings=True, rope_theta=1e6,
    ),
    "qwen3": TransformerConfig(
        num_layers=3, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=24, qk_norm=True
    ),
}  # fmt: skip


def build(config: TransformerConfig) -> tuple[Transformer, dict]:
    """A model with nothing at its trivial initial value (norms, biases), and its parameters."""
    model = Transformer(config, VOCAB, nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    state = jax.tree.unflatten(treedef, leaves)
    return nnx.merge(graphdef, state), nnx.to_pure_dict(state)


def float64_logits(config: TransformerConfig, params: dict, tokens: np.ndarray) -> np.ndarray:
    """The architecture written again, one row and one head at a time, in numpy float64."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * scale

    def rotate(x):  # [T, H]: pairs (i, i + H/2) as complex numbers
        half = config.head_dim // 2
        angle = np.arange(len(x))[:, None] * config.rope_theta ** (-np.arange(half) / half)
        z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], axis=-1)

    x = params["embedding"][tokens]
    for index in range(config.num_layers):
        w = {name: value[index] for name, value in params["layers"].items()}
        normed = norm(x, w["attention_norm"])
        attended = np.zeros_like(x)
        for head in range(config.num_heads):
            shared = head // (config.num_heads // config.num_kv_heads)
            q, k, v = (normed @ w[n][:, h] for n, h in (("query", head), ("key", shared), ("value", shared)))
            if config.attention_bias:
                q, k, v = q + w["query_bias"][head], k + w["key_bias"][shared], v + w["value_bias"][shared]
            if config.qk_norm:
                q, k = norm(q, w["query_norm"]), norm(k, w["key_norm"])
            scores = rotate(q) @ rotate(k).T / np.sqrt(config.head_dim)
            scores = np.where(np.tril(np.ones_like(scores)) > 0, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            attended += weights / weights.sum(-1, keepdims=True) @ v @ w["attention_out"][head]
        x = x + attended
        normed = norm(x, w["mlp_norm"])
        gate = normed @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ w["up"])) @ w["down"]
    return norm(x, params["final_norm"]) @ params["embedding" if config.tied_embeddings else "head"].T


@jax.jit
def forward(model, tokens, positions, segment_ids=None):
    """Hidden states, cache and logits."""
    hidden, cache = model.hidden(tokens, positions, segment_ids)
    return hidden, cache, model.logits(hidden)


def arange_positions(tokens):
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_float64(name):
    model, params = build(CONFIGS[name])
    tokens = jax.random.randint(jax.random.key(2), (3, 9), 0, VOCAB)
    _, _, logits = forward(model, tokens, arange_positions(tokens))
    expected = np.stack([float64_logits(CONFIGS[name], params, np.asarray(row)) for row in tokens])
    np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("unstacked", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_then_decode_equals_the_whole_sequence(name, unstacked):
    """Rows of different lengths in one cache, each decoding at its own position."""
    model, _ = build(CONFIGS[name])
    tokens = jax.random.randint(jax.random.key(2), (2, 10), 0, VOCAB)
    whole, *_ = forward(model, tokens, arange_positions(tokens))
    lengths = jnp.array([3, 5])
    prompt = jnp.where(jnp.arange(5) < lengths[:, None], tokens[:, :5], VOCAB - 1)  # other tokens behind the prompt
    _, cache, _ = forward(model, prompt, arange_positions(prompt))
    room = ((0, 0), (0, 0), (0, 0), (0, 5), (0, 0))
    cache = jax.tree.map(lambda part: jnp.pad(part, room, constant_values=1e3), cache)
    cache = cache.unstacked() if unstacked else cache

    @jax.jit
    def decode(model, *arguments):
        return model.decode(*arguments, model.unstacked_layers() if unstacked else None)

    for _ in range(4):
        at = lengths[:, None]
        hidden, cache = decode(model, jnp.take_along_axis(tokens, at, 1)[:, 0], lengths, cache)
        expected = jnp.take_along_axis(whole, at[..., None], axis=1)[:, 0]
        np.testing.assert_allclose(hidden, expected, atol=1e-5)
        lengths = lengths + 1


def test_nothing_depends_on_later_tokens():
    model, _ = build(CONFIGS["llama"])
    tokens = jax.random.randint(jax.random.key(2), (1, 8), 0, VOCAB)
    changed = tokens.at[0, 5:].set((tokens[0, 5:] + 1) % VOCAB)
    before, after = (forward(model, t, arange_positions(t))[0] for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert jnp.abs(before[:, 5:] - after[:, 5:]).min(axis=-1).max() > 0


def test_packed_sequences_do_not_see_each_other():
    model, _ = build(CONFIGS["qwen3"])
    tokens = jax.random.randint(jax.random.key(2), (1, 9), 0, VOCAB)
    positions = jnp.array([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    segments = jnp.array([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    packed, *_ = forward(model, tokens, positions, segments)
    alone = [forward(model, part, arange_positions(part))[0] for part in (tokens[:, :4], tokens[:, 4:])]
    np.testing.assert_allclose(packed, jnp.concatenate(alone, axis=1), atol=1e-5)
    unsegmented, *_ = forward(model, tokens, positions)
    assert jnp.abs(unsegmented - packed).max() > 1e-2


def test_abstract_model_allocates_nothing_and_names_every_axis():
    _, abstract = abstract_model(CONFIGS["qwen2.5"], VOCAB)
    for leaf in jax.tree.leaves(abstract):
        assert isinstance(leaf, jax.ShapeDtypeStruct)
    for param in jax.tree.leaves(abstract, is_leaf=lambda node: isinstance(node, nnx.Variable)):
        assert len(param.get_metadata()["logical_axes"]) == len(param.get_value().shape)


def test_bfloat16_compute_keeps_float32_logits():
    config = TransformerConfig(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, dtype="bfloat16")
    model = Transformer(config, VOCAB, nnx.Rngs(0))
    tokens = jnp.zeros((1, 4), jnp.int32)
    hidden, _, logits = jax.eval_shape(forward, model, tokens, arange_positions(tokens))
    assert hidden.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32


def test_what_the_backward_pass_recomputes_trades_memory_and_changes_no_gradient():
    base = TransformerConfig(num_layers=4, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=64)
    tokens = jax.random.randint(jax.random.key(2), (4, 64), 0, VOCAB)
    params = nnx.state(Transformer(base, VOCAB, nnx.Rngs(0)))
    memory, gradients = {}, {}
    for remat in ("full", "dots", "none"):
        config = replace(base, remat=remat)

        def loss(params, config=config):
            model = nnx.merge(abstract_model(config, VOCAB)[0], params)
            hidden, _ = model.hidden(tokens, arange_positions(tokens))
            return (jnp.cos(jnp.arange(hidden.size, dtype=jnp.float32)).reshape(hidden.shape) * hidden).sum()

        compiled = jax.jit(jax.grad(loss)).lower(params).compile()
        memory[remat] = compiled.memory_analysis().temp_size_in_bytes
        gradients[remat] = compiled(params)
    assert memory["full"] < 0.8 * memory["dots"] < 0.64 * memory["none"]
    for remat in ("dots", "none"):
        for a, b in zip(*map(jax.tree.leaves, (gradients[remat], gradients["full"])), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"remat": "some"}, "remat"),
        ({"dtype": "int8"}, "dtype"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"num_layers": 0}, "num_layers"),
    ],
)
def test_impossible_architectures_are_refused_by_field(changes, field):
    with pytest.raises(ValueError, match=f"model.{field}"):
        TransformerConfig(**changes)
