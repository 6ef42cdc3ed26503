"""Checks the package's annotations while tests run: types, and the shapes and dtypes of arrays, which mypy cannot see.

To be imported before the package, as `conftest.py` and the programs that tests start do. An axis has one size within a
call: `Float[Array, "B T"]` beside `Bool[Array, "B T"]` says that the two go together. Fields of named tuples are not
checked, since the same tuples hold shardings and shapes where these are described.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOBase
from typing import TextIO

from beartype import BeartypeConf, FrozenDict, beartype
from jaxtyping import config, install_import_hook

check = beartype(
    conf=BeartypeConf(
        is_pep484_tower=True,  # an int is a float, as it is for mypy
        hint_overrides=FrozenDict({TextIO: TextIOBase}),  # the first wants a buffer, which StringIO has not
    )
)
install_import_hook("p3o_jax", f"{__name__}.check")


@contextmanager
def unchecked() -> Iterator[None]:
    """Lets calls through whose annotations do not hold, to see what the package itself says of them."""
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", False)
