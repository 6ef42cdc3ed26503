"""RoPE as a `config.json` describes it: under `rope_scaling`, or since transformers 5 under `rope_parameters`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p3o_jax.models.rope import LinearRope, Llama3Rope, RopeScaling, YarnRope

_DEFAULT_THETA = 10_000.0


def read_rope(values: Mapping[str, Any], where: object) -> tuple[float, RopeScaling | None, float | None]:
    """theta, its scaling, and the theta of sliding layers where that is another; both ways of writing them."""
    parameters = values.get("rope_parameters") or {}
    sliding: Mapping[str, Any] = {}
    if "full_attention" in parameters:  # one a type of layer
        sliding, parameters = parameters.get("sliding_attention") or {}, parameters["full_attention"]
    scaling = {**(values.get("rope_scaling") or {}), **parameters}
    gemma3 = values["model_type"] == "gemma3_text"
    theta = scaling.get("rope_theta", values.get("rope_theta", 1e6 if gemma3 else _DEFAULT_THETA))
    context = values.get("max_position_embeddings", 4096)
    sliding_theta = None
    if gemma3:
        if sliding.get("rope_type", "default") != "default":
            raise ValueError(f"{where}: RoPE scaling of sliding layers is not implemented")
        sliding_theta = float(sliding.get("rope_theta", values.get("rope_local_base_freq", _DEFAULT_THETA)))
    return float(theta), _scaling(scaling, context, where), sliding_theta


def _scaling(scaling: Mapping[str, Any], context: int, where: object) -> RopeScaling | None:
    """Published names of scalings, each with its own fields."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    original = scaling.get("original_max_position_embeddings") or context
    # Dynamic scaling changes nothing up to max_position_embeddings, which is as far as a context goes here: beyond it,
    # keys of one sequence would be rotated by different frequencies, depending on when they were cached.
    if kind in ("default", "dynamic"):
        return None
    try:
        if kind == "linear":
            return LinearRope(float(scaling["factor"]))
        if kind == "llama3":
            low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
            return Llama3Rope(float(scaling["factor"]), low, high, original)
        if kind == "yarn":
            if scaling.get("mscale") or scaling.get("mscale_all_dim") or not scaling.get("truncate", True):
                raise ValueError(f"{where}: yarn with mscale or without truncation is not implemented")
            factor = scaling.get("factor") or context / original
            fast, slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)
            return YarnRope(float(factor), original, fast, slow, scaling.get("attention_factor"))
    except KeyError as error:
        raise ValueError(f"{where}: RoPE scaling {kind!r} has no {error.args[0]}") from None
    raise ValueError(f"{where}: RoPE scaling {kind!r} is not implemented: linear, llama3, yarn, dynamic are")


def write_scaling(scaling: RopeScaling) -> dict[str, Any]:
    """The inverse, as `rope_scaling`."""
    match scaling:
        case LinearRope():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Llama3Rope():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                "original_max_position_embeddings": scaling.original_context_tokens,
            }
        case YarnRope():
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "original_max_position_embeddings": scaling.original_context_tokens,
                "attention_factor": scaling.attention_factor,
            }
    raise ValueError(f"RoPE scaling {type(scaling).__name__} has no published name")
