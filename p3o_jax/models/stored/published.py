"""What is read of a `config.json`: every field's kind and range, and the default of its family's published class.

Published files leave out what is their family's default, so that a field that is not there has the default of the
class that wrote the file. These were compared with the configuration classes of transformers 4.57.3 and 5.25.0, which
agree: LlamaConfig, Qwen2Config, Qwen3Config, Gemma2Config, Gemma3TextConfig. `null` is a value too: it is taken where
the class takes it, and refused elsewhere. Fields that are not in the table are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p3o_jax.inputs.errors import shown
from p3o_jax.inputs.kinds import Kind, ListOf, Maybe, OneOf, Real, Whole, checked, flag, table, text

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text")
"""The `model_type` of what can be read; gemma3, whose text model is one part, is read as gemma3_text."""

LAYERS, WIDTH, CONTEXT = Whole(1, 4096), Whole(1, 2**24), Whole(1, 2**31 - 1)
"""Ten times and more of what any model has: enough to refuse a size that would only run out of memory later."""
THETA, POSITIVE, EPSILON = Real(1.001, 1e18), Real(1e-6, 1e9), Real(0, 1)
_TYPES = ListOf(OneOf(("full_attention", "sliding_attention")), "types of layers")

_KINDS: dict[str, Kind] = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": WIDTH,
    "num_key_value_heads": WIDTH,
    "head_dim": WIDTH,
    "hidden_act": text,
    "hidden_activation": text,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": EPSILON,
    "attention_bias": flag,
    "tie_word_embeddings": flag,
    "rope_theta": THETA,
    "rope_local_base_freq": THETA,
    "rope_scaling": Maybe(table),
    "rope_parameters": Maybe(table),
    "sliding_window": Maybe(CONTEXT),
    "use_sliding_window": flag,
    "max_window_layers": Whole(0, 2**31 - 1),
    "sliding_window_pattern": LAYERS,
    "layer_types": Maybe(_TYPES),
    "query_pre_attn_scalar": POSITIVE,
    "attn_logit_softcapping": Maybe(POSITIVE),
    "final_logit_softcapping": Maybe(POSITIVE),
    "vocab_size": Maybe(Whole(1, 2**31 - 1)),  # what is left out, the embedding says
}
_EVERY = {
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "vocab_size": None,
}
_LLAMA = _EVERY | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_key_value_heads": None,  # as many as heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "attention_bias": False,
}
_QWEN2 = _EVERY | {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "head_dim": None,  # not a field of Qwen2Config, but its model reads it
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA2 = _EVERY | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256.0,
    "sliding_window": 4096,
    "layer_types": None,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 | {"head_dim": 128, "attention_bias": False},
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2
    | {
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
}
_NULL_TOO = {
    "llama": ("num_key_value_heads", "head_dim"),
    "qwen2": ("num_key_value_heads", "head_dim"),
    "qwen3": ("num_key_value_heads",),
    "gemma2": (),
    "gemma3_text": (),
}
"""Where the class takes null besides the kinds that are `Maybe` everywhere."""
_ENDS = {"llama": 2, "gemma2": 1, "gemma3_text": 1}

_NOT_DONE: dict[str, tuple[Any, ...]] = {
    # With the values, besides null, false and leaving it out, at which it asks for nothing.
    "mlp_bias": (),
    "use_bidirectional_attention": (),
    "quantization_config": (),
    "partial_rotary_factor": (1.0,),
}


@dataclass(frozen=True)
class Published:
    """A text model's configuration, checked and complete."""

    family: str
    where: str
    """The file, for errors."""
    values: Mapping[str, Any]
    """Every field that the family has."""

    def __getitem__(self, name: str) -> Any:
        """A field; None if its family has none of this name."""
        return self.values.get(name)

    def refuse(self, name: str, value: Any) -> ValueError:
        """The error that something is asked for which this transformer does not do."""
        return ValueError(f"{self.where} asks for {name}={shown(value)}, which is not implemented")


def read_published(config: Mapping[str, Any], where: object) -> Published:
    """A `config.json` of a family that can be read, with its family's defaults.

    Args:
        config: its values.
        where: the model, for errors.

    Raises:
        ValueError: an unknown architecture, a value of the wrong kind or out of range, or something not implemented.
    """
    file = f"{where}: config.json"
    values = text_config(config, file)
    family = values.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{where}: model_type {shown(family)} is not one that can be read: {', '.join(FAMILIES)}, gemma3"
        )
    found = {}
    for name, default in _DEFAULTS[family].items():
        kind = Maybe(_KINDS[name]) if name in _NULL_TOO[family] else _KINDS[name]
        found[name] = checked(values[name], kind, file, name) if name in values else default
    published = Published(family, file, found)
    for name, nothing in _NOT_DONE.items():
        value = values.get(name)
        if not (value is None or value is False or (not isinstance(value, bool) and value in nothing)):
            raise published.refuse(name, value)
    if family == "gemma3_text" and found["attn_logit_softcapping"] is not None:
        raise published.refuse("attn_logit_softcapping", found["attn_logit_softcapping"])
    _check_together(published)
    return published


def _check_together(published: Published) -> None:
    """What one field alone does not show."""
    heads, key_heads = published["num_attention_heads"], published["num_key_value_heads"] or 1
    if heads % key_heads:
        raise ValueError(f"{published.where}: num_key_value_heads is {key_heads}, which does not divide {heads} heads")
    width, head_dim = published["hidden_size"], published["head_dim"]
    if head_dim is None and width % heads:
        raise ValueError(f"{published.where} has no head_dim, and {heads} heads do not divide hidden_size {width}")
    if (head_dim or width // heads) % 2:
        raise ValueError(f"{published.where}: head_dim is {head_dim or width // heads}, which is odd: RoPE needs pairs")
    types, layers = published["layer_types"], published["num_hidden_layers"]
    if types is not None and len(types) != layers:
        raise ValueError(f"{published.where}: layer_types has {len(types)} entries, but there are {layers} layers")


def text_config(config: Mapping[str, Any], file: str = "config.json") -> dict[str, Any]:
    """The configuration of the text model: of a multimodal Gemma 3, the part that is one.

    Raises:
        ValueError: that part is no object, or contradicts the whole.
    """
    if config.get("model_type") != "gemma3":
        return dict(config)
    part = checked(config.get("text_config"), Maybe(table), file, "text_config") or {}
    outer = {name: config[name] for name in ("tie_word_embeddings", "quantization_config") if name in config}
    tied = outer.get("tie_word_embeddings", part.get("tie_word_embeddings"))
    if "tie_word_embeddings" in part and part["tie_word_embeddings"] != tied and tied is not None:
        raise ValueError(f"{file}: tie_word_embeddings is {shown(tied)}, but another in its text_config")
    if outer.get("tie_word_embeddings", True) is None:  # Gemma3Config takes it, and means its default
        del outer["tie_word_embeddings"]
    return {**outer, **part, "model_type": "gemma3_text"}


def end_of_family(config: Mapping[str, Any]) -> int | None:
    """The end of a sequence where neither `config.json` nor a tokenizer names one: the family's class does."""
    values = text_config(config)
    family = values.get("model_type")
    return _ENDS.get(family) if isinstance(family, str) and "eos_token_id" not in values else None
