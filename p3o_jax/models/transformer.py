"""A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, gated MLP.

Llama, Qwen and Gemma are configurations of it (`p3o_jax.models.architecture`). Each weight is declared once with
its shape and logical axes (`p3o_jax.devices.sharding` maps those to the mesh). The layers'
weights are stacked along a leading axis and the layers are a `scan`.

Letters: B rows, T tokens, S cache slots, L layers, D embedding, N query heads, K key
and value heads, H head size, F MLP width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from p3o_jax.devices import sharding
from p3o_jax.devices.precision import Format
from p3o_jax.models import lora as lora_lib
from p3o_jax.models import quantised
from p3o_jax.models.architecture import TransformerConfig
from p3o_jax.models.attention import AttentionForm, cached_attention, causal_attention
from p3o_jax.models.kv_cache import KVCache, slot_buckets
from p3o_jax.models.log_probs import softcapped
from p3o_jax.models.rope import rope_frequencies, rotate

# What `jax.checkpoint` keeps of a layer. Attention's products have a batch axis, and are recomputed; so are the weights
# gathered over `fsdp`, unless nothing is.
_KEPT: Mapping[str, Callable[..., bool]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "none": jax.checkpoint_policies.everything_saveable,
}
_ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def _weight(
    rngs: nnx.Rngs,
    shape: Sequence[int],
    axes: Sequence[str],
    fan_in: int | None = None,
    layers: int | None = None,
    constant: float = 1.0,
) -> nnx.Param:
    """A float32 weight with its logical axes: normal with variance 1/fan_in, or constant where there is no fan-in."""
    if layers is not None:
        shape, axes = (layers, *shape), ("layers", *axes)
    if fan_in is None:
        value = jnp.full(shape, constant, jnp.float32)
    else:
        value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(value, logical_axes=tuple(axes))


def _use(param: nnx.Param, dtype: jnp.dtype, *, stacked: bool = True) -> Array:
    """A weight as it is multiplied: in the compute dtype, gathered over `fsdp` if it is the learner's."""
    if isinstance(param.get_value(), qwix.QArray):
        return quantised.dequantised(param.get_value(), dtype)
    axes = param.get_metadata()["logical_axes"]
    return sharding.gather_weight(param[...], axes[1:] if stacked else axes, dtype)


def _rms_norm(x: Float[Array, "... D"], weight: nnx.Param, config: TransformerConfig) -> Float[Array, "... D"]:
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + config.norm_epsilon)
    scale = quantised.dequantised(weight.get_value(), jnp.float32)
    return (normed * (1.0 + scale if config.norm_offset else scale)).astype(x.dtype)


