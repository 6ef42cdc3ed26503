"""RoPE as a `config.json` describes it: under `rope_scaling`, or since transformers 5 under `rope_parameters`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p3o_jax.inputs.errors import shown
from p3o_jax.inputs.kinds import Kind, Maybe, checked, flag, table, text
from p3o_jax.models.rope import LinearRope, Llama3Rope, RopeScaling, YarnRope
from p3o_jax.models.stored.published import CONTEXT, POSITIVE, THETA, Published

_KINDS: dict[str, Kind] = {
    "rope_type": text,
    "type": text,
    "rope_theta": THETA,
    "factor": Maybe(POSITIVE),
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "beta_fast": Maybe(POSITIVE),
    "beta_slow": Maybe(POSITIVE),
    "attention_factor": Maybe(POSITIVE),
    "original_max_position_embeddings": Maybe(CONTEXT),
    "truncate": flag,
}
_BY_LAYER = ("full_attention", "sliding_attention")


def read_rope(published: Published) -> tuple[float, RopeScaling | None, float | None]:
    """theta, its scaling, and the theta of sliding layers where that is another; both ways of writing them.

    Raises:
        ValueError: a field that is missing or of the wrong kind, or a scaling that is not implemented.
    """
    old, new = published["rope_scaling"] or {}, published["rope_parameters"] or {}
    if published.family == "gemma3_text":
        return _by_layer(published, old, new)
    by_layer = [name for name in _BY_LAYER if name in new]
    if by_layer:
        where = f"{published.where}: rope_parameters.{by_layer[-1]}"
        raise ValueError(f"{where} is of a type of layer, which is not implemented for {published.family}")
    # As transformers decides it where both are there.
    place, values = ("rope_scaling", old) if old else ("rope_parameters", new)
    values = _checked(values, published, place)
    theta = values.get("rope_theta", published["rope_theta"])
    return theta, _scaling(values, theta, published, place), None


def _by_layer(published: Published, old: Mapping[str, Any], new: Mapping[str, Any]) -> Any:
    """Gemma 3's, whose sliding layers have a theta of their own; `rope_scaling` is that of the others."""
    if new and not any(name in new for name in _BY_LAYER):
        raise ValueError(f"{published.where}: rope_parameters has neither {' nor '.join(_BY_LAYER)}")
    parts = []
    for name in _BY_LAYER:
        part = checked(new.get(name), Maybe(table), published.where, f"rope_parameters.{name}") or {}
        parts.append(_checked(part, published, f"rope_parameters.{name}"))
    full, sliding = parts[0] | _checked(old, published, "rope_scaling"), parts[1]
    if sliding.get("rope_type", sliding.get("type", "default")) != "default":
        raise ValueError(f"{published.where}: RoPE scaling of sliding layers is not implemented")
    theta = full.get("rope_theta", published["rope_theta"])
    sliding_theta = sliding.get("rope_theta", published["rope_local_base_freq"])
    return theta, _scaling(full, theta, published, "rope_scaling"), sliding_theta


def _checked(values: Mapping[str, Any], published: Published, place: str) -> dict[str, Any]:
    """The fields of a scaling, each of its kind; null where it means that there is none is left out."""
    if values.get("partial_rotary_factor") not in (None, 1.0):
        raise published.refuse(f"{place}.partial_rotary_factor", values["partial_rotary_factor"])
    found = {
        name: checked(values[name], kind, published.where, f"{place}.{name}")
        for name, kind in _KINDS.items()
        if name in values
    }
    return {name: value for name, value in found.items() if value is not None} | {
        name: values[name] for name in ("mscale", "mscale_all_dim") if name in values
    }


def _scaling(values: Mapping[str, Any], theta: float, published: Published, place: str) -> RopeScaling | None:
    """Published names of scalings, each with its own fields."""
    kind = values.get("rope_type", values.get("type", "default"))
    context = published["max_position_embeddings"]
    original = values.get("original_max_position_embeddings", context)

    def need(name: str) -> Any:
        if name not in values:
            raise ValueError(f"{published.where}: RoPE scaling {shown(kind)} has no {name}")
        return values[name]

    # Dynamic scaling changes nothing up to max_position_embeddings, which is as far as a context goes here: beyond it,
    # keys of one sequence would be rotated by different frequencies, depending on when they were cached.
    if kind in ("default", "dynamic"):
        return None
    if kind == "linear":
        return LinearRope(need("factor"))
    if kind == "llama3":
        low, high = need("low_freq_factor"), need("high_freq_factor")
        if not low < high:
            raise ValueError(f"{published.where}: {place}.low_freq_factor {low} is not below high_freq_factor {high}")
        return Llama3Rope(need("factor"), low, high, original)
    if kind == "yarn":
        if values.get("mscale") or values.get("mscale_all_dim") or not values.get("truncate", True):
            raise ValueError(f"{published.where}: yarn with mscale or without truncation is not implemented")
        factor = values.get("factor", context / original)
        fast, slow = values.get("beta_fast", 32.0), values.get("beta_slow", 1.0)
        return YarnRope(factor, original, fast, slow, values.get("attention_factor"))
    raise ValueError(
        f"{published.where}: RoPE scaling {shown(kind)} is not implemented: linear, llama3, yarn, dynamic are"
    )


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
