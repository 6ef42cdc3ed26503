"""GGUF files against the directories of safetensors they were converted from."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from p3o_jax.devices.sharding import make_mesh
from p3o_jax.models.rope import Llama3Rope, rope_frequencies
from p3o_jax.models.stored.families import read_config
from p3o_jax.models.stored.load import leaves_by_name, load_params
from p3o_jax.models.stored.pretrained import open_model
from tests.models.stored_models import DATA, write_gguf

gguf = pytest.importorskip("gguf", reason="needs the extra 'models'")
MESH = make_mesh(devices=jax.devices()[:1])
# What a GGUF file does not say of these small models: biases of Llama, and windows of Qwen.
SAID = ("llama3", "qwen3", "gemma2", "gemma3")


@pytest.mark.parametrize("name", SAID)
def test_weights_are_those_before_the_conversion(name, tmp_path):
    write_gguf(name, tmp_path / "model.gguf")
    stored, original = open_model(str(tmp_path / "model.gguf")), open_model(str(DATA / name))
    config = read_config(original.config, name)
    expected = leaves_by_name(load_params(original, config, MESH))
    for path, leaf in leaves_by_name(load_params(stored, config, MESH)).items():
        # One is added to Gemma's norms in float32 and taken away again.
        np.testing.assert_allclose(leaf, expected[path], atol=2e-7 if "norm" in path[-1] else 0)


def test_the_architecture_is_read_from_the_metadata(tmp_path):
    for name, unsaid in {
        "llama3": {"rope_scaling"},
        "qwen3": set(),
        "gemma2": {"query_scale"},
        "gemma3": {"query_scale", "sliding_layers"},
    }.items():
        write_gguf(name, tmp_path / f"{name}.gguf")
        found = vars(read_config(open_model(str(tmp_path / f"{name}.gguf")).config, name))
        expected = vars(read_config(open_model(str(DATA / name)).config, name))
        for field in found.keys() - unsaid:
            assert (
                found[field] == pytest.approx(expected[field], rel=1e-6)
                if isinstance(found[field], float)
                else found[field] == expected[field]
            ), (name, field)


def test_llama_3s_scaling_is_recognised_by_its_frequencies(tmp_path):
    import gguf

    scaling = Llama3Rope(8.0, 1.0, 4.0, 8192)
    divisors = np.asarray(rope_frequencies(64, 5e5) / rope_frequencies(64, 5e5, scaling))
    for values, fails in ((divisors, False), (divisors[::-1].copy(), True)):
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
        writer.add_block_count(1)
        writer.add_embedding_length(256)
        writer.add_feed_forward_length(8)
        writer.add_head_count(4)
        writer.add_context_length(131072)
        writer.add_rope_freq_base(5e5)
        writer.add_tensor("rope_freqs.weight", values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if fails:
            with pytest.raises(ValueError, match=r"rope_freqs.weight is not the scaling of Llama 3"):
                open_model(str(tmp_path / "model.gguf"))
        else:
            config = read_config(open_model(str(tmp_path / "model.gguf")).config, "here")
            assert config.rope_scaling == scaling


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_tensors_are_near_what_was_quantised(kind, tmp_path):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((6, 64)).astype(np.float32)
    kind_of = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    for add in (writer.add_block_count, writer.add_embedding_length, writer.add_feed_forward_length):
        add(64)
    writer.add_head_count(4)
    writer.add_tensor("token_embd.weight", gguf.quants.quantize(values, kind_of), raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = open_model(str(tmp_path / "model.gguf")).tensors["model.embed_tokens.weight"]
    assert (tensor.shape, tensor.dtype) == ((6, 64), kind)
    bits = {"F16": 10, "BF16": 7, "Q8_0": 7, "Q5_0": 4, "Q5_1": 4, "Q4_0": 3, "Q4_1": 3}[kind]
    error = np.abs(np.asarray(tensor.read(), np.float32) - values)
    assert 0 < error.max() < np.abs(values).max() * 2.0**-bits


def test_a_truncated_or_foreign_file_is_named(tmp_path):
    write_gguf("qwen3", tmp_path / "model.gguf")
    data = (tmp_path / "model.gguf").read_bytes()
    for size in (len(data) - 500, 300, 10):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"cut.gguf is truncated") as error:
            open_model(str(tmp_path / "cut.gguf"))
        assert "\n" not in str(error.value)
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"other.gguf: architecture 'mamba'"):
        open_model(str(tmp_path / "other.gguf"))
