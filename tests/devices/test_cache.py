from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import jax, jax.numpy as jnp
from p3o_jax.devices.cache import enable_compilation_cache
print(enable_compilation_cache())
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((3, 3)))
"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HOME": "home", "XDG_CACHE_HOME": ""}, "home/.cache/p3o_jax/xla"),
        ({"HOME": "home", "XDG_CACHE_HOME": "cache"}, "cache/p3o_jax/xla"),
        ({"HOME": "home", "JAX_COMPILATION_CACHE_DIR": "chosen"}, "chosen"),
    ],
)
def test_programs_are_kept_where_the_user_keeps_caches(tmp_path, variables, expected):
    clean = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    places = {key: value and str(tmp_path / value) for key, value in variables.items()}
    command = [sys.executable, "-c", PROGRAM]
    environment = {**clean, "JAX_PLATFORMS": "cpu", **places}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert Path(result.stdout.strip()) == tmp_path / expected
    assert any((tmp_path / expected).iterdir())
