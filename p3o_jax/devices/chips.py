"""What one device has, by its manufacturer: memory, and operations a second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """One device, as JAX counts devices."""

    memory_gib: float  # of HBM, as stated; XLA keeps a little for itself
    peak_flops: float  # bfloat16 with float32 accumulation, dense, per second


# By `jax.Device.device_kind`. A CPU is not here: nobody states a peak that its products of matrices could reach.
CHIPS = {
    # cloud.google.com/tpu/docs, system architecture
    "TPU v5 lite": Chip(16, 197e12),
    "TPU v5": Chip(95, 459e12),
    "TPU v5p": Chip(95, 459e12),
    "TPU v6 lite": Chip(32, 918e12),
    "TPU7x": Chip(96, 1153.5e12),  # one of a chip's two devices
    # NVIDIA's data sheets; without sparsity, which doubles what they print
    "NVIDIA A100-SXM4-40GB": Chip(40, 312e12),
    "NVIDIA A100-SXM4-80GB": Chip(80, 312e12),
    "NVIDIA H100 80GB HBM3": Chip(80, 989.4e12),
    "NVIDIA H200": Chip(141, 989.4e12),
}
