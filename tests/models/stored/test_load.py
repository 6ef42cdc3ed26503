"""Reading stored models: onto meshes, bit for bit, within memory, and refusing what does not fit in one line."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from p3o_jax.devices.sharding import SAMPLER_RULES, MeshShape, make_mesh
from p3o_jax.models.stored.families import read_config
from p3o_jax.models.stored.load import leaves_by_name, load_params
from p3o_jax.models.stored.pretrained import Pretrained, open_model
from p3o_jax.models.stored.safetensors_directory import read_header
from tests.models.stored_models import DATA


def load(path: Path, mesh=None, **options):
    stored = open_model(str(path))
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    return load_params(stored, read_config(stored.config, path), mesh, **options)


def test_values_are_those_that_the_safetensors_package_reads():
    safetensors = pytest.importorskip("safetensors", reason="needs the extra 'dev'")
    params = leaves_by_name(load(DATA / "qwen3"))
    with safetensors.safe_open(DATA / "qwen3" / "model.safetensors", "numpy") as file:
        query = file.get_tensor("model.layers.1.self_attn.q_proj.weight")
        out = file.get_tensor("model.layers.0.self_attn.o_proj.weight")
        np.testing.assert_array_equal(params["embedding",], file.get_tensor("model.embed_tokens.weight"))
    # x @ ours is their product: head 3, entry 5 of it is row 3 * 8 + 5 of theirs.
    np.testing.assert_array_equal(params["layers", "query"][1, :, 3, 5], query[3 * 8 + 5])
    np.testing.assert_array_equal(params["layers", "attention_out"][0, 2, 7], out[:, 2 * 8 + 7])


@pytest.mark.parametrize("rules", ["learner", "sampler"])
def test_a_sharded_model_is_the_whole_one_in_its_places(rules):
    whole = leaves_by_name(load(DATA / "gemma3"))
    mesh = make_mesh(MeshShape(data=2, fsdp=2, tensor=2))
    options = {"rules": SAMPLER_RULES, "dtype": jnp.bfloat16} if rules == "sampler" else {}
    parts = leaves_by_name(load(DATA / "gemma3", mesh, **options))
    for path, part in parts.items():
        np.testing.assert_array_equal(np.asarray(part, np.float32), whole[path])  # stored in bfloat16
    query = parts["layers", "query"]
    assert query.addressable_shards[0].data.shape == ((4, 16, 2, 8) if rules == "sampler" else (4, 8, 2, 8))
    assert query.dtype == (jnp.bfloat16 if rules == "sampler" else jnp.float32)


def rewrite(file: Path, change) -> None:
    """A safetensors file with its header changed."""
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(DATA / "qwen3", tmp_path / "model"))


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_every_tensor_that_does_not_fit_is_named_in_one_error(copy):
    def change(header):
        header["model.layers.0.mlp.extra.weight"] = header.pop("model.layers.0.mlp.up_proj.weight")
        header["model.norm.weight"]["shape"] = [4, 4]
        header["lm_head.weight"] |= {"dtype": "I32"}

    rewrite(copy / "model.safetensors", change)
    with pytest.raises(ValueError, match=r"does not fit its config") as error:
        load(copy)
    text = one_line(error)
    assert "model.layers.0.mlp.up_proj.weight is missing" in text
    assert "model.layers.0.mlp.extra.weight is not a tensor of this architecture" in text
    assert "model.norm.weight is [4, 4], not [16], in model.safetensors" in text
    assert "lm_head.weight is I32 in model.safetensors" in text


def test_a_truncated_file_is_named(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        ValueError, match=r"model.safetensors is truncated: \d+ bytes, but its header needs \d+"
    ) as error:
        load(copy)
    one_line(error)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model.safetensors is truncated or is not a safetensors file: 100 bytes"):
        load(copy)
    file.write_bytes(b"\x08" + b"\x00" * 7 + b"notjson!")
    with pytest.raises(ValueError, match=r"its header does not read"):
        load(copy)


def test_a_size_that_is_not_the_shapes_is_refused(copy):
    rewrite(copy / "model.safetensors", lambda header: header["model.norm.weight"].update(shape=[17]))
    with pytest.raises(ValueError, match=r"model.safetensors: tensor model.norm.weight, F32 \[17\], has 64 bytes"):
        load(copy)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda path: (path / "config.json").unlink(), FileNotFoundError, "has no config.json"),
        (lambda path: (path / "config.json").write_text("{"), ValueError, "config.json is not valid JSON"),
        (lambda path: (path / "model.safetensors").unlink(), FileNotFoundError, "has no safetensors files"),
        (
            lambda path: (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
            FileNotFoundError,
            "names files that are not there: b.safetensors",
        ),
        (
            lambda path: shutil.copy(path / "model.safetensors", path / "second.safetensors"),
            ValueError,
            "is in model.safetensors and again in",
        ),
    ],
)
def test_damaged_directories(copy, damage, error, message):
    damage(copy)
    with pytest.raises(error, match=message):
        load(copy)


def test_a_model_without_a_tokenizer_says_so(copy):
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer.json"):
        Pretrained(str(copy)).tokenizer(open_model(str(copy)))


def test_names_that_are_no_model():
    with pytest.raises(FileNotFoundError, match=r"no model 'qwen': .* nor smollm2-135m"):
        open_model("qwen")
    with pytest.raises(FileNotFoundError, match=r"there.gguf does not exist"):
        open_model("there.gguf")


def test_a_multimodal_gemma_gives_its_text_model(tmp_path):
    path = Path(shutil.copytree(DATA / "gemma3", tmp_path / "model"))
    (path / "model.safetensors.index.json").unlink()

    def rename(header):
        for name in list(header):
            if name != "__metadata__":
                header[f"language_model.{name}"] = header.pop(name)

    for file in path.glob("*.safetensors"):
        rewrite(file, rename)
    vision = np.zeros((2, 2), ml_dtypes.bfloat16).tobytes()
    header = {"vision_tower.x.weight": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    (path / "model-vision.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + vision)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    expected = leaves_by_name(load(DATA / "gemma3"))
    for name, leaf in leaves_by_name(load(path)).items():
        np.testing.assert_array_equal(leaf, expected[name])


def test_a_tied_model_may_store_its_head_as_well(tmp_path):
    path = Path(shutil.copytree(DATA / "qwen2", tmp_path / "model"))
    rewrite(path / "model.safetensors", lambda h: h.update({"lm_head.weight": h["model.embed_tokens.weight"]}))
    load(path)


PEAK = """
import json, resource, struct, sys
from pathlib import Path
import numpy as np
import jax
from p3o_jax.models.stored.families import read_config
from p3o_jax.models.stored.load import load_params
from p3o_jax.models.stored.pretrained import open_model
from p3o_jax.devices.sharding import MeshShape, make_mesh
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

