"""Sampling by Hugging Face transformers (torch, one thread), for `experiments.benchmarks.sampler`."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.benchmarks import shape


def main() -> None:
    """Builds the model and serves measurements of a batch of rows of full length."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.VOCABULARY,
            hidden_size=shape.WIDTH,
            intermediate_size=shape.MLP,
            num_hidden_layers=shape.LAYERS,
            num_attention_heads=shape.HEADS,
            num_key_value_heads=shape.KV_HEADS,
            head_dim=shape.HEAD_DIM,
            max_position_embeddings=shape.PROMPT + shape.RESPONSE,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    prompts = torch.randint(shape.VOCABULARY, (shape.ROWS, shape.PROMPT))

    def step() -> None:
        with torch.inference_mode():
            output = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=shape.RESPONSE
            )
        assert output.shape[1] == shape.PROMPT + shape.RESPONSE

    shape.serve(step)


if __name__ == "__main__":
    main()
