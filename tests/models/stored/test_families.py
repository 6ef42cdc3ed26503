"""Models of every family against `transformers`, whose float32 logits are stored: whole, ragged, and token by token."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from p3o_jax.devices.sharding import make_mesh
from p3o_jax.models.log_probs import token_log_probs
from p3o_jax.models.rope import LinearRope, Llama3Rope, YarnRope
from p3o_jax.models.stored.families import adapted, read_config, write_config
from p3o_jax.models.stored.load import load_params
from p3o_jax.models.stored.pretrained import open_model
from p3o_jax.models.transformer import KVCache, Transformer, TransformerConfig, abstract_model

DATA = Path(__file__).parents[2] / "data" / "models"
FAMILIES = ("llama", "llama3", "qwen2", "qwen3", "gemma2", "gemma3")
VOCAB = 64


@cache
def golden(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    stored = np.load(DATA / name / "golden.npz")
    return stored["tokens"], stored["lengths"], stored["logits"]


@cache
def model(name: str) -> Transformer:
    stored = open_model(str(DATA / name))
    config = read_config(stored.config, name)
    params = load_params(stored, config, make_mesh(devices=jax.devices()[:1]))
    return nnx.merge(abstract_model(config, VOCAB)[0], params)


@jax.jit
def whole(model, tokens):
    """Logits, the cache, and the log-probs of the next tokens as the learner computes them."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, cache = model.hidden(tokens, positions)
    targets, ones = jnp.roll(tokens, -1, 1), jnp.ones(tokens.shape)
    head, softcap = model.output_weights(), model.config.logit_softcap
    log_probs = token_log_probs(hidden, head, targets, ones, softcap=softcap, chunk_tokens=16)[0]
    return model.logits(hidden), cache, log_probs


