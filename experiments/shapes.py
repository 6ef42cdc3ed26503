"""Runs of the shape of published models, with random weights: what fits where, before there is a machine.

    p3o compile shapes qwen3_4b --topology v5p:4x4x4
    p3o compile shapes qwen3_4b_two_slices --topology v5e:16x16 --num-slices 2

They are runs like any other: on the hardware they train on random prompts for a reward that is easy to compute. An
update of the larger one is 256 rows of 4,096 tokens.

mesh.fsdp is 16 rather than 64 where 64 devices share the rows: 2,560 / 64 = 40 entries are no multiple of 16, the rows
of a TPU's bfloat16 tile, and XLA then writes every gather and scatter of weights as an all-reduce of them whole.
docs/pods.md has the figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from p3o_jax.commands.experiment import run_experiment
from p3o_jax.config import Config
from p3o_jax.devices.precision import Precision
from p3o_jax.devices.sharding import MeshShape
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.objectives import P3O, Grpo
from p3o_jax.tasks.base import DrawnPrompts, Prompt, PromptSource, Split, Task

QWEN3_4B = TransformerConfig(
    num_layers=36,
    embed_dim=2560,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=9728,
    rope_theta=1e6,
    qk_norm=True,
    tied_embeddings=True,
    context_tokens=40_960,
    dtype="bfloat16",
)
QWEN2_5_1_5B = TransformerConfig(
    num_layers=28,
    embed_dim=1536,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    mlp_dim=8960,
    rope_theta=1e6,
    attention_bias=True,
    tied_embeddings=True,
    context_tokens=32_768,
    dtype="bfloat16",
)
QWEN_VOCABULARY = 151_936  # entries of the embedding, more than there are tokens


@dataclass(frozen=True)
class Numbers:
    """A tokenizer whose text is the ids, as decimal numbers; id 0 ends a sequence."""

    vocab_size: int
    eos_ids: tuple[int, ...] = (0,)
    bos_id: None = None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text of numbers."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Iterable[int]) -> str:
        """The ids as text, without the end of the sequence."""
        return " ".join(str(i) for i in ids if i)


@dataclass(frozen=True)
class RandomTokens(Task):
    """Prompts of random tokens; the reward is the share of even tokens in the response."""

    vocab_size: int = QWEN_VOCABULARY
    """Size of the vocabulary."""
    max_prompt_tokens: int = 512
    """Tokens of every prompt."""
    max_response_tokens: int = 3585
    """Longest response; the first token of a row is not predicted, so that 4,096 are."""

    name: ClassVar[str] = "random_tokens"

    @property
    def tokenizer(self) -> Numbers:
        """Ids as text."""
        return Numbers(self.vocab_size)

    def prompts(self, split: Split, seed: int) -> PromptSource:
        """Uniformly random tokens."""
        return DrawnPrompts(partial(self._draw, seed), split, 2**20)

    def _draw(self, seed: int, index: int, attempt: int) -> Prompt:
        rng = np.random.default_rng((seed, index, attempt))
        tokens = rng.integers(1, self.vocab_size, self.max_prompt_tokens)
        return Prompt(index, " ".join(map(str, tokens)), "", {})

    def reward(self, prompt: Prompt, completion: str) -> float:
        """The share of even tokens."""
        ids = self.tokenizer.encode(completion)
        return sum(i % 2 == 0 for i in ids) / max(len(ids), 1)

    def demonstration(self, prompt: Prompt, noise: float, rng: np.random.Generator) -> str:
        """An even token."""
        return "2"


def qwen3_4b() -> Config:
    """For 64 devices: 256 rows x 4,096 tokens an update; weights and moments over 16 devices each."""
    return Config(
        task=RandomTokens(),
        model=QWEN3_4B,
        objective=P3O(),
        precision=Precision(weights="bfloat16", activations="bfloat16", kv_cache="bfloat16"),
        mesh=MeshShape(data=4, fsdp=16),
        prompts_per_step=256,
        samples_per_prompt=8,
        minibatches=8,
        evaluate_every=0,
    )


def qwen3_4b_two_slices() -> Config:
    """For two slices of 256 smaller devices: as many rows, each shared by four devices; a prompt for each host."""
    mesh = MeshShape(slice=2, data=4, fsdp=16, tensor=4)
    return replace(qwen3_4b(), mesh=mesh, samples_per_prompt=4, minibatches=4)


def qwen3_4b_grpo() -> Config:
    """For comparison: the same with a clipped objective, which has no statistics."""
    return replace(qwen3_4b(), objective=Grpo())


def qwen2_5_1_5b() -> Config:
    """A smaller model, for a single host of eight devices."""
    return replace(
        qwen3_4b(),
        model=QWEN2_5_1_5B,
        mesh=MeshShape(fsdp=8),
        prompts_per_step=64,
        minibatches=8,
        micro_batches=8,
    )


VARIANTS = {
    "qwen3_4b": qwen3_4b(),
    "qwen3_4b_two_slices": qwen3_4b_two_slices(),
    "qwen3_4b_grpo": qwen3_4b_grpo(),
    "qwen2_5_1_5b": qwen2_5_1_5b(),
}

if __name__ == "__main__":
    run_experiment("shapes", __doc__.splitlines()[0], VARIANTS)
