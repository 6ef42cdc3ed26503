"""Sampling by Tunix (google-tunix 0.1.7), for `experiments.benchmarks.sampler`: prompts in, tokens, log-probs out."""

from __future__ import annotations

import jax
from flax import nnx
from tunix.generate import sampler as tunix_sampler
from tunix.models.llama3 import model as llama

from experiments.benchmarks import shape
from experiments.integrations.tunix import Letters


def main() -> None:
    """Builds the sampler and serves measurements of a batch of rows of full length."""
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
    config = llama.ModelConfig(
        num_layers=shape.LAYERS,
        vocab_size=shape.VOCABULARY,
        embed_dim=shape.WIDTH,
        hidden_dim=shape.MLP,
        num_heads=shape.HEADS,
        head_dim=shape.HEAD_DIM,
        num_kv_heads=shape.KV_HEADS,
        rope_theta=10_000,
        norm_eps=1e-6,
    )
    with mesh:
        sampler = tunix_sampler.Sampler(
            transformer=llama.Llama3(config, rngs=nnx.Rngs(0)),
            tokenizer=Letters(),
            cache_config=tunix_sampler.CacheConfig(
                cache_size=shape.PROMPT + shape.RESPONSE,
                num_layers=shape.LAYERS,
                num_kv_heads=shape.KV_HEADS,
                head_dim=shape.HEAD_DIM,
            ),
        )
        prompts = [Letters.letters[i] * (shape.PROMPT - 1) for i in range(shape.ROWS)]  # and a BOS

        def step() -> None:
            output = sampler(
                prompts,
                max_generation_steps=shape.RESPONSE,
                max_prompt_length=shape.PROMPT,
                eos_tokens=[shape.VOCABULARY],  # none: every row runs to its end
                temperature=1.0,
                top_p=1.0,
                return_logprobs=True,
            )
            assert all(len(tokens) == shape.RESPONSE for tokens in output.tokens), [len(t) for t in output.tokens]

        shape.serve(step)


if __name__ == "__main__":
    main()
