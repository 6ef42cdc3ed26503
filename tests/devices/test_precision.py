"""Precisions as words, what is refused, and what a device computes natively."""

from __future__ import annotations

import pytest

from p3o_jax.devices.precision import DTYPES, Precision, describe, parse


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("float32", Precision()),
        ("bfloat16", Precision("bfloat16", "bfloat16", "bfloat16")),
        ("int8", Precision("int8", "bfloat16", "bfloat16")),
        ("int8/int8", Precision("int8", "int8", "bfloat16")),
        ("fp8_e5m2/fp8_e5m2/fp8_e5m2", Precision("fp8_e5m2", "fp8_e5m2", "fp8_e5m2")),
        ("int4@16/float32", Precision("int4", "float32", "bfloat16", "block", 16)),
        (
            "fp8_e4m3@tensor+head+norms/bfloat16/int8",
            Precision("fp8_e4m3", "bfloat16", "int8", "tensor", include=("head", "norms")),
        ),
    ],
)
def test_a_word_says_a_precision(text, precision):
    assert parse(text) == precision
    assert parse(str(precision)) == precision


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp8", "precision.weights must be one of float32, bfloat16, fp8_e4m3, fp8_e5m2, int8, int4, got 'fp8'"),
        ("int8/int4", "precision.activations must be one of .* got 'int4'"),
        ("int8/int8/int4", "precision.kv_cache must be one of"),
        ("int8@row", "is not of the form"),
        ("int8@0", "precision.block_size must be positive"),
        ("bfloat16@16", "precision.scales=block and precision.include=.* bfloat16 has no scales"),
        ("float32+head", "are of quantised weights; float32 has no scales"),
        ("int8+tail", "precision.include must be among embedding, head, norms"),
        ("int8/int8/int8/int8", "is not of the form"),
    ],
)
def test_nonsense_is_refused_by_field(text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(text)
    assert repr(text) in str(error.value)


def test_every_format_has_a_dtype():
    from typing import get_args

    from p3o_jax.devices.precision import Format, WeightFormat

    assert set(DTYPES) == set(get_args(WeightFormat)) >= set(get_args(Format))


@pytest.mark.parametrize(
    ("text", "device", "products", "cache"),
    [
        ("float32", "cpu", "float32 (native)", "attention in float32 (native)"),
        ("int8/int8/int8", "cpu", "int8 (emulated: no int8 units)", "stored so, read as bfloat16"),
        ("int8/int8", "TPU v5 lite", "int8 (native)", "attention in bfloat16 (native)"),
        ("fp8_e4m3/fp8_e4m3", "TPU v6 lite", "fp8_e4m3 (emulated: no fp8_e4m3 units)", "native"),
        ("fp8_e4m3/fp8_e4m3", "TPU7x", "fp8_e4m3 (native)", "native"),
        ("fp8_e4m3/fp8_e5m2", "NVIDIA H100 80GB HBM3", "fp8_e5m2 x fp8_e4m3 (native)", "native"),
        ("int4/int8", "NVIDIA H200", "int8 x int4 (emulated: no int4 units)", "native"),
        # Formats that do not go together, and weights alone, are multiplied in the compute dtype.
        ("fp8_e4m3/int8", "NVIDIA H200", "bfloat16 (native)", "native"),
        ("int4", "TPU v5 lite", "bfloat16 (native)", "native"),
        ("int8@128/int8", "NVIDIA H200", "bfloat16 (native)", "native"),
        ("int8/int8", "Some device", "int8 (unknown device)", "unknown device"),
    ],
)
def test_what_a_device_computes_is_said(text, device, products, cache):
    of_products, of_cache = describe(parse(text), device)
    assert of_products.endswith(f"multiplied as {products}")
    assert cache in of_cache
