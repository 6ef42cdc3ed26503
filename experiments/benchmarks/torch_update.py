"""One P3O update by Hugging Face transformers and torch, for `experiments.benchmarks.learner`.

The loss is that of the authors' implementation: ESS of the micro-batch (here the whole batch), score function capped
at it, k3 with its exponent limited, token mean. One thread, which on few shared cores is the fastest.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.benchmarks import shape


def loss_of(log_probs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """L = mean[ -sg(min(rho, e)) A log pi + (1 - e) k3 ]."""
    log_ratio = log_probs - behaviour
    ratio = log_ratio.detach().exp()
    ess = ratio.mean().square() / ratio.square().mean()
    divergence = (-log_ratio).clamp(-10, 10).exp() - 1 + log_ratio
    return (-torch.minimum(ratio, ess) * advantages * log_probs + (1 - ess) * divergence).mean()


def main() -> None:
    """Builds the model and serves measurements of its update."""
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
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    tokens = torch.randint(shape.VOCABULARY, (shape.ROWS, shape.PROMPT + shape.RESPONSE))
    behaviour = torch.full((shape.ROWS, shape.RESPONSE), -6.3)
    advantages = torch.randn(shape.ROWS, 1)

    def step() -> None:
        logits = model(tokens, use_cache=False).logits[:, shape.PROMPT - 1 : -1].float()
        log_probs = logits.log_softmax(-1).gather(-1, tokens[:, shape.PROMPT :, None])[..., 0]
        optimizer.zero_grad(set_to_none=True)
        loss_of(log_probs, behaviour, advantages).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    shape.serve(step)


if __name__ == "__main__":
    main()
