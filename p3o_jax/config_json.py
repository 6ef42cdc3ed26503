"""Dataclasses as JSON and back, where JSON names classes: which of them are looked up, and which are not.

A field whose type is open (a task, an objective) is stored with the class it holds, as `module:Class`, so that an
experiment's own objective reloads like a built-in one. Reading such a file imports the module, which runs it. Free are
this package's modules, and classes that the running program has already; any other module has to be trusted by name,
and so has that of a reward that is a `Function`.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Collection
from functools import partial
from types import ModuleType, UnionType
from typing import Any, get_args

import cattrs
import cattrs.gen
from cattrs import transform_error
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.strategies import configure_union_passthrough
from cattrs.v import format_exception

from p3o_jax import program
from p3o_jax.rewards.base import Function

CLASS = "class"
_PACKAGE = __name__.partition(".")[0]
_MOVED = {"p3o_jax.advantages": "p3o_jax.batch.advantages"}
"""Modules that earlier versions stored under another name."""


class UntrustedError(ValueError):
    """A file names a module that nobody has said to trust."""


def make_converter(open_types: Collection[Any], trusted: Collection[str] = ()) -> cattrs.Converter:
    """What turns dataclasses into JSON values and back.

    Args:
        open_types: fields of these types hold any dataclass derived from them; of a union of classes, which is open to
            functions of one's own, any that is called as they are.
        trusted: modules, or packages of them, that may be imported besides this package's.
    """
    converter = cattrs.Converter(forbid_extra_keys=True)

    def is_open(cls: Any) -> bool:
        return cls in open_types

    def unstructure(value: Any) -> dict[str, Any]:
        cls = type(value)
        module = cls.__module__
        if module == "__main__":  # an experiment that defines it
            module = program.module_name() or module
        fields = cattrs.gen.make_dict_unstructure_fn(cls, converter)(value)
        return {CLASS: f"{module}:{cls.__qualname__}", **fields}

    def structure(data: Any, kind: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get(CLASS), str):
            raise TypeError(f"an object with the name of a {_name(kind)} as its {CLASS!r} is wanted")
        fields = dict(data)
        cls = find_class(fields.pop(CLASS), kind, trusted)
        if issubclass(cls, Function):
            _check_trusted(str(fields.get("path")).partition(":")[0], str(fields.get("path")), trusted)
        return cattrs.gen.make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True)(fields, cls)

    converter.register_unstructure_hook_func(is_open, unstructure)
    converter.register_structure_hook_func(is_open, structure)
    for kind, others in ((bool, ()), (int, ()), (float, (int,)), (str, ())):
        converter.register_structure_hook(kind, partial(_exactly, kind, others))
    configure_union_passthrough(bool | int | float | str, converter)  # settings of a task, which JSON tells apart
    return converter


def find_class(path: str, kind: Any, trusted: Collection[str]) -> type:
    """The dataclass that `module:Class` names.

    Raises:
        UntrustedError: its module would have to be imported, and is not trusted.
        ValueError: there is no such class, or it is no dataclass of this kind.
    """
    module, _, name = path.partition(":")
    module = _MOVED.get(module, module)
    loaded = sys.modules.get("__main__" if module == program.module_name() else module)
    cls = vars(loaded).get(name) if isinstance(loaded, ModuleType) else None
    if cls is None:
        if not f"{module}.".startswith(f"{_PACKAGE}."):
            _check_trusted(module, path, trusted)
        try:
            cls = vars(importlib.import_module(module)).get(name)
        except (ImportError, ValueError, TypeError) as error:
            where = "; run p3o where it can be found" if isinstance(error, ModuleNotFoundError) else ""
            raise ValueError(f"cannot import {module!r}, for {path}: {error}{where}") from error
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls) and _is_kind(cls, kind)):
        raise ValueError(f"{path} is not a dataclass of the kind {_name(kind)}")
    return cls


def _is_kind(cls: type, kind: Any) -> bool:
    ours = f"{cls.__module__}.".startswith(f"{_PACKAGE}.")
    return issubclass(cls, kind) or (isinstance(kind, UnionType) and not ours and "__call__" in dir(cls))


def _name(kind: Any) -> str:
    return " or ".join(one.__name__ for one in get_args(kind)) or kind.__name__


def _check_trusted(module: str, what: str, trusted: Collection[str]) -> None:
    if any(f"{module}.".startswith(f"{name}.") for name in trusted):
        return
    if module == program.module_name():  # the experiment that runs
        return
    if module == "__main__":
        raise ValueError(f"{what!r} was defined where nothing has a name, as in a notebook: it cannot be found again")
    if not all(part.isidentifier() for part in module.split(".")):  # nothing to be copied into a command line
        raise ValueError(f"there can be no module {module!r}")
    raise UntrustedError(
        f"{what!r} is not this package's, and reading it would run the module {module}: if you trust that, "
        f"give --trust {module}"
    )


def _exactly(kind: type, others: tuple[type, ...], value: Any, _: Any) -> Any:
    """A JSON value of a kind; 2.5 is not rounded to a whole number, and "no" is not true."""
    if type(value) is not kind and type(value) not in others:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return kind(value)


def structured(converter: cattrs.Converter, data: Any, kind: Any, name: str = "config") -> Any:
    """A value of a type out of JSON values.

    Raises:
        UntrustedError: a module that is not trusted would have to be imported.
        ValueError: an unknown field, a missing class or a value of the wrong type, with its path.
    """
    try:
        return converter.structure(data, kind)
    except Exception as error:
        reasons = transform_error(error, name, _reason)
        if not _is_untrusted(error):
            raise ValueError("; ".join(reasons)) from error
        # The place first: the flag to add is the last word.
        places = (reason.rpartition(" @ ") for reason in reasons)
        raise UntrustedError("; ".join(f"{place}: {what}" for what, _, place in places)) from error


def _reason(error: BaseException, expected: Any) -> str:
    if isinstance(error, ForbiddenExtraKeysError | UntrustedError):
        return str(error)
    return f"{format_exception(error, expected)}: {error}"


def _is_untrusted(error: BaseException) -> bool:
    return isinstance(error, UntrustedError) or any(map(_is_untrusted, getattr(error, "exceptions", ())))
