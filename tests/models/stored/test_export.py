"""Load, export, read again: the same tensors bit for bit, the same architecture, the same tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

from p3o_jax.devices.sharding import MeshShape, make_mesh
from p3o_jax.models.stored.export import export_model
from p3o_jax.models.stored.families import read_config
from p3o_jax.models.stored.load import load_params
from p3o_jax.models.stored.pretrained import Pretrained, open_model
from p3o_jax.models.stored.safetensors_directory import tokenizer_source
from p3o_jax.models.transformer import Transformer, TransformerConfig
from p3o_jax.policies import load_policy
from p3o_jax.tokenizers.char_files import char_tokenizer_files
from p3o_jax.tokenizers.hf import HfTokenizer
from p3o_jax.tokenizers.text import ByteTokenizer, CharTokenizer
from tests.models.stored_models import FAMILIES, TOKENIZER, copy_with_tokenizer

pytest.importorskip("tokenizers", reason="needs the extra 'models'")


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_exported_is_what_was_loaded(name, tmp_path):
    """From a sharded mesh, in the type it was stored in, in files of at most 8 kB."""
    path = copy_with_tokenizer(name, tmp_path)
    stored = open_model(str(path))
    config = read_config(stored.config, name)
    tokenizer = Pretrained(str(path)).tokenizer(stored)
    params = load_params(stored, config, make_mesh(MeshShape(data=2, fsdp=2, tensor=2)))
    dtype = {"F32": "float32", "BF16": "bfloat16"}[stored.tensors["model.norm.weight"].dtype]
    export_model(tmp_path / "out", params, config, tokenizer, dtype=dtype, shard_bytes=8000)

    again = open_model(str(tmp_path / "out"))
    assert again.tensors.keys() == stored.tensors.keys()
    for tensor_name, tensor in stored.tensors.items():
        assert again.tensors[tensor_name].dtype == tensor.dtype
        np.testing.assert_array_equal(again.tensors[tensor_name].read(), tensor.read(), tensor_name)
    files = {tensor.file for tensor in again.tensors.values()}
    assert len(files) > 1
    assert max(file.stat().st_size for file in files) < 8000 + 3000  # a header is not counted
    assert read_config(again.config, name) == config
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, 5]
    exported = Pretrained(str(tmp_path / "out")).tokenizer(again)
    assert exported.encode("1=") == tokenizer.encode("1=")
    assert exported.eos_ids == tokenizer.eos_ids


def test_a_model_trained_from_scratch_is_exported_with_its_characters(tmp_path):
    safetensors = pytest.importorskip("safetensors", reason="needs the extra 'dev'")
    tokenizer = CharTokenizer("0123 é\n")
    config = TransformerConfig(num_layers=1, embed_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=8)
    params = nnx.state(Transformer(config, tokenizer.vocab_size, nnx.Rngs(0)))
    export_model(tmp_path / "out", params, config, tokenizer)
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        down = file.get_tensor("model.layers.0.mlp.down_proj.weight")
    np.testing.assert_array_equal(down, params["layers"]["down"][0].T)
    pretrained = Pretrained(str(tmp_path / "out"), chat=False)
    exported = pretrained.tokenizer(open_model(pretrained.path))
    assert exported.encode("21 é\n") == tokenizer.encode("21 é\n")
    assert exported.decode([3, 2, 0]) == tokenizer.decode([3, 2, 0]) == "21"
    assert (exported.vocab_size, exported.eos_ids, exported.bos_id) == (8, (0,), None)


def test_bytes_are_exported_as_bytes(tmp_path):
    for name, text in char_tokenizer_files(ByteTokenizer()).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "config.json").write_text("{}")
    exported = HfTokenizer(tokenizer_source(tmp_path), 256)
    text = "naïve 日本語 🙂\n\t 0 <|end"
    assert exported.encode(text) == ByteTokenizer().encode(text)
    ids = [*range(0, 256, 3), 255]
    assert exported.decode(ids) == ByteTokenizer().decode(ids)
    assert exported.eos_ids == ByteTokenizer().eos_ids


def test_nothing_is_overwritten_and_what_cannot_be_written_leaves_nothing(tmp_path):
    tokenizer = CharTokenizer("01")
    config = TransformerConfig(num_layers=1, embed_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=8)
    params = nnx.state(Transformer(config, 3, nnx.Rngs(0)))
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="there exists"):
        export_model(tmp_path / "there", params, config, tokenizer)
    with pytest.raises(ValueError, match="no published family"):
        export_model(tmp_path / "out", params, replace(config, logit_softcap=3.0), tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def exported(path, out, **settings):
    """A model that is exported with a run's settings of its prompts."""
    pretrained = Pretrained(str(path), **settings)
    stored = pretrained.open()
    config = read_config(stored.config, path)
    export_model(out, load_params(stored, config, make_mesh()), config, pretrained.tokenizer(stored))
    return out


def test_a_model_trained_without_its_template_says_so_to_whoever_loads_it(tmp_path, caplog):
    out = exported(copy_with_tokenizer("qwen3", tmp_path), tmp_path / "out", chat=False)
    assert json.loads((out / "p3o.json").read_text())["prompts"]["chat"] is False
    assert "without a chat template" in (out / "README.md").read_text()
    # What transformers calls a tokenizer with templates of which none is the default.
    assert not (out / "chat_template.jinja").exists()
    named = json.loads((out / "tokenizer_config.json").read_text())["chat_template"]
    assert [entry["name"] for entry in named] == ["pretrained"]
    with pytest.raises(ValueError, match=r"out: the model was trained without one \(p3o.json\): set pretrained.chat"):
        Pretrained(str(out)).tokenizer(open_model(str(out)))
    policy = load_policy(str(out), make_mesh())
    assert not policy.tokenizer.chat
    assert policy.tokenizer.encode("12=") == TOKENIZER.encode("12=")
    assert not caplog.records
    again = exported(out, tmp_path / "again", chat=False)  # keeps the template's name
    assert (again / "tokenizer_config.json").read_text() == (out / "tokenizer_config.json").read_text()


def test_a_system_prompt_and_options_are_those_of_the_run(tmp_path, caplog):
    settings = {"system_prompt": "be nice", "template_options": {"thinking": False}}
    out = exported(copy_with_tokenizer("qwen3", tmp_path), tmp_path / "out", **settings)
    trained = Pretrained(str(out), **settings)
    tokenizer = trained.tokenizer(trained.open())
    policy = load_policy(str(out), make_mesh())
    assert policy.tokenizer.prompt_format == tokenizer.prompt_format
    assert policy.tokenizer.encode("1=") == tokenizer.encode("1=")
    assert not caplog.records
    asked = load_policy(str(out), make_mesh(), system_prompt="be brief")
    assert asked.tokenizer.prompt_format.system_prompt == "be brief"
    assert "was trained with prompts in its chat template, with the system prompt 'be nice'" in caplog.text
    (out / "p3o.json").write_text('{"prompts": {"chat": "no"}}')
    with pytest.raises(ValueError, match=r"p3o.json: prompts.chat is 'no', not true or false"):
        load_policy(str(out), make_mesh())
