"""Models as published on the Hugging Face hub: a directory of `config.json`, safetensors and a tokenizer.

A safetensors file is eight bytes N, a JSON header of N bytes with every tensor's type, shape and place, and the
values (github.com/huggingface/safetensors). Tensors are memory-mapped one at a time: a page that was read for one is
not held while the next is read.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from p3o_jax.models.stored.contents import StoredModel, StoredTensor
from p3o_jax.tokenizers.source import TokenizerSource

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
"""Types that weights can be read from."""
_BITS = {"BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32}
_BITS |= {"F16": 16, "BF16": 16, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64}
INDEX = "model.safetensors.index.json"
"""Which file each tensor is in, where there are several."""


def open_directory(path: Path) -> StoredModel:
    """The model in a directory.

    Raises:
        FileNotFoundError: a file that it needs is not there.
        ValueError: a file that is damaged, in one line.
    """
    return StoredModel(
        path=path,
        config=read_json(path / "config.json"),
        tensors=_tensors(path),
        tokenizer=cache(partial(tokenizer_source, path)),
    )


def read_json(path: Path, missing: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A file's JSON object; `missing` if there is no such file, or else an error.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a JSON object.
    """
    if not path.exists():
        if missing is None:
            raise FileNotFoundError(f"{path.parent} has no {path.name}")
        return dict(missing)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object")
    return values


def _tensors(path: Path) -> dict[str, StoredTensor]:
    index = read_json(path / INDEX, missing={})
    if index:
        files = sorted(set(index["weight_map"].values()))
        absent = [name for name in files if not (path / name).exists()]
        if absent:
            raise FileNotFoundError(f"{path / INDEX} names files that are not there: {', '.join(absent)}")
    else:
        files = sorted(file.name for file in path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{path} has no safetensors files (other formats, such as .bin, are not read)")
    return _merged(read_header(path / name) for name in files)


def _merged(parts: Iterable[Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    merged: dict[str, StoredTensor] = {}
    for part in parts:
        for name, tensor in part.items():
            if name in merged:
                raise ValueError(f"tensor {name} is in {merged[name].file.name} and again in {tensor.file}")
            merged[name] = tensor
    return merged


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, none of them read yet.

    Raises:
        ValueError: the file is truncated or is no safetensors file.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{file} is truncated or is not a safetensors file: {size} bytes; fetch it again")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            found = {
                name: _tensor(file, name, 8 + length, entry["dtype"], tuple(entry["shape"]), entry["data_offsets"])
                for name, entry in header.items()
            }
            ends = [8 + length + entry["data_offsets"][1] for entry in header.values()]
        except (AttributeError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{file} is not a safetensors file: its header does not read: {error}") from error
    if max(ends, default=0) > size:
        raise ValueError(f"{file} is truncated: {size} bytes, but its header needs {max(ends)}; fetch it again")
    return found


def _tensor(
    file: Path, name: str, base: int, dtype: str, shape: tuple[int, ...], offsets: tuple[int, int]
) -> StoredTensor:
    start, end = offsets
    if dtype in _BITS and (end - start) * 8 != math.prod(shape) * _BITS[dtype]:
        raise ValueError(
            f"{file}: tensor {name}, {dtype} {list(shape)}, has {end - start} bytes, which is not its size"
        )

    def read() -> np.ndarray:
        if end == start:
            return np.zeros(shape, DTYPES[dtype])
        # A map of this tensor alone: its pages go when the array does.
        return np.memmap(file, DTYPES[dtype], "r", base + start, shape)

    return StoredTensor(file, shape, dtype, read)


def tokenizer_source(path: Path) -> TokenizerSource:
    """What a directory says of its tokenizer.

    Raises:
        FileNotFoundError: there is no tokenizer.json.
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
        config["chat_template"] = template.read_text(encoding="utf-8")
    model = read_json(path / "config.json")
    generation = read_json(path / "generation_config.json", missing={})
    of_model = model.get("eos_token_id") or model.get("text_config", {}).get("eos_token_id")
    if generation.get("eos_token_id") is None and of_model is not None:
        generation["eos_token_id"] = of_model
    return TokenizerSource(file.read_text(encoding="utf-8"), config, generation)
