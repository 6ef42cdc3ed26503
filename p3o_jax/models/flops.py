"""Floating-point operations of an update, counted from the configuration.

A multiplication with its addition is two operations. Only products of matrices are counted, at every position of
the compiled rows, padding included. `cost_analysis()` of a compiled program is no substitute: it leaves out kernels.
"""

from __future__ import annotations

from typing import NamedTuple

from p3o_jax.models.transformer import TransformerConfig


class ForwardFlops(NamedTuple):
    """Of one forward pass over `rows` rows of `tokens` tokens."""

    layers: int  # products with weights
    attention: int  # scores and weighted values, causal: half of all pairs
    head: int  # hidden states to logits

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def forward_flops(config: TransformerConfig, vocab_size: int, rows: int, tokens: int) -> ForwardFlops:
    """Of one forward pass.

    Per token: 2 D (N + 2 K) H for queries, keys and values, 2 N H D for the attention's output, 6 D F for the MLP and
    2 D V for the head; per pair of tokens of a row 4 N H. D width, N query heads, K key and value heads, H head size,
    F MLP width, V vocabulary.
    """
    c = config
    projections = c.embed_dim * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    per_token = 2 * (projections + 3 * c.embed_dim * c.mlp_dim)
    pairs = tokens * (tokens + 1) // 2
    return ForwardFlops(
        layers=c.num_layers * per_token * rows * tokens,
        attention=c.num_layers * 4 * c.num_heads * c.head_dim * pairs * rows,
        head=2 * c.embed_dim * vocab_size * rows * tokens,
    )


def training_flops(config: TransformerConfig, vocab_size: int, rows: int, tokens: int) -> int:
    """Counts one forward and backward pass: what a utilisation is quoted of.

    The backward pass of a product costs it twice more, once for the gradient of its input and once for that of its
    weight; a frozen weight has none of its own. So three forward passes in all, and with adapters two of the products
    with weights, three of attention, and three of the adapters' own: 2 r (inputs + outputs) a token and layer forward.
    """
    forward, c = forward_flops(config, vocab_size, rows, tokens), config
    if c.lora is None:
        return 3 * forward.total
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    sizes = {"query": heads, "key": kv_heads, "value": kv_heads, "attention_out": heads}
    widths = sum(c.embed_dim + sizes.get(target, c.mlp_dim) for target in c.lora.targets)
    adapters = c.num_layers * 2 * c.lora.rank * widths * rows * tokens
    return 2 * (forward.layers + forward.head) + 3 * (forward.attention + adapters)


class UpdateFlops(NamedTuple):
    """Of one optimizer update, over all devices."""

    model: int  # forward and backward: what a utilisation is quoted of
    recomputed: int  # forward again in the backward pass, for memory
    extra_passes: int  # gradient-free passes for batch statistics

    @property
    def total(self) -> int:
        """What is computed in fact."""
        return sum(self)


def update_flops(
    config: TransformerConfig, vocab_size: int, rows: int, tokens: int, *, extra_passes: int = 0
) -> UpdateFlops:
    """Of one update on `rows` rows of `tokens` tokens.

    Before the backward pass, logits are computed once more, and the layers too, as far
    as `config.remat` does not save them.

    Args:
        extra_passes: gradient-free forward passes before it.
    """
    forward = forward_flops(config, vocab_size, rows, tokens)
    again = {"none": 0, "dots": forward.attention, "full": forward.layers + forward.attention}
    return UpdateFlops(
        model=training_flops(config, vocab_size, rows, tokens),
        recomputed=again[config.remat] + forward.head,
        extra_passes=extra_passes * forward.total,
    )
