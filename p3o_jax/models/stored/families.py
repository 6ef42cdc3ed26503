"""Families of published models: their `config.json` as a `TransformerConfig` and back, and their tensors' names.

Llama 2 and 3 (and SmolLM2), Qwen2 and 2.5, Qwen3, Gemma 2, and Gemma 3's text model are one transformer with different
settings. What a family's configuration can ask for and this transformer does not do is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from p3o_jax.models.architecture import TransformerConfig
from p3o_jax.models.stored.published import Published, read_published
from p3o_jax.models.stored.rope_config import read_rope, write_scaling

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class Layout(NamedTuple):
    """How one of this transformer's weights is stored: [outputs, inputs] for [inputs, outputs], axes joined."""

    name: str  # with {layer} where there is one a layer
    num_inputs: int = 0  # leading axes of ours that are its inputs; 0: a vector or a table, stored as it is


_LAYER = {
    "attention_norm": Layout("input_layernorm"),
    "query": Layout("self_attn.q_proj", 1),
    "key": Layout("self_attn.k_proj", 1),
    "value": Layout("self_attn.v_proj", 1),
    "attention_out": Layout("self_attn.o_proj", 2),
    "query_norm": Layout("self_attn.q_norm"),
    "key_norm": Layout("self_attn.k_norm"),
    "mlp_norm": Layout("post_attention_layernorm"),
    "gate": Layout("mlp.gate_proj", 1),
    "up": Layout("mlp.up_proj", 1),
    "down": Layout("mlp.down_proj", 1),
}
_POST_NORMS = {
    "attention_post_norm": Layout("post_attention_layernorm"),
    "mlp_norm": Layout("pre_feedforward_layernorm"),
    "mlp_post_norm": Layout("post_feedforward_layernorm"),
}


def layouts(config: TransformerConfig) -> dict[tuple[str, ...], Layout]:
    """Where every weight of such a model is stored, by its path in the parameters."""
    of_layer = _LAYER | (_POST_NORMS if config.post_norms else {})
    if not config.qk_norm:
        of_layer = {name: layout for name, layout in of_layer.items() if name not in ("query_norm", "key_norm")}
    found: dict[tuple[str, ...], Layout] = {
        ("layers", name): layout._replace(name=f"model.layers.{{layer}}.{layout.name}.weight")
        for name, layout in of_layer.items()
    }
    biased = ("query", "key", "value") * config.attention_bias + ("attention_out",) * config.attention_out_bias
    for name in biased:
        found["layers", f"{name}_bias"] = Layout(f"model.layers.{{layer}}.{_LAYER[name].name}.bias")
    found["embedding",] = Layout("model.embed_tokens.weight")
    found["final_norm",] = Layout("model.norm.weight")
    if not config.tied_embeddings:
        found["head",] = Layout("lm_head.weight")
    return found


def read_config(config: Mapping[str, Any], where: object) -> TransformerConfig:
    """The architecture that a `config.json` describes. `context_tokens` is the longest it was made for.

    Args:
        config: its values; what it leaves out is the default of its family (`published`).
        where: what to call it in an error.

    Raises:
        ValueError: an unknown architecture, a field of the wrong kind, or one whose value this transformer does not do.
    """
    published = read_published(config, where)
    family = published.family
    gemma = family.startswith("gemma")
    name = "hidden_activation" if gemma else "hidden_act"
    activation = published[name]
    if activation not in _ACTIVATIONS:
        raise published.refuse(name, activation)
    width, heads = published["hidden_size"], published["num_attention_heads"]
    head_dim = published["head_dim"] or width // heads
    biased = family == "qwen2" or published["attention_bias"]  # Qwen2's are not a choice
    theta, scaling, sliding_theta = read_rope(published)
    window, sliding = _sliding(published)
    query_scalar = published["query_pre_attn_scalar"]
    return TransformerConfig(
        num_layers=published["num_hidden_layers"],
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=published["num_key_value_heads"] or heads,
        head_dim=head_dim,
        mlp_dim=published["intermediate_size"],
        mlp_activation=_ACTIVATIONS[activation],  # type: ignore[arg-type]
        rope_theta=theta,
        rope_scaling=scaling,
        norm_epsilon=published["rms_norm_eps"],
        norm_offset=gemma,
        post_norms=gemma,
        qk_norm=family in ("qwen3", "gemma3_text"),
        attention_bias=biased,
        attention_out_bias=biased and family != "qwen2",
        query_scale=None if query_scalar in (None, head_dim) else query_scalar**-0.5,
        attention_softcap=published["attn_logit_softcapping"],
        sliding_window=window,
        sliding_layers=sliding,
        sliding_rope_theta=sliding_theta,
        tied_embeddings=published["tie_word_embeddings"],
        embedding_scale=width**0.5 if gemma else 1.0,
        logit_softcap=published["final_logit_softcapping"],
        context_tokens=published["max_position_embeddings"],
    )


