"""What is read of a config.json: its family's defaults where it says nothing, and one line for every wrong value."""

from __future__ import annotations

import json
import logging
import shutil
import struct
from pathlib import Path

import jax
import numpy as np
import pytest

from p3o_jax.devices.sharding import make_mesh
from p3o_jax.models.rope import LinearRope, YarnRope
from p3o_jax.models.stored.families import read_config
from p3o_jax.models.stored.load import leaves_by_name, load_params
from p3o_jax.models.stored.pretrained import open_model
from p3o_jax.models.stored.published import FAMILIES
from p3o_jax.models.stored.safetensors_directory import tokenizer_source
from tests.alterations import VALUES
from tests.models.stored_models import DATA, copy_with_tokenizer

# The classes' defaults in transformers 4.57.3 and 5.25.0, by the names they have here.
_ALL = {
    "norm_epsilon": 1e-6, "rope_theta": 10_000.0, "rope_scaling": None, "tied_embeddings": False,
    "attention_bias": False, "attention_out_bias": False, "sliding_window": None, "sliding_layers": (),
    "query_scale": None, "head_dim": 128,
    "logit_softcap": None, "attention_softcap": None, "mlp_activation": "silu", "num_layers": 32, "num_heads": 32,
    "embed_dim": 4096,
}  # fmt: skip
_QWEN = _ALL | {"mlp_dim": 22016, "num_kv_heads": 32, "context_tokens": 32768}
_GEMMA = _ALL | {
    "num_layers": 26, "num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "embed_dim": 2304, "mlp_dim": 9216,
    "mlp_activation": "gelu_tanh", "tied_embeddings": True, "sliding_window": 4096, "post_norms": True,
}  # fmt: skip
DEFAULTS = {
    "llama": _ALL | {"mlp_dim": 11008, "num_kv_heads": 32, "context_tokens": 2048, "qk_norm": False},
    "qwen2": _QWEN | {"attention_bias": True, "qk_norm": False},
    "qwen3": _QWEN | {"qk_norm": True},
    "gemma2": _GEMMA
    | {
        "context_tokens": 8192, "attention_softcap": 50.0, "logit_softcap": 30.0, "qk_norm": False,
        "sliding_layers": tuple(range(0, 26, 2)), "sliding_rope_theta": None,
    },
    "gemma3_text": _GEMMA
    | {
        "context_tokens": 131_072, "rope_theta": 1e6, "sliding_rope_theta": 1e4, "qk_norm": True,
        "sliding_layers": tuple(i for i in range(26) if i % 6 != 5),
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_configuration_leaves_out_is_its_familys_default(family):
    config = read_config({"model_type": family}, "here")
    assert {name: getattr(config, name) for name in DEFAULTS[family]} == DEFAULTS[family]


# As published, in the file of the whole model.
GEMMA3 = {
    "4b": ({"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}, (34, 8, 4, 256, None)),
    "12b": (
        {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16,
         "num_key_value_heads": 8},
        (48, 16, 8, 256, None),
    ),
    "27b": (
        {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
         "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168},
        (62, 32, 16, 128, 168**-0.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", GEMMA3)
def test_the_multimodal_gemma_3_files_leave_out_what_is_the_familys(size):
    part, expected = GEMMA3[size]
    text = part | {
        "model_type": "gemma3_text",
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = read_config({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}, "here")
    shape = (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, config.query_scale)
    assert shape == expected
    assert (config.context_tokens, config.rope_scaling, config.tied_embeddings) == (131_072, LinearRope(8.0), True)
    assert (config.sliding_window, config.sliding_layers[:6]) == (1024, (0, 1, 2, 3, 4, 6))


def test_a_whole_model_speaks_for_its_text_part():
    config = read_config({"model_type": "gemma3", "tie_word_embeddings": False}, "here")
    assert not config.tied_embeddings
    assert read_config({"model_type": "gemma3", "tie_word_embeddings": None, "text_config": None}, "a").tied_embeddings
    with pytest.raises(ValueError, match="tie_word_embeddings is False, but another in its text_config"):
        read_config(
            {"model_type": "gemma3", "tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, "here"
        )
    with pytest.raises(ValueError, match=r"asks for quantization_config="):
        read_config({"model_type": "gemma3", "quantization_config": {"quant_method": "awq"}}, "here")


def test_rope_is_read_as_transformers_5_writes_it_and_as_4_does():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    new = read_config({"model_type": "qwen2", "rope_parameters": {**yarn, "rope_theta": 1e6}}, "here")
    old = read_config({"model_type": "qwen2", "rope_scaling": yarn, "rope_theta": 1e6}, "here")
    assert (new.rope_theta, new.rope_scaling) == (old.rope_theta, old.rope_scaling) == (1e6, YarnRope(4.0, 32768))
    null = read_config({"model_type": "gemma3_text", "rope_parameters": {"full_attention": None}}, "here")
    assert (null.rope_theta, null.sliding_rope_theta, null.rope_scaling) == (1e6, 1e4, None)
    default = {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
    assert read_config(default, "here").rope_theta == 5e6


def test_null_is_taken_where_the_class_takes_it():
    config = read_config({"model_type": "llama", "head_dim": None, "num_key_value_heads": None}, "here")
    assert (config.head_dim, config.num_kv_heads) == (128, 32)
    for family, name in (("qwen3", "head_dim"), ("gemma2", "num_key_value_heads"), ("llama", "rms_norm_eps")):
        with pytest.raises(ValueError, match=f"^here: config.json has no {name}: it is null, not a "):
            read_config({"model_type": family, name: None}, "here")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_of_another_kind_is_one_line_with_its_name(family):
    """Every field that is read, and those of RoPE, with everything that JSON can hold."""
    rope = ("factor", "rope_theta", "original_max_position_embeddings", "rope_type", "beta_fast", "low_freq_factor")
    fields = [*DATA_FIELDS[family], *(f"rope_scaling.{name}" for name in rope), "rope_parameters.sliding_attention"]
    refused = 0
    for field in fields:
        for value in VALUES:
            place, _, inner = field.partition(".")
            values = {
                "model_type": family,
                place: {"rope_type": "yarn", "factor": 2.0, inner: value} if inner else value,
            }
            try:
                read_config(values, "here")
            except ValueError as error:
                refused += 1
                said = str(error)
                assert said.startswith("here: ") and "\n" not in said and len(said) < 300, said
                assert field.split(".")[-1] in said or "RoPE" in said or "head" in said or "yarn" in said, (field, said)
    assert refused > 15 * len(fields)


_COMMON = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
_COMMON += ("rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "vocab_size")
DATA_FIELDS = {
    family: _COMMON + (("hidden_activation", "sliding_window", "layer_types") if "gemma" in family else ("hidden_act",))
    for family in FAMILIES
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_attention_heads": 6}, "num_key_value_heads is 32|6 heads do not divide hidden_size 4096"),
        ({"num_attention_heads": 32, "num_key_value_heads": 5}, "num_key_value_heads is 5, which does not divide 32"),
        ({"head_dim": 5}, "head_dim is 5, which is odd"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor=0.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"rope_parameters.partial_rotary_factor=0.5"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types has 1 entries, but there are 26"),
        ({"model_type": "gemma2", "layer_types": ["chunked"] * 26}, "layer_types is .* not a list of types of layers"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e6}}, "has neither full_attention nor"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, not a whole number from 1 to 4096"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\]"),
    ],
)
def test_what_does_not_go_together_is_named(values, message):
    with pytest.raises(ValueError, match=f"^here: .*({message})"):
        read_config({"model_type": "llama", **values}, "here")


def with_head(path: Path, change) -> None:
    """The embedding of a tied model, changed, is stored as its head too."""
    file = path / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    embedding = header["model.embed_tokens.weight"]
    start, end = embedding["data_offsets"]
    head = change(np.frombuffer(data[8 + length + start : 8 + length + end], np.float32).copy()).tobytes()
    size = len(data) - 8 - length
    header["lm_head.weight"] = embedding | {"data_offsets": [size, size + len(head)]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :] + head)


@pytest.mark.parametrize("differs", [False, True])
def test_another_head_of_a_tied_model_is_a_warning(differs, tmp_path, caplog):
    path = Path(shutil.copytree(DATA / "qwen2", tmp_path / "model"))
    with_head(path, lambda values: values + np.float32(differs))
    stored = open_model(str(path))
    mesh = make_mesh(devices=jax.devices()[:1])
    with caplog.at_level(logging.WARNING):
        params = leaves_by_name(load_params(stored, read_config(stored.config, path), mesh))
    assert ("head",) not in params
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == differs
    if differs:
        assert str(path / "model.safetensors") in said[0] and "the embedding is used as the head" in said[0]


def test_many_tensors_that_do_not_fit_are_a_few_and_a_count(tmp_path):
    path = Path(shutil.copytree(DATA / "qwen3", tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 40, "layer_types": None}))
    stored = open_model(str(path))
    with pytest.raises(ValueError, match=r"model.layers.2.\S+ is missing; .* is missing; and 416 more$") as error:
        load_params(stored, read_config(stored.config, path), make_mesh(devices=jax.devices()[:1]))
    assert len(str(error.value)) < 400
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 65}))
    stored = open_model(str(path))
    with pytest.raises(ValueError, match=r"vocab_size is 65, but model.embed_tokens.weight has 64 rows"):
        load_params(stored, read_config(stored.config, path), make_mesh(devices=jax.devices()[:1]))


def test_the_end_of_a_sequence_is_the_familys_where_no_file_says(tmp_path):
    path = copy_with_tokenizer("llama", tmp_path)
    (path / "generation_config.json").unlink()
    config = json.loads((path / "config.json").read_text())
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    del config["eos_token_id"]
    (path / "config.json").write_text(json.dumps(config))
    assert tokenizer_source(path).generation["eos_token_id"] is None  # the tokenizer says
    del tokenizer["eos_token"]
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert tokenizer_source(path).generation["eos_token_id"] == 2  # LlamaConfig's