class _Layers(nnx.Module):
    """The weights of all blocks, stacked; merged with one layer's slice inside the scan it is one block."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, activations: Format | None):
        c, layers = config, config.num_layers
        self.config, self.activations = config, activations or config.dtype
        norm = partial(_weight, rngs, layers=layers, constant=0.0 if c.norm_offset else 1.0)
        self.attention_norm = norm((c.embed_dim,), ("norm",))
        qkv = [
            ("query", c.num_heads, "heads"),
            ("key", c.num_kv_heads, "kv_heads"),
            ("value", c.num_kv_heads, "kv_heads"),
        ]
        for name, heads, axis in qkv:
            shape = (c.embed_dim, heads, c.head_dim)
            setattr(self, name, _weight(rngs, shape, ("embed", axis, "head_dim"), c.embed_dim, layers))
            if c.attention_bias:
                bias = _weight(rngs, (heads, c.head_dim), (axis, "head_dim"), layers=layers, constant=0.0)
                setattr(self, f"{name}_bias", bias)
        if c.qk_norm:
            self.query_norm = norm((c.head_dim,), ("head_dim",))
            self.key_norm = norm((c.head_dim,), ("head_dim",))
        out = (c.num_heads, c.head_dim, c.embed_dim)
        self.attention_out = _weight(rngs, out, ("heads", "head_dim", "embed"), c.num_heads * c.head_dim, layers)
        if c.attention_out_bias:
            self.attention_out_bias = _weight(rngs, (c.embed_dim,), ("norm",), layers=layers, constant=0.0)
        self.mlp_norm = norm((c.embed_dim,), ("norm",))
        if c.post_norms:
            self.attention_post_norm = norm((c.embed_dim,), ("norm",))
            self.mlp_post_norm = norm((c.embed_dim,), ("norm",))
        self.gate = _weight(rngs, (c.embed_dim, c.mlp_dim), ("embed", "mlp"), c.embed_dim, layers)
        self.up = _weight(rngs, (c.embed_dim, c.mlp_dim), ("embed", "mlp"), c.embed_dim, layers)
        self.down = _weight(rngs, (c.mlp_dim, c.embed_dim), ("mlp", "embed"), c.mlp_dim, layers)

    def product(self, name: str, x: Array) -> Array:
        """The input times a weight, and through its adapter if it has one."""
        inputs, lora = lora_lib.num_inputs(name), self.config.lora
        param = getattr(self, name)
        weight = param.get_value() if isinstance(param.get_value(), qwix.QArray) else _use(param, x.dtype)
        out = quantised.product(x, weight, inputs, self.activations)
        if lora is None or name not in lora.targets:
            return out
        a, b = (_use(getattr(self, f"{name}_{part}"), x.dtype) for part in "ab")
        return out + lora_lib.product(x, a, b, lora.scale, inputs)

    def project(self, name: str, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        heads = self.product(name, x)
        if self.config.attention_bias:
            heads = heads + _use(getattr(self, f"{name}_bias"), x.dtype)
        return heads

    def frequencies(self, sliding: Bool[Array, ""] | None) -> Float[Array, " half"]:
        """What this layer's queries and keys are rotated by."""
        c = self.config
        frequencies = rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        if sliding is None or c.sliding_rope_theta is None:
            return frequencies
        return jnp.where(sliding, rope_frequencies(c.head_dim, c.sliding_rope_theta), frequencies)

    def block(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], attend: Callable, sliding: Bool[Array, ""] | None
    ) -> tuple[Array, tuple]:
        """One block. `attend(q, k, v)` gives the attention's output and what the caller keeps of k and v."""
        c = self.config
        normed = _rms_norm(x, self.attention_norm, c)
        query, key, value = (self.project(name, normed) for name in ("query", "key", "value"))
        if c.qk_norm:
            query, key = _rms_norm(query, self.query_norm, c), _rms_norm(key, self.key_norm, c)
        frequencies, amplitude = self.frequencies(sliding), 1.0 if c.rope_scaling is None else c.rope_scaling.amplitude
        query, key = (rotate(heads, positions, frequencies, amplitude) for heads in (query, key))
        attended, kept = attend(query, key, value)
        out = sharding.sum_over_tensor(self.product("attention_out", attended))
        if c.attention_out_bias:
            out = out + _use(self.attention_out_bias, x.dtype)
        x = x + (_rms_norm(out, self.attention_post_norm, c) if c.post_norms else out)

        normed = _rms_norm(x, self.mlp_norm, c)
        hidden = _ACTIVATIONS[c.mlp_activation](self.product("gate", normed)) * self.product("up", normed)
        out = sharding.sum_over_tensor(self.product("down", hidden))
        return x + (_rms_norm(out, self.mlp_post_norm, c) if c.post_norms else out), kept


