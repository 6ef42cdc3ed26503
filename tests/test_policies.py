"""A run that starts from a published model: trained with adapters, resumed, found by name, and exported merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from p3o_jax.commands import export, probe
from p3o_jax.config import Config, from_json, load, resolve, to_json
from p3o_jax.devices import sharding
from p3o_jax.devices.sharding import MeshShape
from p3o_jax.learner.optimizer import OptimizerConfig
from p3o_jax.learner.warm_start import WarmStart
from p3o_jax.models.lora import Lora
from p3o_jax.models.rope import Llama3Rope
from p3o_jax.models.stored.pretrained import Pretrained
from p3o_jax.models.transformer import TransformerConfig, abstract_model
from p3o_jax.policies import LoadedPolicy, load_policy
from p3o_jax.tasks import SortDigits
from p3o_jax.train import train
from tests.models.stored_models import copy_with_tokenizer

pytest.importorskip("tokenizers", reason="needs the extra 'models'")
pytest.importorskip("jinja2", reason="needs the extra 'models'")

pytestmark = pytest.mark.slow


class LongerPrompts(SortDigits):
    """With room for the chat template around them, and a reward that an untrained model gets some of."""

    def reward(self, prompt, completion) -> float:
        return sum(character.isdigit() for character in completion) / self.max_response_tokens

    @property
    def max_prompt_tokens(self) -> int:
        return 20


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, dict[str, float]]:
    """Two steps of a run from a published model, and their last metrics."""
    directory = tmp_path_factory.mktemp("policies")
    path = copy_with_tokenizer("llama3", directory)
    config = Config(
        task=LongerPrompts(length=6),
        pretrained=Pretrained(str(path), system_prompt="sort"),
        model=TransformerConfig(context_tokens=48, remat="dots", lora=Lora(rank=2)),
        optimizer=OptimizerConfig(learning_rate=0.01),
        mesh=MeshShape(data=2, fsdp=2, tensor=2),
        prompts_per_step=8,
        samples_per_prompt=2,
        num_steps=2,
        save_every=1,
        evaluate_every=0,
    )
    return directory / "run", train(config, directory / "run")


def logits(policy: LoadedPolicy) -> np.ndarray:
    model = nnx.merge(abstract_model(policy.model, policy.tokenizer.vocab_size)[0], jax.device_get(policy.params))
    tokens = jnp.arange(1, 25, dtype=jnp.int32).reshape(2, 12)
    positions = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), tokens.shape)
    return np.asarray(jax.jit(lambda m: m.logits(m.hidden(tokens, positions)[0]))(model))


def test_the_first_update_is_on_policy_and_the_configuration_complete(run):
    directory, _ = run
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    ess = [line["policy/ess"] for line in lines if "policy/ess" in line]
    assert ess[0] > 0.9999  # the sampler's model is the learner's, scaling of RoPE and all
    config = load(directory / "config.json")
    assert (config.model.num_layers, config.model.embed_dim, config.model.context_tokens) == (3, 16, 48)
    assert config.model.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 32)
    assert (config.model.remat, config.model.lora) == ("dots", Lora(rank=2))
    assert from_json(json.loads(json.dumps(to_json(config)))) == config
    assert resolve(config, config.pretrained.open()) == config


def test_policies_by_name(run):
    directory, _ = run
    mesh = sharding.make_mesh(MeshShape(fsdp=4))
    newest, first = load_policy(str(directory), mesh), load_policy(f"{directory}@1", mesh)
    start = load_policy(str(directory.parent / "llama3"), mesh)
    assert (newest.step, first.step, start.step, start.config) == (2, 1, 0, None)
    assert newest.model.lora is None
    assert newest.config.task.length == 6
    assert newest.tokenizer.encode("12=") == start.tokenizer.encode_chat(
        [{"role": "system", "content": "sort"}, {"role": "user", "content": "12="}]
    )
    of_each = [logits(policy) for policy in (start, first, newest)]
    assert np.abs(of_each[1] - of_each[0]).max() > 1e-3
    assert np.abs(of_each[2] - of_each[1]).max() > 1e-3
    assert start.params["embedding"][...].sharding.num_devices == 8


def test_an_exported_run_is_its_policy_with_adapters_merged(run, capsys):
    directory, _ = run
    out = directory.parent / "exported"
    export.run([str(directory), str(out)])
    assert f"{directory} at step 2: {out}" in capsys.readouterr().out
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    np.testing.assert_allclose(
        logits(load_policy(str(out), mesh)), logits(load_policy(str(directory), mesh)), atol=1e-6
    )
    with pytest.raises(FileExistsError, match="exported exists"):
        export.run([str(directory), str(out)])


def test_what_is_not_there_is_named(run, tmp_path):
    directory, _ = run
    mesh = sharding.make_mesh()
    with pytest.raises(FileNotFoundError, match=r"has no checkpoint of step 7; it has \[1, 2\]"):
        load_policy(f"{directory}@7", mesh)
    with pytest.raises(FileNotFoundError, match="neither a directory"):
        load_policy("qwen", mesh)
    with pytest.raises(FileNotFoundError, match="has no checkpoint that was evaluated"):
        load_policy(f"{directory}@best", mesh)
    damaged = Path(shutil.copytree(directory, tmp_path / "damaged"))
    (damaged / "checkpoints" / "2" / "state" / "_METADATA").unlink()
    with pytest.raises(
        ValueError, match=r"checkpoints/2 is damaged: state/_METADATA is missing; .*@STEP takes another"
    ):
        load_policy(str(damaged), mesh)
    (tmp_path / "command.txt").touch()
    with pytest.raises(FileNotFoundError, match="is a run without a checkpoint yet"):
        load_policy(str(tmp_path), mesh)


def test_the_sampler_as_its_document_shows_it(run):
    """The block of docs/sampling.md, with shorter limits."""
    document = (Path(__file__).parents[1] / "docs" / "sampling.md").read_text()
    block = document.partition("```python\n")[2].partition("```")[0]
    names = {"MODEL": str(run[0]), "TEXTS": [f"{i}210=" for i in range(8)]}
    exec(block.replace("prompt_tokens=64, response_tokens=32", "prompt_tokens=20, response_tokens=8"), names)
    assert len(names["texts"]) == 64
    assert names["rollout"].support.indices.shape == (64, 28, 4)


def test_a_probe_asks_for_past_policies_before_it_measures(run, tmp_path):
    directory, _ = run
    for age, message in ((1, "probe.json exists"), (3, "staleness 3 is older than the run, which is at step 2")):
        (tmp_path / "probe.json").touch()
        arguments = [str(directory), "--precisions", "float32", "--num-prompts", "8", "--staleness", str(age)]
        with pytest.raises((ValueError, FileExistsError), match=message):
            probe.run([*arguments, "--prompts-per-batch", "8", "--out", str(tmp_path)])
    with pytest.raises(ValueError, match="staleness 1 needs a run"):
        probe.run([str(directory.parent / "llama3"), "--staleness", "1"])


def test_a_published_model_needs_no_warm_start():
    with pytest.raises(ValueError, match="warm_start is for a randomly initialised model"):
        Config(pretrained=Pretrained("smollm2-135m"), warm_start=WarmStart())