@jax.jit
def decode(model, tokens, positions, cache):
    hidden, cache = model.decode(tokens, positions, cache)
    return model.logits(hidden), cache


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_ragged_rows_equal_transformers(name):
    """What stands behind a row's end is another token in every row, which must not matter."""
    tokens, lengths, expected = golden(name)
    logits, _, log_probs = whole(model(name), jnp.asarray(tokens))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row, :length], expected[row, :length], atol=1e-4, rtol=0)
    normalised = np.take_along_axis(np.asarray(jax.nn.log_softmax(expected[0, :-1])), tokens[0, 1:, None], -1)[:, 0]
    np.testing.assert_allclose(log_probs[0, :-1], normalised, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_decoding_after_a_prefill_equals_transformers(name):
    """Each row at a position of its own; slots that are not filled yet hold what would show."""
    tokens, lengths, expected = golden(name)
    prompt = jnp.asarray(tokens[:, :12])
    _, cache, _ = whole(model(name), prompt)
    room = ((0, 0), (0, 0), (0, 0), (0, tokens.shape[1] - 12), (0, 0))
    cache = KVCache(*(jnp.pad(part, room, constant_values=1e3) for part in (cache.keys, cache.values)))
    at = np.array([12, 9, 4])
    for _ in range(12):
        logits, cache = decode(model(name), jnp.asarray(tokens[np.arange(3), at]), jnp.asarray(at, jnp.int32), cache)
        for row in range(3):
            if at[row] < lengths[row]:
                np.testing.assert_allclose(logits[row], expected[row, at[row]], atol=1e-4, rtol=0)
        at = at + (at + 1 < lengths)


@pytest.mark.long
def test_every_setting_matters():
    """A golden model whose settings did not show in its logits would test nothing."""
    changes = {
        "llama": [{"norm_epsilon": 0.1}, {"rope_theta": 100.0}],
        "llama3": [{"rope_scaling": None}],
        "qwen2": [
            {"sliding_layers": ()}, {"rope_scaling": None}, {"rope_scaling": YarnRope(4.0, 16, attention_factor=1.0)},
        ],
        "qwen3": [{"rope_scaling": None}],
        "gemma2": [
            {"sliding_layers": (0, 1)}, {"attention_softcap": None}, {"logit_softcap": None}, {"query_scale": None},
            {"mlp_activation": "silu"}, {"embedding_scale": 1.0}, {"norm_offset": False},
        ],
        "gemma3": [{"sliding_rope_theta": None}, {"sliding_window": 8}, {"rope_scaling": None}],
    }  # fmt: skip
    for name, of_family in changes.items():
        tokens, _, expected = golden(name)
        for change in of_family:
            params = nnx.state(model(name))
            config = replace(model(name).config, **change)
            logits, *_ = whole(nnx.merge(abstract_model(config, VOCAB)[0], params), jnp.asarray(tokens))
            assert np.abs(logits[0] - expected[0]).max() > 2e-3, (name, change)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_configuration_is_written_as_it_is_read(name):
    config = read_config(json.loads((DATA / name / "config.json").read_text()), name)
    assert read_config(write_config(config, VOCAB), name) == config


PUBLISHED = {
    # The values of config.json as published, and what they must come to.
    "Llama-3.2-1B": (
        {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
         "rope_theta": 500000.0, "tie_word_embeddings": True, "max_position_embeddings": 131072, "hidden_act": "silu",
         "attention_bias": False, "mlp_bias": False, "vocab_size": 128256,
         "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
        {"rope_scaling": Llama3Rope(32.0, 1.0, 4.0, 8192), "tied_embeddings": True, "head_dim": 64},
    ),
    "Qwen2.5-1.5B-Instruct": (
        {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
         "num_attention_heads": 12, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
         "tie_word_embeddings": True, "max_position_embeddings": 32768, "hidden_act": "silu", "sliding_window": 32768,
         "max_window_layers": 21, "use_sliding_window": False, "vocab_size": 151936},
        {"attention_bias": True, "attention_out_bias": False, "sliding_layers": (), "sliding_window": None,
         "head_dim": 128, "qk_norm": False},
    ),
    "Qwen3-4B": (
        {"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
         "rope_theta": 1000000, "tie_word_embeddings": True, "max_position_embeddings": 40960, "hidden_act": "silu",
         "attention_bias": False, "sliding_window": None, "use_sliding_window": False, "rope_scaling": None},
        {"qk_norm": True, "attention_bias": False, "head_dim": 128, "rope_scaling": None},
    ),
    "gemma-2-2b": (
        {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
         "rope_theta": 10000.0, "max_position_embeddings": 8192, "hidden_act": "gelu_pytorch_tanh",
         "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096, "query_pre_attn_scalar": 256,
         "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        {"sliding_layers": (0, 2), "sliding_window": 4096, "attention_softcap": 50.0, "logit_softcap": 30.0,
         "query_scale": None, "tied_embeddings": True, "embedding_scale": 48.0, "norm_offset": True},
    ),
    "gemma-3-4b": (
        {"model_type": "gemma3", "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 12, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024, "sliding_window_pattern": 6,
            "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 256,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "max_position_embeddings": 131072}},
        {"sliding_layers": (0, 1, 2, 3, 4, 6, 7, 8, 9, 10), "rope_scaling": LinearRope(8.0), "rope_theta": 1e6,
         "sliding_rope_theta": 1e4, "qk_norm": True, "post_norms": True, "logit_softcap": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name):
    values, expected = PUBLISHED[name]
    config = read_config(values, name)
    assert {field: getattr(config, field) for field in expected} == expected
    assert read_config(write_config(config, 100), name) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "has no low_freq_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_what_is_not_implemented_is_named(change, message):
    with pytest.raises(ValueError, match=rf"^here: .*{message}"):
        read_config({**PUBLISHED["Llama-3.2-1B"][0], **change}, "here")


def test_a_run_keeps_its_own_settings():
    architecture = read_config(PUBLISHED["Qwen3-4B"][0], "here")
    wishes = TransformerConfig(dtype="bfloat16", remat="dots", context_tokens=512, num_layers=7)
    config = adapted(architecture, wishes)
    assert (config.dtype, config.remat, config.context_tokens, config.num_layers) == ("bfloat16", "dots", 512, 36)
    assert adapted(architecture, replace(wishes, context_tokens=10**6)).context_tokens == 40960


def test_an_architecture_of_no_family_is_refused():
    with pytest.raises(ValueError, match=r"no published family .*: llama differs in attention_softcap, logit_softcap"):
        write_config(TransformerConfig(logit_softcap=30.0, attention_softcap=2.0), VOCAB)