def _sliding(published: Published) -> tuple[int | None, tuple[int, ...]]:
    """The window, and the layers that have it."""
    family, window, types = published.family, published["sliding_window"], published["layer_types"]
    layers = range(published["num_hidden_layers"])
    if window is None or (family.startswith("qwen") and not published["use_sliding_window"]):
        return None, ()
    if types is not None:
        sliding = [i for i in layers if types[i] == "sliding_attention"]
    elif family.startswith("qwen"):
        sliding = list(layers[published["max_window_layers"] :])
    else:
        every = 2 if family == "gemma2" else published["sliding_window_pattern"]
        sliding = [i for i in layers if (i + 1) % every]
    return (window, tuple(sliding)) if sliding else (None, ())


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def write_config(config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
    """The `config.json` of the family that such a model belongs to: the inverse of `read_config`.

    Raises:
        ValueError: no family has these settings.
    """
    c = config
    if c.post_norms:
        family = "gemma3_text" if c.qk_norm else "gemma2"
    else:
        family = "qwen3" if c.qk_norm else "qwen2" if c.attention_bias and not c.attention_out_bias else "llama"
    theirs = {ours: name for name, ours in _ACTIVATIONS.items()}[c.mlp_activation]
    values: dict[str, Any] = {
        "model_type": family,
        "architectures": [_ARCHITECTURES[family]],
        "vocab_size": vocab_size,
        "hidden_size": c.embed_dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.mlp_dim,
        "hidden_act": theirs,
        "hidden_activation": theirs,
        "rms_norm_eps": c.norm_epsilon,
        "attention_bias": c.attention_bias,
        "tie_word_embeddings": c.tied_embeddings,
        "max_position_embeddings": c.context_tokens,
        "rope_theta": c.rope_theta,
    }
    if c.rope_scaling is not None:
        values["rope_scaling"] = write_scaling(c.rope_scaling)
    if family.startswith("gemma"):
        scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale
        scalar = scale**-2
        values |= {
            "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
            "final_logit_softcapping": c.logit_softcap,
            "attn_logit_softcapping": c.attention_softcap,
        }
    if family != "llama":
        values["sliding_window"] = c.sliding_window
        values["layer_types"] = [
            "sliding_attention" if i in c.sliding_layers else "full_attention" for i in range(c.num_layers)
        ]
    if family.startswith("qwen"):
        values["use_sliding_window"] = bool(c.sliding_layers)
    if c.sliding_rope_theta is not None:
        values["rope_local_base_freq"] = c.sliding_rope_theta
    again = read_config(values, "export")
    if again != _architecture(c):
        differing = [name for name in vars(c) if getattr(again, name) != getattr(_architecture(c), name)]
        raise ValueError(f"no published family has this architecture: {family} differs in {', '.join(differing)}")
    return values


def _architecture(config: TransformerConfig) -> TransformerConfig:
    """Without what is the run's own."""
    return adapted(config, TransformerConfig(context_tokens=config.context_tokens))


def adapted(architecture: TransformerConfig, wishes: TransformerConfig) -> TransformerConfig:
    """A stored model's architecture with a run's dtype, remat, adapters and context, as far as the model's goes."""
    return replace(
        architecture,
        dtype=wishes.dtype,
        remat=wishes.remat,
        lora=wishes.lora,
        context_tokens=min(wishes.context_tokens, architecture.context_tokens),
    )
