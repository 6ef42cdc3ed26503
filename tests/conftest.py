"""All tests: annotations are checked, 8 virtual CPU devices, no implicit dtype promotion, compiled programs kept."""

from __future__ import annotations

import os

import jax
import pytest

from tests.annotations import unchecked  # isort: skip  # before the package
from p3o_jax.devices.cache import enable_compilation_cache

# Before anything asks for a device. Tests compile far more than they compute, and XLA:CPU spends most of that on code
# generation: a third of it is left without optimisation and without the emitters of fusions.
_FAST_COMPILATION = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *_FAST_COMPILATION))
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
enable_compilation_cache()


@pytest.fixture(name="unchecked")
def _unchecked():
    """Annotations are not checked: wrong arguments reach the package, which has to refuse them itself."""
    with unchecked():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first, so that at the end no worker is left alone with one."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
