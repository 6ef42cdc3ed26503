"""The user's cache directory, and in it the compilation cache: a second run of the same program starts at once."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def cache_directory() -> Path:
    """The user's cache directory of this package: p3o_jax under $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "p3o_jax")


def enable_compilation_cache() -> Path:
    """Keeps compiled programs in the user's cache directory; call it before anything compiles.

    The directory is $JAX_COMPILATION_CACHE_DIR if set, else p3o_jax/xla under $XDG_CACHE_HOME or ~/.cache.

    Returns:
        The directory.
    """
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not directory:
        directory = str(cache_directory() / "xla")
    jax.config.update("jax_compilation_cache_dir", directory)
    # The default of 1 s leaves out most of what tests and small models compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    return Path(directory)
