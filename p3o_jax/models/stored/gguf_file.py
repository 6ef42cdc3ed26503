"""Models in one GGUF file, float or quantised (github.com/ggml-org/ggml, docs/gguf.md), read by the `gguf` package.

What llama.cpp's converter changes is changed back, so that a file's tensors are those of the Hugging Face model:
Llama's query and key rows, which it interleaves for its own RoPE, and Gemma's norms, to which it adds 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from p3o_jax.inputs.errors import one_line, refused, shown
from p3o_jax.inputs.kinds import Kind, checked, text
from p3o_jax.models.stored.contents import StoredModel, StoredTensor
from p3o_jax.models.stored.gguf_header import check_header
from p3o_jax.models.stored.published import CONTEXT, EPSILON, LAYERS, POSITIVE, THETA, WIDTH
from p3o_jax.tokenizers.gguf import tokenizer_source

_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
Undo = Callable[[np.ndarray], np.ndarray]
_LLAMA3_FREQUENCIES = "rope_freqs.weight"


def open_gguf(path: Path) -> StoredModel:
    """The model in a GGUF file.

    Raises:
        ImportError: the `gguf` package is not installed.
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or of an architecture that is not read.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError(f"{error}: GGUF files need: pip install 'p3o_jax[models]'") from error
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    with refused(f"{path} is truncated or is not a GGUF file (fetch it again)"):
        check_header(path)
        reader = gguf.GGUFReader(path)
        data = {name: field.contents() for name, field in reader.fields.items()}
    config, size = _config(data, path), path.stat().st_size
    tensors = {}
    for tensor in reader.tensors:
        if tensor.name == _LLAMA3_FREQUENCIES:
            config["rope_scaling"] = _llama3_scaling(tensor.data, config, path)
            continue
        if tensor.data_offset + tensor.n_bytes > size:
            raise ValueError(f"{path} is truncated: tensor {one_line(tensor.name, 80)} ends beyond it; fetch it again")
        name = _hugging_face_name(tensor.name, config["model_type"])
        at = (tensor.data_offset, tensor.data.shape, tensor.data.dtype)
        read = partial(_read, path, tensor.tensor_type, *at, _undo(name, config))
        shape = tuple(int(size) for size in reversed(tensor.shape))
        tensors[name] = StoredTensor(path, shape, tensor.tensor_type.name, read)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    return StoredModel(path, config, tensors, cache(partial(tokenizer_source, data, path)))


def _read(path: Path, kind: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype, undo: Undo | None) -> np.ndarray:
    """A tensor's values in floating point, dequantised if need be, as they were before the conversion."""
    from gguf import quants

    stored = np.memmap(path, dtype, "r", int(offset), tuple(int(size) for size in shape))
    try:
        values = stored if kind.name in ("F32", "F16", "F64") else quants.dequantize(stored, kind)
        return values if undo is None else undo(values)
    except NotImplementedError as error:
        raise ValueError(f"{path}: quantisation {kind.name} is not one that the gguf package reads") from error


def _hugging_face_name(name: str, family: str) -> str:
    """Of a tensor; an unknown one keeps its name, and is then refused as such."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if not found:
        return name
    layer, stem = found.groups()
    norm = "pre_feedforward_layernorm" if family.startswith("gemma") else "post_attention_layernorm"
    theirs = {**_OF_LAYER, "ffn_norm": norm}.get(stem)
    return name if theirs is None else f"model.layers.{layer}.{theirs}.{kind}"


def _undo(name: str, config: Mapping[str, Any]) -> Undo | None:
    """What gives back the tensor as it was before it was converted; None: it was not changed."""
    if config["model_type"].startswith("gemma") and "norm" in name:
        return lambda array: array - np.ones((), array.dtype)
    if config["model_type"] == "llama" and re.search(r"self_attn\.[qk]_proj", name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return lambda array: (
            array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        )
    return None


def _config(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A `config.json` from the file's metadata."""
    architecture = data.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ValueError(f"{path}: architecture {shown(architecture)} is not one that can be read: {known}")

    def get(name: str, kind: Kind, default: Any = None) -> Any:
        name = f"{architecture}.{name}"
        return checked(data[name], kind, f"{path}: metadata", name) if name in data else default

    def need(name: str, kind: Kind) -> Any:
        if get(name, kind) is None:
            raise ValueError(f"{path}: metadata {architecture}.{name} is missing")
        return get(name, kind)

    layers, width = need("block_count", LAYERS), need("embedding_length", WIDTH)
    heads = need("attention.head_count", WIDTH)
    head_dim = get("attention.key_length", WIDTH) or get("rope.dimension_count", WIDTH) or width // heads
    config = {
        "model_type": _FAMILIES[architecture],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": need("feed_forward_length", WIDTH),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", WIDTH, heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length", CONTEXT, 4096),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", EPSILON, 1e-6),
        "rope_theta": get("rope.freq_base", THETA, 10_000.0),
    }
    if heads % config["num_key_value_heads"] or head_dim % 2 or head_dim < 1:
        shape = f"{heads} heads of {head_dim}, {config['num_key_value_heads']} of keys"
        raise ValueError(f"{path}: metadata asks for {shape}: these must divide those, and a head must be even")
    if architecture.startswith("gemma"):
        # As llama.cpp decides it: the largest of each generation scales by width / heads.
        largest = layers == {"gemma2": 46, "gemma3": 62}[architecture]
        config |= {
            "query_pre_attn_scalar": width // heads if largest else head_dim,
            "sliding_window": get("attention.sliding_window", CONTEXT),
            "hidden_activation": "gelu_pytorch_tanh",
        }
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):  # what a file leaves out is the family's
            if get(name, POSITIVE) is not None:
                config[name] = get(name, POSITIVE)
        if architecture == "gemma2" and config["sliding_window"] is None:
            del config["sliding_window"]
    else:
        config["hidden_act"] = "silu"
    kind = get("rope.scaling.type", text, "none")
    if kind != "none":
        config["rope_scaling"] = {
            "rope_type": kind,
            "factor": get("rope.scaling.factor", POSITIVE),
            "original_max_position_embeddings": get("rope.scaling.original_context_length", CONTEXT),
            "attention_factor": get("rope.scaling.attn_factor", POSITIVE),
        }
    return config


def _llama3_scaling(divisors: np.ndarray, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Llama 3.1's scaling, of which a file has only what each frequency is divided by."""
    from p3o_jax.models.rope import rope_frequencies
    from p3o_jax.models.stored.families import read_config

    if divisors.ndim != 1 or not 1 <= divisors.max(initial=0) < 1e9:
        raise ValueError(f"{path}: {_LLAMA3_FREQUENCIES} is not the scaling of Llama 3, which is the one that is read")
    scaling = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    architecture = read_config({**config, "rope_scaling": scaling}, path)
    head_dim, theta = architecture.head_dim, architecture.rope_theta
    expected = np.asarray(
        rope_frequencies(head_dim, theta) / rope_frequencies(head_dim, theta, architecture.rope_scaling)
    )
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ValueError(f"{path}: {_LLAMA3_FREQUENCIES} is not the scaling of Llama 3, which is the one that is read")
    return scaling
