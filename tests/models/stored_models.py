"""Stored models for tests: the golden ones, changed copies of them, and their conversion to GGUF.

python -m tests.models.stored_models DIR    exports the golden ones, for `make.py check=DIR` in tests/data/models
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np

from p3o_jax.devices.sharding import make_mesh
from p3o_jax.models.stored.export import export_model
from p3o_jax.models.stored.families import read_config
from p3o_jax.models.stored.load import load_params
from p3o_jax.models.stored.pretrained import Pretrained, open_model
from p3o_jax.models.stored.safetensors_directory import open_directory
from p3o_jax.tokenizers.char_files import char_tokenizer_files
from p3o_jax.tokenizers.text import CharTokenizer

DATA = Path(__file__).parent.parent / "data" / "models"
FAMILIES = ("llama", "llama3", "qwen2", "qwen3", "gemma2", "gemma3")
VOCAB = 64
TOKENIZER = CharTokenizer("0123456789=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + m['content'] }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


def copy_with_tokenizer(name: str, directory: Path) -> Path:
    """A golden model with one token a character, ids 0 .. 63."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(DATA / name, path)
    for file, text in char_tokenizer_files(TOKENIZER).items():
        (path / file).write_text(text)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    return path


ARCHITECTURES = dict(zip(FAMILIES, ("llama", "llama", "qwen2", "qwen3", "gemma2", "gemma3"), strict=True))
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def write_gguf(name: str, file: Path, kinds: tuple[str, ...] = ("F32",)) -> None:
    """A golden model converted as llama.cpp's `convert_hf_to_gguf.py` does it; matrices in turn of the given kinds."""
    import gguf

    stored = open_directory(DATA / name)
    config, arch = stored.config, ARCHITECTURES[name]
    gemma = arch.startswith("gemma")
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters", {"rope_type": "default", "rope_theta": 1e4})
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if gemma:
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    matrices = 0
    for tensor_name, tensor in stored.tensors.items():
        values = np.asarray(tensor.read(), np.float32)
        if gemma and "norm" in tensor_name:
            values = values + 1
        if arch == "llama" and ("q_proj" in tensor_name or "k_proj" in tensor_name):
            heads = config["num_attention_heads" if "q_proj" in tensor_name else "num_key_value_heads"]
            split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = split.swapaxes(1, 2).reshape(values.shape)
        kind = (
            gguf.GGMLQuantizationType[kinds[matrices % len(kinds)]]
            if values.ndim > 1
            else gguf.GGMLQuantizationType.F32
        )
        matrices += values.ndim > 1
        stored_values = gguf.quants.quantize(values, kind) if kind.name != "F32" else values
        writer.add_tensor(_gguf_name(tensor_name, gemma), stored_values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str, gemma: bool) -> str:
    stem, _, kind = name.rpartition(".")
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    theirs = "post_attention_norm" if gemma and rest == "post_attention_layernorm" else _NAMES[rest]
    return f"blk.{layer}.{theirs}.{kind}"


def _export_all(directory: Path) -> None:
    """Every golden model, loaded and exported to a directory of its own."""
    mesh = make_mesh()
    for name in FAMILIES:
        path = copy_with_tokenizer(name, directory / "source")
        stored = open_model(str(path))
        config = read_config(stored.config, path)
        tokenizer = Pretrained(str(path)).tokenizer(stored)
        export_model(directory / name, load_params(stored, config, mesh), config, tokenizer)


if __name__ == "__main__":
    _export_all(Path(sys.argv[1]))