def load(path):
    stored = open_model(path)
    return load_params(stored, read_config(stored.config, path), make_mesh(MeshShape(fsdp=2, tensor=2)))

load(sys.argv[1])  # whatever is imported, traced or started is there now
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
params = jax.block_until_ready(load(sys.argv[2]))
local = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(json.dumps({"peak": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), "local": local}))
"""


def write_model(path: Path, width: int, layers: int) -> int:
    """A Llama of bfloat16 zeros, a file a layer; the size of the largest file."""
    path.mkdir()
    config = {
        "model_type": "llama", "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers,
        "num_attention_heads": 4, "vocab_size": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    top = {"model.embed_tokens.weight": (64, width), "model.norm.weight": (width,)}
    matrices = {
        **{f"self_attn.{name}_proj": (width, width) for name in "qkvo"},
        "mlp.gate_proj": (4 * width, width), "mlp.up_proj": (4 * width, width), "mlp.down_proj": (width, 4 * width),
        "input_layernorm": (width,), "post_attention_layernorm": (width,),
    }  # fmt: skip
    sizes = []
    for layer in range(layers):
        tensors = {f"model.layers.{layer}.{name}.weight": shape for name, shape in matrices.items()}
        tensors |= top if layer == 0 else {}
        header, end = {}, 0
        for name, shape in tensors.items():
            start, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        file = path / f"model-{layer}.safetensors"
        file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
        sizes.append(file.stat().st_size)
        read_header(file)
    return max(sizes)


def test_peak_host_memory_is_the_local_part_and_little_more(tmp_path):
    write_model(tmp_path / "small", 32, 4)
    largest = write_model(tmp_path / "model", 768, 6)  # 14 MB a file, 170 MB in float32
    command = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "model")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(out.splitlines()[-1])
    assert found["local"] > 10 * largest
    assert found["peak"] < 1.3 * largest + found["local"]
