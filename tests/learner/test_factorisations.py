"""Every way of sharing 8 devices between data, fsdp and tensor gives the update of one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from p3o_jax.batch.types import Batch, Inputs
from p3o_jax.devices.sharding import MeshShape, make_mesh, to_global
from p3o_jax.learner.learner import Learner
from p3o_jax.learner.optimizer import OptimizerConfig
from p3o_jax.learner.plan import StepPlan
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.objectives import P3O

VOCAB, ROWS, TOKENS = 16, 16, 7
MODEL = TransformerConfig(num_layers=1, embed_dim=16, num_heads=8, num_kv_heads=8, head_dim=2, mlp_dim=16)
POWERS = (1, 2, 4, 8)
SHAPES = [(data, fsdp, 8 // data // fsdp) for data in POWERS for fsdp in POWERS if data * fsdp <= 8]
FEW = [(1, 1, 8), (2, 2, 2)]


def make_batch() -> Batch:
    rng = np.random.default_rng(0)
    mask = np.arange(TOKENS) < rng.integers(0, TOKENS + 1, (ROWS, 1))
    tokens = rng.integers(0, VOCAB, (ROWS, TOKENS + 1)).astype(np.int32)
    positions = np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1))
    return Batch(
        mask=mask,
        behaviour_log_probs=np.where(mask, -2 - rng.random(mask.shape), np.nan).astype(np.float32),
        advantages=rng.normal(size=mask.shape).astype(np.float32),
        inputs=Inputs(tokens[:, :-1], tokens[:, 1:], positions, np.ones(mask.shape, np.float32)),
    )


def gradients(mesh, micro_batches: int) -> tuple[np.ndarray, float]:
    learner = Learner(
        MODEL, VOCAB, StepPlan(P3O(), micro_batches=micro_batches), OptimizerConfig(), mesh, num_updates=1
    )
    state = learner.init(jax.random.key(0))
    found, loss, *_ = learner.gradients(state.params, to_global(make_batch(), mesh))
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(found))]), float(loss)


@pytest.fixture(scope="module")
def on_one_device() -> tuple[np.ndarray, float]:
    return gradients(make_mesh(devices=jax.devices()[:1]), 1)


def check(data, fsdp, tensor, expected, expected_loss):
    micro_batches = 2 if data * fsdp < 8 else 1
    got, loss = gradients(make_mesh(MeshShape(data=data, fsdp=fsdp, tensor=tensor)), micro_batches)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("data", "fsdp", "tensor"), FEW)
def test_a_factorisation_gives_the_same_gradient(data, fsdp, tensor, on_one_device):
    check(data, fsdp, tensor, *on_one_device)


@pytest.mark.long
@pytest.mark.parametrize(("data", "fsdp", "tensor"), [shape for shape in SHAPES if shape not in FEW])
def test_every_factorisation_gives_the_same_gradient(data, fsdp, tensor, on_one_device):
    check(data, fsdp, tensor, *on_one_device)
