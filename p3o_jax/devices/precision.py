"""The numeric formats in which the sampler works, apart from the learner's, and which of them a device computes in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp

Format = Literal["float32", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"]
WeightFormat = Literal["float32", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"]
Scales = Literal["tensor", "channel", "block"]
Part = Literal["embedding", "head", "norms"]

DTYPES: Mapping[str, jnp.dtype] = {
    "float32": jnp.dtype(jnp.float32),
    "bfloat16": jnp.dtype(jnp.bfloat16),
    "fp8_e4m3": jnp.dtype(jnp.float8_e4m3fn),
    "fp8_e5m2": jnp.dtype(jnp.float8_e5m2),
    "int8": jnp.dtype(jnp.int8),
    "int4": jnp.dtype(jnp.int4),
}


def has_scales(format: str) -> bool:
    """Whether numbers in this format are kept with scales: the formats below 16 bits."""
    return format not in ("float32", "bfloat16")


@dataclass(frozen=True)
class Precision:
    """What the sampler computes in; a coarser one than the learner's emulates train/rollout mismatch.

    Formats below bfloat16 are symmetric, x = scale * q, with float32 scales taken from the largest magnitude, so that
    nothing overflows. Logits and log-probs are always float32.

    Raises:
        ValueError: an unknown format, part or kind of scales, a block that is not positive, or scales, a block or parts
            for weights that have none.
    """

    weights: WeightFormat = "float32"
    """Format the weights are held in. Below bfloat16 they are quantised from their bfloat16 copy."""
    activations: Format = "float32"
    """Format of what is multiplied with the layers' weights. Below bfloat16 it is quantised as it comes, with a scale
    for each token, and everything else is computed in bfloat16."""
    kv_cache: Format = "float32"
    """Format of stored keys and values. Below bfloat16 with a scale for each token and head."""
    scales: Scales = "channel"
    """What shares a scale of a quantised weight: a layer's whole tensor, an output channel, or block_size inputs of an
    output channel."""
    block_size: int = 32
    """Inputs that share a scale, with scales="block"; products are then computed after dequantisation."""
    include: tuple[Part, ...] = ()
    """Parts that are quantised besides the products of the layers; those left out are bfloat16. A tied embedding is
    the head too."""

    def __post_init__(self) -> None:
        choices = {"weights": WeightFormat, "activations": Format, "kv_cache": Format, "scales": Scales}
        for name, known in choices.items():
            if getattr(self, name) not in get_args(known):
                raise ValueError(
                    f"precision.{name} must be one of {', '.join(get_args(known))}, got {getattr(self, name)!r}"
                )
        if self.block_size < 1:
            raise ValueError(f"precision.block_size must be positive, got {self.block_size}")
        if set(self.include) - set(get_args(Part)):
            raise ValueError(f"precision.include must be among {', '.join(get_args(Part))}, got {self.include}")
        if not has_scales(self.weights) and (self.scales != "channel" or self.include):
            raise ValueError(
                f"precision.scales={self.scales} and precision.include={self.include} are of quantised weights; "
                f"{self.weights} has no scales"
            )
        if self.scales != "block" and self.block_size != 32:
            raise ValueError(f"precision.block_size={self.block_size} needs precision.scales=block, not {self.scales}")

    @property
    def compute(self) -> Literal["float32", "bfloat16"]:
        """The dtype of all that is not quantised: residual stream, norms, attention."""
        return "float32" if self.activations == "float32" else "bfloat16"

    def __str__(self) -> str:
        """weights/activations/kv_cache, as `parse` reads it."""
        kind = {"channel": "", "tensor": "@tensor", "block": f"@{self.block_size}"}[self.scales]
        parts = "".join(f"+{part}" for part in self.include)
        return f"{self.weights}{kind if has_scales(self.weights) else ''}{parts}/{self.activations}/{self.kv_cache}"


def parse(text: str) -> Precision:
    """A precision from a word: WEIGHTS[@tensor | @BLOCK][+PART...][/ACTIVATIONS[/KV_CACHE]].

    What is left out is bfloat16, beside float32 weights float32: `int8` has int8 weights and computes in bfloat16,
    `int8/int8/int8` has everything in int8, `int4@32` has a scale for every 32 weights.

    Raises:
        ValueError: not of this form, or an unknown format.
    """
    weights, *others = text.split("/")
    weights, *include = weights.split("+")
    format, _, scales = weights.partition("@")
    if len(others) > 2 or not (scales in ("", "tensor") or scales.isdecimal()):
        raise ValueError(
            f"precision {text!r} is not of the form WEIGHTS[@tensor | @BLOCK][+PART...][/ACTIVATIONS[/KV_CACHE]]"
        )
    rest = "float32" if format == "float32" else "bfloat16"
    activations, kv_cache = [*others, rest, rest][:2]
    kind, block = {"": ("channel", 32), "tensor": ("tensor", 32)}.get(scales) or ("block", int(scales))
    try:
        return Precision(format, activations, kv_cache, kind, block, tuple(include))  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"precision {text!r}: {error}") from None


_FP8 = frozenset({"fp8_e4m3", "fp8_e5m2"})
# Formats whose products a device's matrix unit computes, by `jax.Device.device_kind`. Elsewhere they are converted
# first: the same numbers, at the speed of the wider format.
NATIVE: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"float32"}),  # XLA:CPU converts 16 bits and fewer to float32 or int32
    # cloud.google.com/tpu/docs, system architecture: the peaks that are stated for each. float32 is bfloat16 passes.
    "TPU v5 lite": frozenset({"bfloat16", "int8"}),
    "TPU v5": frozenset({"bfloat16", "int8"}),
    "TPU v5p": frozenset({"bfloat16", "int8"}),
    "TPU v6 lite": frozenset({"bfloat16", "int8"}),
    "TPU7x": frozenset({"bfloat16"}) | _FP8,
    # NVIDIA's architecture white papers: tensor cores of Ampere, Hopper, Blackwell.
    "NVIDIA A100": frozenset({"float32", "bfloat16", "int8"}),
    "NVIDIA H100": frozenset({"float32", "bfloat16", "int8"}) | _FP8,
    "NVIDIA H200": frozenset({"float32", "bfloat16", "int8"}) | _FP8,
    "NVIDIA GH200": frozenset({"float32", "bfloat16", "int8"}) | _FP8,
    "NVIDIA B200": frozenset({"float32", "bfloat16", "int8"}) | _FP8,
}


def native_formats(device_kind: str) -> frozenset[str] | None:
    """Formats whose products a device computes natively; None if the device is not in the table."""
    matching = [
        kind for kind in NATIVE if device_kind == kind or (kind[:6] == "NVIDIA" and device_kind[: len(kind)] == kind)
    ]
    return NATIVE[max(matching, key=len)] if matching else None


def multiplied_as(precision: Precision) -> tuple[str, str]:
    """The formats of the two sides of a layer's product, activations and weights, as they are multiplied.

    Quantised ones where both are, by numbers of the same kind and with scales that can be taken out of the sum;
    otherwise the quantised side is dequantised first: its rounding is there, its speed is not.
    """
    quantised = has_scales(precision.weights) and has_scales(precision.activations) and precision.scales != "block"
    if quantised and ("int" in precision.weights) == ("int" in precision.activations):
        return precision.activations, precision.weights
    return precision.compute, precision.compute


def describe(precision: Precision, device_kind: str) -> Iterator[str]:
    """What of a precision is native and what is emulated on a device, a line each."""
    native = native_formats(device_kind)
    left, right = multiplied_as(precision)

    def how(*formats: str) -> str:
        if native is None:
            return "unknown device"
        emulated = sorted({format for format in formats if format not in native})
        return f"emulated: no {' or '.join(emulated)} units" if emulated else "native"

    products = f"{left} x {right}" if left != right else left
    formats = f"weights {precision.weights}, activations {precision.activations}"
    yield f"{formats}: multiplied as {products} ({how(left, right)})"
    compute = precision.compute
    stored = "" if precision.kv_cache == compute else f"stored so, read as {compute}; "
    yield f"kv_cache {precision.kv_cache}: {stored}attention in {compute} ({how(compute)})"
