"""The architecture of a decoder-only transformer, as numbers: what the families of published models differ in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from p3o_jax.models.lora import Lora
from p3o_jax.models.rope import RopeScaling

DType = Literal["float32", "bfloat16"]
Remat = Literal["full", "dots", "none"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class TransformerConfig:
    """The architecture. Defaults: the quickstart's model, 83,776 parameters with its vocabulary."""

    num_layers: int = 2
    """Transformer blocks."""
    embed_dim: int = 64
    """Width of the residual stream."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 4
    """Key and value heads; divides num_heads."""
    head_dim: int = 16
    """Width of a head."""
    mlp_dim: int = 128
    """Width of the gated MLP."""
    mlp_activation: Activation = "silu"
    """Of the MLP's gate: silu (SwiGLU) or gelu_tanh (Gemma)."""
    rope_theta: float = 10_000.0
    """Base of the rotary embedding's wavelengths."""
    rope_scaling: RopeScaling | None = None
    """How those are stretched to a longer context (`p3o_jax.models.rope`)."""
    norm_epsilon: float = 1e-6
    """Added to the mean square in RMSNorm."""
    norm_offset: bool = False
    """RMSNorm multiplies by 1 + weight (Gemma)."""
    post_norms: bool = False
    """RMSNorm on the outputs of attention and MLP too (Gemma)."""
    qk_norm: bool = False
    """RMSNorm on queries and keys (Qwen3, Gemma 3)."""
    attention_bias: bool = False
    """Biases on the query, key and value projections (Qwen2.5)."""
    attention_out_bias: bool = False
    """A bias on the attention's output projection."""
    query_scale: float | None = None
    """What scores are multiplied by; None: head_dim ** -0.5."""
    attention_softcap: float | None = None
    """Scores are softcap * tanh(scores / softcap) (Gemma 2)."""
    sliding_window: int | None = None
    """Tokens, itself included, that a token attends to in the sliding layers."""
    sliding_layers: tuple[int, ...] = ()
    """The layers, from 0, that attend to the sliding window only; the others see every token before."""
    sliding_rope_theta: float | None = None
    """Base of the wavelengths in the sliding layers, which are then not stretched (Gemma 3); None: as elsewhere."""
    tied_embeddings: bool = False
    """The output head is the embedding."""
    embedding_scale: float = 1.0
    """What embeddings are multiplied by where they enter the first block (Gemma)."""
    logit_softcap: float | None = None
    """Logits are softcap * tanh(logits / softcap) (Gemma 2)."""
    context_tokens: int = 4096
    """Longest sequence, prompt and response together."""
    dtype: DType = "float32"
    """Compute dtype of the learner; parameters are float32."""
    remat: Remat = "full"
    """What the backward pass recomputes of a layer. full: all of it, from its input. dots: all but the products with
    weights, which are kept. none: nothing. From the least memory and most work to the most memory and least work."""
    lora: Lora | None = None
    """Low-rank adapters, which are then all that is trained; None: every weight is."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "context_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads must divide model.num_heads, got {self.num_kv_heads} and {self.num_heads}"
            )
        for name, choices in (
            ("dtype", get_args(DType)),
            ("remat", get_args(Remat)),
            ("mlp_activation", get_args(Activation)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"model.{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim must be even for rotary embeddings, got {self.head_dim}")
        for name in ("query_scale", "attention_softcap", "logit_softcap", "sliding_window", "sliding_rope_theta"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"model.{name} must be positive, got {getattr(self, name)}")
        if self.sliding_layers and self.sliding_window is None:
            raise ValueError("model.sliding_layers needs model.sliding_window")
        if any(not 0 <= layer < self.num_layers for layer in self.sliding_layers):
            raise ValueError(f"model.sliding_layers must be among the {self.num_layers}, got {self.sliding_layers}")
