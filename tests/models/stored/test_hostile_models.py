"""Models that are damaged or made to do harm: each loads or is refused in one line, within memory and time."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from p3o_jax.models.stored.families import read_config
from p3o_jax.models.stored.pretrained import open_model
from tests.alterations import check, outcomes
from tests.models.stored_models import DATA, copy_with_tokenizer, write_gguf

gguf = pytest.importorskip("gguf", reason="needs the extra 'models'")


@pytest.mark.parametrize(("name", "count"), [("qwen3", 300), ("gemma3", 200)])
def test_altered_directories(name, count, tmp_path):
    Path(shutil.copytree(DATA / name, tmp_path / "good"))
    check(outcomes("model", tmp_path / "good", 0, count))


def test_altered_gguf_files(tmp_path):
    (tmp_path / "good").mkdir()
    write_gguf("qwen3", tmp_path / "good" / "model.gguf")
    check(outcomes("model", tmp_path / "good", 0, 300))


def write_vocabulary(file: Path, kind: str) -> None:
    """A GGUF file that is a tokenizer and an embedding."""
    writer = gguf.GGUFWriter(file, "llama")
    for add in (writer.add_block_count, writer.add_embedding_length, writer.add_feed_forward_length):
        add(64)
    writer.add_head_count(4)
    if kind == "gpt2":
        tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'models'")
        tokens = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "12", "<|end|>"]
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_types([1] * 257 + [3])
        writer.add_token_merges(["1 2"])
    else:
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "1", "2", "12"]
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 4)
        writer.add_token_scores([0.0] * 259 + [-1.0] * 4)
        writer.add_bos_token_id(1)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_altered_tokenizers_of_gguf_files(kind, tmp_path):
    (tmp_path / "good").mkdir()
    write_vocabulary(tmp_path / "good" / "model.gguf", kind)
    check(outcomes("tokenizer", tmp_path / "good", 0, 200))


def test_altered_tokenizer_directories(tmp_path):
    pytest.importorskip("jinja2", reason="needs the extra 'models'")
    check(outcomes("tokenizer", copy_with_tokenizer("qwen3", tmp_path), 0, 400))


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(DATA / "qwen3", tmp_path / "model"))


def safetensors(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


HEADERS = {
    "deep": (b"[" * 200_000, "nested too deep"),
    "twice": (b'{"a": 1, "a": 2}', "'a' is there twice"),
    "no object": (b"[1]", "the header is"),
    "not UTF-8": (b'{"\xff": 1}', "no UTF-8"),
    "shape": (b'{"a": {"dtype": "F32", "shape": [1e3], "data_offsets": [0, 4]}}', "shape is"),
    "negative": (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}', "shape is"),
    "backwards": (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', "is not one of a tensor"),
    "three": (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2, 4]}}', "is not one of a tensor"),
    "axes": (
        b'{"a": {"dtype": "F32", "shape": [' + b"1," * 99 + b'1], "data_offsets": [0, 4]}}',
        "not one of a tensor",
    ),
    "type": (b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}', "dtype is"),
    "lines": (b'{"a\\nb\\u0000": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "tensor a b, F32"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_safetensors(name, copy):
    header, message = HEADERS[name]
    (copy / "model.safetensors").write_bytes(safetensors(header))
    with pytest.raises(ValueError, match=message) as error:
        open_model(str(copy))
    assert str(copy / "model.safetensors") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x" * 5000, "a\0b"])
def test_an_index_leads_nowhere_else(name, copy):
    shutil.copy(copy / "model.safetensors", copy.parent / "other.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises((ValueError, FileNotFoundError), match=r"index.json names (a file that is|files that are) not"):
        open_model(str(copy))


def test_files_that_are_none_or_too_large_are_not_read(copy):
    with open(copy / "config.json", "ab") as file:
        file.truncate(10**11)  # of which the disk has nothing
    with pytest.raises(ValueError, match=r"config.json has 100000000000 bytes, which is more than"):
        open_model(str(copy))
    (copy / "config.json").unlink()
    os.mkfifo(copy / "config.json")
    with pytest.raises(ValueError, match=r"config.json is not a file"):
        open_model(str(copy))
    with open(copy / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", 10**10))
        file.truncate(10**11)
    shutil.copy(DATA / "qwen3" / "config.json", copy / "other")
    (copy / "config.json").unlink()
    (copy / "other").rename(copy / "config.json")
    with pytest.raises(ValueError, match=r"a header of 10000000000 bytes is more than"):
        open_model(str(copy))


def test_a_name_that_is_there_twice_is_one_if_it_says_the_same(copy):
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(text.replace("{", '{"hidden_size": 16, ', 1))
    assert read_config(open_model(str(copy)).config, copy).embed_dim == 16
    (copy / "config.json").write_text(text.replace("{", '{"hidden_size": 32, ', 1))
    with pytest.raises(ValueError, match=r"'hidden_size' is there twice, as 32 and as 16"):
        open_model(str(copy))


def test_adapters_alone_are_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="has adapters, and no model"):
        open_model(str(tmp_path))


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (8, 2**60, "it says that it has"),  # tensors
        (16, 2**60, "it says that it has"),  # fields
        (24, 2**63, "a name of"),  # the first one's length
        (4, 2**31, "version"),
    ],
)
def test_counts_of_gguf_headers_are_compared_with_the_file(at, value, message, tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf("qwen3", file)
    data = bytearray(file.read_bytes())
    data[at : at + 8] = struct.pack("<Q", value)
    file.write_bytes(data)
    with pytest.raises(ValueError, match=rf"model.gguf is truncated or is not a GGUF file .*{message}"):
        open_model(str(file))
