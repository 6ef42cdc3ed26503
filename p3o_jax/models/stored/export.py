"""A model written as `transformers` loads it: safetensors, configuration, tokenizer and generation settings.

Beside them `p3o.json` and `README.md` say how its prompts were made.

Tensors are fetched from the devices and written one at a time, a layer's at that: no more than one is held whole.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from p3o_jax.models.architecture import TransformerConfig
from p3o_jax.models.stored.families import Layout, layouts, write_config
from p3o_jax.models.stored.load import as_stored, leaves_by_name, stored_shape
from p3o_jax.models.stored.safetensors_directory import INDEX
from p3o_jax.tokenizers.char_files import char_tokenizer_files
from p3o_jax.tokenizers.hf import HfTokenizer, tokenizer_files
from p3o_jax.tokenizers.prompt_format import FILE, PromptFormat
from p3o_jax.tokenizers.text import ByteTokenizer, CharTokenizer, Tokenizer

_CODES = {"float32": "F32", "bfloat16": "BF16"}
SHARD_BYTES = 5 * 10**9
"""Values in a file, at most, unless a tensor alone has more."""


class _Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    weight: jax.Array
    layer: int | None
    layout: Layout


def export_model(
    path: Path,
    params: nnx.State,
    config: TransformerConfig,
    tokenizer: Tokenizer,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a model to a new directory. Called by all processes alike; the first one writes.

    Args:
        path: the directory, which appears when everything is in it.
        params: without adapters, on any mesh.
        config: their architecture.
        tokenizer: written along.
        dtype: of the stored weights. bfloat16 rounds them.
        shard_bytes: how much goes into one file.

    Raises:
        FileExistsError: there is something at `path`.
        ValueError: an architecture or a tokenizer that no published family has.
    """
    writes = jax.process_index() == 0
    values = write_config(config, tokenizer.vocab_size)
    values |= {"torch_dtype": dtype, "eos_token_id": list(tokenizer.eos_ids), "bos_token_id": tokenizer.bos_id}
    files = _tokenizer_files(tokenizer)
    prompts = tokenizer.prompt_format if isinstance(tokenizer, HfTokenizer) else PromptFormat(chat=False)
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids)}
    if isinstance(tokenizer, HfTokenizer):
        generation = {**tokenizer.source.generation, **generation}
    files |= {
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
        "config.json": json.dumps(values, indent=2) + "\n",
        FILE: prompts.file(),
        "README.md": prompts.card(),
    }
    partial = path.with_name(path.name + ".partial")
    if writes:
        if path.exists():
            raise FileExistsError(f"{path} exists: give another directory")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _write_tensors(partial if writes else None, list(_tensors(params, config)), dtype, shard_bytes)
    if writes:
        for name, text in files.items():
            (partial / name).write_text(text, encoding="utf-8")
        partial.rename(path)


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    if isinstance(tokenizer, HfTokenizer):
        return tokenizer_files(tokenizer)
    if isinstance(tokenizer, CharTokenizer | ByteTokenizer):
        return char_tokenizer_files(tokenizer)
    raise ValueError(f"a tokenizer of type {type(tokenizer).__name__} has no files that transformers loads")


def _tensors(params: nnx.State, config: TransformerConfig) -> Iterator[_Tensor]:
    """Every stored tensor: first the embedding, then layer after layer."""
    table = layouts(config)
    weights: dict[tuple[str, ...], Any] = leaves_by_name(params)
    layered = {path: layout for path, layout in table.items() if path[0] == "layers"}
    for path in sorted(table.keys() - layered.keys()):
        yield _Tensor(
            table[path].name, stored_shape(weights[path].shape, table[path]), weights[path], None, table[path]
        )
    for layer in range(config.num_layers):
        for path, layout in layered.items():
            shape = stored_shape(weights[path].shape[1:], layout)
            yield _Tensor(layout.name.format(layer=layer), shape, weights[path], layer, layout)


def _write_tensors(directory: Path | None, tensors: list[_Tensor], dtype: str, shard_bytes: int) -> None:
    """`directory` None: take part in fetching, without writing."""
    width = jnp.dtype(dtype).itemsize
    shards: list[list[_Tensor]] = [[]]
    room = shard_bytes
    for tensor in tensors:
        size = math.prod(tensor.shape) * width
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= size
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        if directory is None:
            for tensor in shard:
                _fetch(tensor, dtype)
            continue
        with open(directory / name, "wb") as file:
            _write_file(file, shard, dtype)
    if directory is not None and len(shards) > 1:
        total = sum(math.prod(tensor.shape) for tensor in tensors)
        where = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index: Mapping[str, Any] = {"metadata": {"total_size": total * width}, "weight_map": where}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(file: BinaryIO, tensors: list[_Tensor], dtype: str) -> None:
    """One safetensors file: its header, then the values one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        end = start + math.prod(tensor.shape) * jnp.dtype(dtype).itemsize
        header[tensor.name] = {"dtype": _CODES[dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors:
        np.ascontiguousarray(as_stored(_fetch(tensor, dtype), tensor.layout)).tofile(file)


def _fetch(tensor: _Tensor, dtype: str) -> np.ndarray:
    """One layer's weight, from wherever its parts are."""
    place = getattr(tensor.weight.sharding, "mesh", None)
    whole = tensor.weight.sharding if place is None else NamedSharding(place, PartitionSpec())
    if tensor.layer is None:
        fetch = jax.jit(lambda weight: weight.astype(dtype), out_shardings=whole)
        return np.asarray(fetch(tensor.weight).addressable_data(0))
    return np.asarray(_layer_fetcher(dtype, whole)(tensor.weight, jnp.int32(tensor.layer)).addressable_data(0))


@functools.lru_cache
def _layer_fetcher(dtype: str, place: Any) -> Any:
    """(stacked weight, layer) -> that layer's, everywhere whole; compiled once a shape."""
    return jax.jit(
        lambda weight, layer: jax.lax.dynamic_index_in_dim(weight, layer, keepdims=False).astype(dtype),
        out_shardings=place,
    )
