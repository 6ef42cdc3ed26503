"""Models as published on the Hugging Face hub: a directory of `config.json`, safetensors and a tokenizer.

A safetensors file is eight bytes N, a JSON header of N bytes with every tensor's type, shape and place, and the
values (github.com/huggingface/safetensors). Tensors are memory-mapped one at a time: a page that was read for one is
not held while the next is read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from p3o_jax.inputs.errors import one_line, shown, some
from p3o_jax.inputs.json_files import MAX_BYTES, parse_json, read_json, read_text
from p3o_jax.inputs.kinds import ListOf, Whole, checked, table, text
from p3o_jax.models.stored.contents import StoredModel, StoredTensor
from p3o_jax.models.stored.published import end_of_family, text_config
from p3o_jax.tokenizers.prompt_format import read_prompt_format
from p3o_jax.tokenizers.source import TokenizerSource

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
"""Types that weights can be read from."""
_BITS = {"BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32}
_BITS |= {"F16": 16, "BF16": 16, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64}
_PLACE = Whole(0, 2**62)
_SHAPE = ListOf(_PLACE, "sizes")
_MAX_AXES = 16
_MAX_TOKENIZER_BYTES = 2**29
INDEX = "model.safetensors.index.json"
"""Which file each tensor is in, where there are several."""


def open_directory(path: Path) -> StoredModel:
    """The model in a directory.

    Raises:
        FileNotFoundError: a file that it needs is not there.
        ValueError: a file that is damaged, in one line.
    """
    if not (path / "config.json").exists() and (path / "adapter_config.json").exists():
        raise FileNotFoundError(
            f"{path} has adapters, and no model (config.json): merge them into theirs (peft's merge_and_unload)"
        )
    return StoredModel(
        path=path,
        config=read_json(path / "config.json"),
        tensors=_tensors(path),
        tokenizer=cache(partial(tokenizer_source, path)),
    )


def _tensors(path: Path) -> dict[str, StoredTensor]:
    index = read_json(path / INDEX, missing={})
    if index:
        files = _indexed(path, index)
    else:
        files = sorted(file.name for file in path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{path} has no safetensors files (other formats, such as .bin, are not read)")
    return _merged(read_header(path / name) for name in files)


def _indexed(path: Path, index: Mapping[str, Any]) -> list[str]:
    """The files that an index names, all of them in its directory."""
    where = checked(index.get("weight_map"), table, path / INDEX, "weight_map")
    files = sorted({checked(name, text, path / INDEX, "a file in weight_map") for name in where.values()})
    if not files:
        raise ValueError(f"{path / INDEX}: weight_map is empty; fetch it again")
    outside = [name for name in files if Path(name).name != name or "\0" in name]
    if outside:
        raise ValueError(f"{path / INDEX} names a file that is not one of its directory: {shown(outside[0])}")
    there = {entry.name for entry in path.iterdir()}
    absent = [name for name in files if name not in there]
    if absent:
        raise FileNotFoundError(f"{path / INDEX} names files that are not there: {some(absent)}")
    return files


def _merged(parts: Iterable[Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    merged: dict[str, StoredTensor] = {}
    for part in parts:
        for name, tensor in part.items():
            if name in merged:
                raise ValueError(f"tensor {shown(name)} is in {merged[name].file.name} and again in {tensor.file}")
            merged[name] = tensor
    return merged


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, none of them read yet.

    Raises:
        ValueError: the file is truncated or is no safetensors file.
    """
    if not file.is_file():
        raise ValueError(f"{file} is not a file")
    size = file.stat().st_size
    with open(file, "rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{file} is truncated or is not a safetensors file: {size} bytes; fetch it again")
        if length > MAX_BYTES:
            raise ValueError(f"{file}: a header of {length} bytes is more than the {MAX_BYTES} that are read")
        try:
            header = parse_json(stream.read(length), unique=True)
        except ValueError as error:
            raise ValueError(f"{file} is not a safetensors file: its header does not read: {error}") from error
    entries = dict(checked(header, table, file, "the header"))
    entries.pop("__metadata__", None)
    found, end = {}, 8 + length
    for name, entry in entries.items():
        found[name], last = _tensor(file, name, 8 + length, entry)
        end = max(end, last)
    if end > size:
        raise ValueError(f"{file} is truncated: {size} bytes, but its header needs {end}; fetch it again")
    return found


def _tensor(file: Path, name: str, base: int, entry: Any) -> tuple[StoredTensor, int]:
    """A tensor, and where it ends."""
    where = f"{file}: its header does not read: tensor {shown(name, 80)}"
    fields = checked(entry, table, where, "the entry")
    dtype = checked(fields.get("dtype"), text, where, "dtype")
    shape = checked(fields.get("shape"), _SHAPE, where, "shape")
    offsets = checked(fields.get("data_offsets"), ListOf(_PLACE, "places"), where, "data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1] or len(shape) > _MAX_AXES:
        raise ValueError(f"{where}: shape {shown(shape)} at {shown(offsets)} is not one of a tensor")
    start, end = offsets
    if dtype in _BITS and (end - start) * 8 != math.prod(shape) * _BITS[dtype]:
        raise ValueError(
            f"{file}: tensor {one_line(name, 80)}, {dtype} {list(shape)}, has {end - start} bytes, "
            "which is not its size"
        )

    def read() -> np.ndarray:
        if end == start:
            return np.zeros(shape, DTYPES[dtype])
        # A map of this tensor alone: its pages go when the array does.
        return np.memmap(file, DTYPES[dtype], "r", base + start, shape)

    return StoredTensor(file, shape, one_line(dtype, 20), read), base + end


def tokenizer_source(path: Path) -> TokenizerSource:
    """What a directory says of its tokenizer.

    Raises:
        FileNotFoundError: there is no tokenizer.json.
        ValueError: a file that does not read.
    """
    file = path / "tokenizer.json"
    if not file.exists():
        raise FileNotFoundError(
            f"{path} has no tokenizer.json (sentencepiece's tokenizer.model alone is not read: save it once with "
            "transformers' AutoTokenizer)"
        )
    config = read_json(path / "tokenizer_config.json", missing={})
    template = path / "chat_template.jinja"
    if template.exists():  # where transformers puts it since 4.50
        config["chat_template"] = read_text(template)
    model = read_json(path / "config.json")
    generation = read_json(path / "generation_config.json", missing={})
    if generation.get("eos_token_id") is None:
        end = model.get("eos_token_id") or text_config(model, str(path / "config.json")).get("eos_token_id")
        if end is None and not config.get("eos_token"):
            end = end_of_family(model)
        generation["eos_token_id"] = end
    return TokenizerSource(read_text(file, _MAX_TOKENIZER_BYTES), config, generation, read_prompt_format(path), path)
