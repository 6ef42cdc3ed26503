"""A stored model's weights, straight to their places on a mesh.

Each device's part of a weight is cut out of the file, layer by layer, cast, and handed over: what a host holds at a
time besides its devices' parts is one tensor of one layer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from p3o_jax.devices import sharding
from p3o_jax.inputs.errors import one_line, shown
from p3o_jax.models.architecture import TransformerConfig
from p3o_jax.models.stored.contents import StoredModel, StoredTensor
from p3o_jax.models.stored.families import Layout, layouts
from p3o_jax.models.stored.published import text_config
from p3o_jax.models.stored.safetensors_directory import DTYPES
from p3o_jax.models.transformer import abstract_model, weight_specs

_logger = logging.getLogger(__name__)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_VALUES = 2**22
# What published files hold besides weights, and parts of multimodal models that are not the text's.
_NOT_WEIGHTS = ("rotary_emb.inv_freq", "attention.masked_bias", "attention.bias")
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_TEXT_PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.": ""}


def vocab_size_of(stored: StoredModel) -> int:
    """Entries of the embedding, which may be more than there are tokens.

    Raises:
        ValueError: there is no embedding.
    """
    tensors = _weights(stored)
    if EMBEDDING not in tensors:
        raise ValueError(f"{stored.path}: tensor {EMBEDDING} is missing")
    shape = tensors[EMBEDDING].shape
    if len(shape) != 2 or not 1 <= shape[0] < 2**31:
        raise ValueError(f"{stored.path}: tensor {EMBEDDING} is {shown(list(shape))}, not a table of tokens")
    return shape[0]


def load_params(
    stored: StoredModel,
    config: TransformerConfig,
    mesh: Mesh,
    *,
    rules: Mapping[str, str | None] = sharding.LEARNER_RULES,
    dtype: DTypeLike = jnp.float32,
) -> nnx.State:
    """The parameters of `config`, without adapters, as the mesh and the rules place them.

    Called by all processes alike; each reads what its own devices hold.

    Raises:
        ValueError: tensors that are missing, unknown, of another shape or of a type that is not read, all in one.
    """
    vocab_size = vocab_size_of(stored)
    _, abstract = abstract_model(replace(config, lora=None), vocab_size)
    specs = weight_specs(abstract, mesh, rules)
    tensors, table = _weights(stored), layouts(config)
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves_by_name(abstract).items()}
    check(stored, tensors, table, shapes, config)
    if config.tied_embeddings:
        _warn_of_another_head(tensors)
    places = {path: NamedSharding(mesh, spec) for path, spec in leaves_by_name(specs).items()}

    def load(path: tuple[str, ...]) -> jax.Array:
        return _load_weight(tensors, table[path], shapes[path], places[path], jnp.dtype(dtype))

    return jax.tree_util.tree_map_with_path(lambda path, _: load(_names(path)), abstract)


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Of a weight in the parameters: without the key of the value in its variable."""
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def leaves_by_name(tree: Any) -> dict[tuple[str, ...], Any]:
    """The parameters of a tree by their paths, such as (layers, query)."""
    return {_names(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _weights(stored: StoredModel) -> dict[str, StoredTensor]:
    """The text model's tensors under their usual names."""
    found = {}
    for name, tensor in stored.tensors.items():
        if name.endswith(_NOT_WEIGHTS) or name.startswith(_OTHER_PARTS):
            continue
        for prefix, usual in _TEXT_PREFIXES.items():
            if name.startswith(prefix):
                name = usual + name.removeprefix(prefix)
                break
        if name in found:
            raise ValueError(f"{tensor.file}: tensor {one_line(name, 80)} is there under two names")
        found[name] = tensor
    return found


def check(
    stored: StoredModel,
    tensors: Mapping[str, StoredTensor],
    table: Mapping[tuple[str, ...], Layout],
    shapes: Mapping[tuple[str, ...], tuple[int, ...]],
    config: TransformerConfig,
) -> None:
    """Raises one ValueError that names every tensor that does not fit the architecture."""
    wanted: dict[str, tuple[int, ...]] = {}
    for path, layout in table.items():
        if path[0] == "layers":
            shape = stored_shape(shapes[path][1:], layout)
            wanted |= {layout.name.format(layer=i): shape for i in range(config.num_layers)}
        else:
            wanted[layout.name] = stored_shape(shapes[path], layout)
    allowed = set(wanted) | ({HEAD} if config.tied_embeddings else set())
    missing = [f"{name} is missing" for name in wanted if name not in tensors]
    unknown = [f"{one_line(name, 80)} is not a tensor of this architecture" for name in sorted(set(tensors) - allowed)]
    other_shapes, other_types = [], []
    for name in wanted:
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if tensor.shape != wanted[name]:
            found = shown(list(tensor.shape))
            other_shapes.append(f"{name} is {found}, not {list(wanted[name])}, in {tensor.file.name}")
        if tensor.file.suffix == ".safetensors" and tensor.dtype not in DTYPES:
            other_types.append(f"{name} is {tensor.dtype} in {tensor.file.name}; read are {', '.join(DTYPES)}")
    kinds = [kind for kind in (missing, unknown, other_shapes, other_types) if kind]
    problems = sum(map(len, kinds))
    if problems:
        each = 2 if len(kinds) < 3 else 1  # a few of every kind, so that none hides another
        first = [problem for kind in kinds for problem in kind[:each]]
        more = f"; and {problems - len(first)} more" if problems > len(first) else ""
        raise ValueError(f"{stored.path} does not fit its config.json: {'; '.join(first)}{more}")
    said, rows = text_config(stored.config).get("vocab_size"), tensors[EMBEDDING].shape[0]
    if said not in (None, rows):
        raise ValueError(
            f"{stored.path} does not fit its config.json: vocab_size is {shown(said)}, but {EMBEDDING} has {rows} rows"
        )


def _warn_of_another_head(tensors: Mapping[str, StoredTensor]) -> None:
    """A model whose head is its embedding may store one, which says nothing if it is the same."""
    head, embedding = tensors.get(HEAD), tensors[EMBEDDING]
    if head is not None and not _equal(head, embedding):
        _logger.warning(
            f"{head.file}: {HEAD} is another matrix than the embedding, but config.json has tie_word_embeddings true: "
            "the embedding is used as the head, and this one is not"
        )


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same values, of which a few rows are read at a time."""
    if one.shape != other.shape or one.dtype not in DTYPES or other.dtype not in DTYPES:
        return one.shape == other.shape and one.dtype == other.dtype
    first, second = one.read(), other.read()
    rows = max(1, _COMPARED_VALUES // max(1, math.prod(one.shape[1:])))
    return all(
        np.array_equal(first[i : i + rows].astype(np.float64), second[i : i + rows].astype(np.float64), equal_nan=True)
        for i in range(0, one.shape[0], rows)
    )


def stored_shape(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Of one layer's weight in a file."""
    if layout.num_inputs:
        return math.prod(shape[layout.num_inputs :]), math.prod(shape[: layout.num_inputs])
    return (math.prod(shape),) if layout.name.endswith("bias") else shape


def as_ours(array: np.ndarray, shape: tuple[int, ...], layout: Layout) -> np.ndarray:
    """A stored weight as this transformer has it: a view."""
    inputs, outputs = shape[: layout.num_inputs], shape[layout.num_inputs :]
    split = array.reshape(outputs + inputs)
    axes = (*range(len(outputs), len(shape)), *range(len(outputs)))
    return split.transpose(axes)


def as_stored(array: np.ndarray, layout: Layout) -> np.ndarray:
    """The inverse of `as_ours`."""
    axes = (*range(layout.num_inputs, array.ndim), *range(layout.num_inputs))
    return array.transpose(axes).reshape(stored_shape(array.shape, layout))


def _load_weight(
    tensors: Mapping[str, StoredTensor],
    layout: Layout,
    shape: tuple[int, ...],
    place: NamedSharding,
    dtype: np.dtype,
) -> jax.Array:
    layered = "{layer}" in layout.name
    parts: dict[str, np.ndarray] = {}  # of devices that hold the same

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        """What a device holds; None: all."""
        index = tuple(slice(0, size) for size in shape) if index is None else index
        if str(index) not in parts:
            parts[str(index)] = read(index)
        return parts[str(index)]

    def read(index: tuple[slice, ...]) -> np.ndarray:
        if not layered:
            return np.array(as_ours(tensors[layout.name].read(), shape, layout)[index], dtype)
        layers = range(*index[0].indices(shape[0]))
        sizes = [len(range(*cut.indices(size))) for cut, size in zip(index[1:], shape[1:], strict=True)]
        out = np.empty((len(layers), *sizes), dtype)
        for row, layer in enumerate(layers):
            out[row] = as_ours(tensors[layout.name.format(layer=layer)].read(), shape[1:], layout)[index[1:]]
        return out

    return jax.make_array_from_callback(shape, place, part, dtype=dtype)