class Transformer(nnx.Module):
    """The model. `hidden` and `decode` give final hidden states, `logits` turns them into logits."""

    def __init__(self, config: TransformerConfig, vocab_size: int, rngs: nnx.Rngs, activations: Format | None = None):
        """`activations`: the format in which the inputs of the layers' products are taken; None: the compute dtype."""
        self.config = config
        self.vocab_size = vocab_size
        axes = ("vocabulary", "embed")
        self.embedding = _weight(rngs, (vocab_size, config.embed_dim), axes, config.embed_dim)
        self.layers = _Layers(config, rngs, activations)
        self.final_norm = _weight(rngs, (config.embed_dim,), ("norm",), constant=0.0 if config.norm_offset else 1.0)
        if not config.tied_embeddings:
            self.head = _weight(rngs, (vocab_size, config.embed_dim), axes, config.embed_dim)
        if config.lora is not None:  # last, so that the other weights are those of the model without
            lora_lib.attach(self.layers, config.lora, rngs)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.dtype)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        table = _use(self.embedding, self.dtype, stacked=False)
        local = tokens - sharding.tensor_index() * table.shape[0]  # the vocabulary may be sharded over `tensor`
        here = (local >= 0) & (local < table.shape[0])
        rows = table[jnp.where(here, local, 0)]
        found = sharding.sum_over_tensor(jnp.where(here[..., None], rows, jnp.zeros((), self.dtype)))
        scale = self.config.embedding_scale
        return found if scale == 1.0 else found * jnp.asarray(scale, self.dtype)

    @property
    def form(self) -> AttentionForm:
        """What is the same in the attention of all layers."""
        return AttentionForm(self.config.query_scale, self.config.attention_softcap, self.config.sliding_window)

    def sliding(self) -> Bool[Array, " L"] | None:
        """Which layers attend to the sliding window; None: none does."""
        if not self.config.sliding_layers:
            return None
        return jnp.isin(jnp.arange(self.config.num_layers), jnp.asarray(self.config.sliding_layers))

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Whole sequences: the final hidden states, and all keys and values (dropped by XLA where unused).

        Attention is causal in the order of columns, and within a segment if `segment_ids` is given.
        Padding at the end of a row needs no mask: nothing before it can see it.
        """
        graphdef, stacked = nnx.split(self.layers)

        @partial(jax.checkpoint, policy=_KEPT[self.config.remat])
        def layer(x, weights_and_sliding):
            weights, sliding = weights_and_sliding

            def attend(query, key, value):
                return causal_attention(query, key, value, segment_ids, self.form, sliding), KVCache.of(key, value)

            return nnx.merge(graphdef, weights).block(x, positions, attend, sliding)

        x, cache = jax.lax.scan(layer, self.embed(tokens), (stacked, self.sliding()))
        return _rms_norm(x, self.final_norm, self.config), cache

    def decode(
        self,
        tokens: Int[Array, " B"],
        positions: Int[Array, " B"],
        cache: KVCache | list[KVCache],
        layers: list[nnx.State] | None = None,
    ) -> tuple[Float[Array, "B D"], KVCache | list[KVCache]]:
        """One token a row, at its own position: the final hidden states, and the cache with the token in it.

        Args:
            tokens: the last of each row.
            positions: theirs; attention reads as many slots as the longest row needs, rounded up to a bucket.
            cache: of the tokens before.
            layers: `unstacked_layers`, for a cache that is unstacked too; None: a scan over stacked ones.
        """
        graphdef, stacked = nnx.split(self.layers)
        rows = jnp.arange(tokens.shape[0])
        buckets = slot_buckets((cache[0] if isinstance(cache, list) else cache).num_slots)
        bucket = jnp.searchsorted(jnp.asarray(buckets), positions.max() + 1)

        def layer(x: Array, cache: Any, weights: Any, sliding: Any, index: Any) -> tuple[Array, Any]:
            def attend(query, key, value):
                written = cache.write(index, rows, positions, key[:, 0], value[:, 0])

                def over(num_slots):
                    cached = written.read(index, query.dtype, num_slots)
                    return cached_attention(query, *cached, positions + 1, self.form, sliding)

                return jax.lax.switch(bucket, [partial(over, size) for size in buckets]), written

            return nnx.merge(graphdef, weights).block(x, positions[:, None], attend, sliding)

        x, sliding = self.embed(tokens[:, None]), self.sliding()
        if layers is not None:
            caches = []
            for i, (weights, of_layer) in enumerate(zip(layers, cache, strict=True)):
                x, written = layer(x, of_layer, weights, None if sliding is None else sliding[i], jnp.int32(0))
                caches.append(written)
            cache = caches
        else:
            # The cache is carried, not scanned over, so that XLA updates it in place.
            of_layers = stacked, sliding, jnp.arange(self.config.num_layers)
            (x, cache), _ = jax.lax.scan(lambda carry, each: (layer(*carry, *each), None), (x, cache), of_layers)
        return _rms_norm(x[:, 0], self.final_norm, self.config), cache

    def unstacked_layers(self) -> list[nnx.State]:
        """The weights of each layer in arrays of its own."""
        stacked = nnx.state(self.layers)
        return [jax.tree.map(lambda array, i=i: array[i], stacked) for i in range(self.config.num_layers)]

    def output_weights(self) -> Float[Array, "V D"]:
        """The output head in the compute dtype; V is this device's part of the vocabulary."""
        return _use(self.embedding if self.config.tied_embeddings else self.head, self.dtype, stacked=False)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Float32 logits, accumulated in float32."""
        product = jnp.einsum("...D,VD->...V", hidden, self.output_weights(), preferred_element_type=jnp.float32)
        return softcapped(product, self.config.logit_softcap)


def abstract_model(
    config: TransformerConfig, vocab_size: int, activations: Format | None = None
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure, and its parameters as shapes with their logical axes; nothing is allocated."""
    model = nnx.eval_shape(lambda: Transformer(config, vocab_size, nnx.Rngs(0), activations))
    return nnx.split(model)


def weight_specs(abstract: nnx.State, mesh: Mesh, rules: Mapping[str, str | None]) -> nnx.State:
    """The partition of every weight: a tree like `abstract`.

    Raises:
        ValueError: an axis of a weight does not divide over the devices that are to share it.
    """

    def spec_of(path: Any, param: nnx.Variable) -> nnx.Variable:
        axes = param.get_metadata()["logical_axes"]
        spec = sharding.weight_spec(axes, mesh, rules)
        for logical, size, axis in zip(axes, param.get_value().shape, spec, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"mesh: {axis}={mesh.shape[axis]} does not divide the {size} {logical} of weight "
                    f"{jax.tree_util.keystr(path)}; choose a divisor of {size}"
                )
        return param.replace(spec)

    return jax.tree_util.tree_map_with_path(spec_of, abstract, is_leaf=lambda node: isinstance(node, nnx.Variable))
