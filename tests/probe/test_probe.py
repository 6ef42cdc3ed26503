"""What a probe measures against the same numbers by hand, and what it says of them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import quickstart
from p3o_jax.commands import probe as command
from p3o_jax.devices.precision import Precision, parse
from p3o_jax.devices.sharding import make_mesh, to_local
from p3o_jax.models.transformer import Transformer, TransformerConfig, abstract_model
from p3o_jax.parts import build
from p3o_jax.probe import Cell, Mismatch, Prober, Report, Settings, prober
from p3o_jax.probe import report as probe_report
from p3o_jax.sampler import Requests, Sampler, Sampling, SamplingLimits
from p3o_jax.tokenizers.text import CharTokenizer

TOKENIZER = CharTokenizer("abcdefghijk")
MODEL = TransformerConfig(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32)
LIMITS = SamplingLimits(4, 8, (0,))
PROMPTS = [(7, [1, 2]), (8, [3, 4, 5]), (9, [6, 6, 6, 6])]
SETTINGS = Settings((Precision(), parse("fp8_e4m3/fp8_e4m3/fp8_e4m3")), (1.0, 0.5), 8, 2, top_tokens=3)


@pytest.fixture(scope="module")
def probed():
    """A report, and what it was made of."""
    mesh = make_mesh(devices=jax.devices()[:1])
    init = jax.jit(lambda key: nnx.state(Transformer(MODEL, TOKENIZER.vocab_size, nnx.Rngs(params=key))))
    params = jax.tree.map(lambda leaf: leaf * 2 if leaf.ndim > 1 else leaf, init(jax.random.key(0)))
    older = jax.tree.map(lambda leaf: leaf * 1.1, params)
    prober = Prober(MODEL, TOKENIZER, LIMITS, mesh, SETTINGS)
    told = []
    report = prober.run(PROMPTS, params, {0: lambda: params, 3: lambda: older}, found=told.append)
    return SimpleNamespace(report=report, params=params, older=older, mesh=mesh, told=told, prober=prober)


def cell(report: Report, precision: str, temperature: float, staleness: int = 0) -> Cell:
    (found,) = (
        cell
        for cell in report.cells
        if (cell.precision.split("/")[0], cell.temperature, cell.staleness) == (precision, temperature, staleness)
    )
    return found


@jax.jit
def all_log_probs(params, tokens):
    """Of every next token, by the model's forward pass."""
    model = nnx.merge(abstract_model(MODEL, TOKENIZER.vocab_size)[0], params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return jax.nn.log_softmax(model.logits(model.hidden(tokens, positions)[0]))


@pytest.fixture(scope="module")
def reference(probed):
    """A sampler as the probe has it."""
    return Sampler(MODEL, TOKENIZER.vocab_size, LIMITS, Precision(), probed.mesh)


@pytest.mark.parametrize(("temperature", "staleness"), [(1.0, 0), (0.5, 0), (1.0, 3)])
def test_numbers_are_those_of_the_tokens_drawn(probed, reference, temperature, staleness):
    """The same rollouts again, the learner's distributions by its forward pass, and the statistics in float64."""
    sampler = reference
    weights = sampler.publish(probed.older if staleness else probed.params)
    log_ratio, divergence, of_row, places, tokens = [], [], [], [], []
    for part in (PROMPTS[:2], PROMPTS[2:]):
        options = {"num_samples": 8, "sampling": Sampling(temperature), "support": "exact"}
        indices, prompts = zip(*part, strict=True)
        rollout = to_local(sampler.generate(weights, Requests(prompts, indices, jax.random.key(0), **options)))
        log_probs = np.asarray(all_log_probs(probed.params, rollout.tokens), np.float64)
        for row, ids in enumerate(rollout.tokens):
            start = rollout.prompt_length[row]
            for at in range(start, start + rollout.response_length[row]):
                pi, mu = log_probs[row, at - 1], rollout.support.behaviour_log_probs[row, at].astype(np.float64)
                log_ratio.append(pi[ids[at]] - rollout.behaviour_log_probs[row, at])
                divergence.append((np.exp(pi) * (pi - mu)).sum())
                of_row.append((rollout.group[row], row))
                tokens.append(ids[at])
                places.append((rollout.group[row], at - start))
    log_ratio = np.array(log_ratio)
    ratio = np.exp(log_ratio)
    sequences = np.exp([log_ratio[[r == row for r in of_row]].sum() for row in dict.fromkeys(of_row)])
    found = cell(probed.report, "float32", temperature, staleness)
    prompt = np.array([place[0] for place in places])
    by_prompt = [(ratio[prompt == index] ** 2).sum() for index, _ in PROMPTS]
    without = [ratio[prompt != index].mean() ** 2 / (ratio[prompt != index] ** 2).mean() for index, _ in PROMPTS]
    expected = {
        "ess": ratio.mean() ** 2 / (ratio**2).mean(),
        "ess_error": np.sqrt(2 / 3 * ((np.array(without) - np.mean(without)) ** 2).sum()),
        "largest_prompt_share": max(by_prompt) / sum(by_prompt),
        "sequence_ess": sequences.mean() ** 2 / (sequences**2).mean(),
        "kl": np.mean(divergence),
        "k3": (log_ratio + 1 / ratio - 1).mean(),
        "chi2": (ratio**2).mean() - 1,
        "log_ratio_abs_mean": np.abs(log_ratio).mean(),
        "log_ratio_abs_max": np.abs(log_ratio).max(),
        "outside_fraction": (np.abs(ratio - 1) > 0.2).mean(),
        "ratio_mean": ratio.mean(),
        "num_tokens": len(ratio),
        "num_rows": 24,
        "nonfinite": 0,
    }
    for name, value in expected.items():
        assert getattr(found.mismatch, name) == pytest.approx(value, rel=1e-3, abs=1e-5), name
    largest: dict = {}
    for at, size in zip(places, np.abs(log_ratio), strict=True):
        largest[at] = max(size, largest.get(at, 0))
    shown = [abs(token.log_prob - token.behaviour_log_prob) for token in found.top]
    np.testing.assert_allclose(shown, sorted(largest.values(), reverse=True)[:3], atol=1e-5)
    if (temperature, staleness) != (1, 0):
        worst = int(np.abs(log_ratio).argmax())
        assert found.top[0].token == (TOKENIZER.decode([int(tokens[worst])]) or "<0>")
        assert (found.top[0].prompt_index, found.top[0].position) == places[worst]


def test_the_noise_floor_is_where_nothing_differs(probed):
    report = probed.report
    assert report.equal_precision.precision == "float32/float32/float32"
    assert report.equal_precision.mismatch.ess > 0.9999
    assert report.equal_precision.mismatch.kl < 1e-6
    assert report.batch_shape.ess > 0.9999
    assert report.batch_shape.num_tokens == report.equal_precision.mismatch.num_tokens
    assert report.batch_shape.kl is None
    assert cell(report, "float32", 1.0).mismatch == report.equal_precision.mismatch


def test_large_vocabularies_are_compared_by_their_most_likely_tokens(probed, monkeypatch):
    """Of 12 tokens here 5 and a bucket: the same tokens are drawn, and the KL is a lower bound."""
    monkeypatch.setattr(prober, "EXACT_VOCABULARY", 1)
    monkeypatch.setattr(prober, "SUPPORT_TOKENS", 5)
    settings = replace(SETTINGS, precisions=(Precision(),), temperatures=(0.5,))
    report = Prober(MODEL, TOKENIZER, LIMITS, probed.mesh, settings).run(PROMPTS, probed.params)
    exact, (bounded,) = cell(probed.report, "float32", 0.5).mismatch, (found.mismatch for found in report.cells)
    assert report.kl == "top_k"
    assert 0.5 * exact.kl < bounded.kl < exact.kl
    assert bounded.ess == pytest.approx(exact.ess, abs=1e-5)


def test_every_difference_costs_ess(probed):
    ess = {key: cell(probed.report, *key).mismatch.ess for key in (
        ("float32", 1.0), ("float32", 0.5), ("fp8_e4m3", 1.0), ("float32", 1.0, 3), ("fp8_e4m3", 1.0, 3),
    )}  # fmt: skip
    assert ess["float32", 1.0] > ess["fp8_e4m3", 1.0] > ess["float32", 0.5]
    assert ess["float32", 1.0] > ess["float32", 1.0, 3]
    assert [len(known.cells) for known in probed.told] == [*range(9)]
    assert probed.told[-1] == probed.report


def test_large_weights_give_no_nan_in_fp8(probed):
    """Weights up to 1e4 in every layer, keys, values and activations far beyond 448: all are scaled."""

    def enlarge(path, leaf):
        return leaf / jnp.abs(leaf).max() * 1e4 if "layers" in jax.tree_util.keystr(path) and leaf.ndim > 2 else leaf

    params = jax.tree_util.tree_map_with_path(enlarge, probed.params)
    report = probed.prober.run(PROMPTS, params)
    for found in report.cells:
        assert found.mismatch.nonfinite == 0
        assert np.isfinite(dataclasses.astuple(found.mismatch)).all()
    assert cell(report, "fp8_e4m3", 1.0).mismatch.ess < cell(report, "float32", 1.0).mismatch.ess


@pytest.mark.long
def test_the_ladder_of_the_quickstart_is_in_order():
    """Its policy after the warm start: the coarser a format, and the more of the model is in it, the lower the ESS."""
    config = quickstart.p3o()
    parts = build(config, jax.devices()[:1])
    params = parts.start().state.params
    ladder = (
        "float32",
        "bfloat16",
        "int8/int8/int8",
        "fp8_e4m3",
        "fp8_e4m3/fp8_e4m3/fp8_e4m3",
        "fp8_e5m2/fp8_e5m2/fp8_e5m2",
    )
    tokenizer = config.task.tokenizer
    prompts = [(prompt.index, ids) for prompt, ids in parts.evaluate.sets[config.task.name][:128]]
    limits = SamplingLimits(config.task.max_prompt_tokens, config.task.max_response_tokens, tokenizer.eos_ids)
    settings = Settings(tuple(map(parse, ladder)), samples_per_prompt=8, prompts_per_batch=128)
    report = Prober(config.model, tokenizer, limits, parts.mesh, settings).run(prompts, params)
    ess = [cell.mismatch.ess for cell in report.cells]
    assert ess == sorted(ess, reverse=True), dict(zip(ladder, ess, strict=True))
    divergences = [cell.mismatch.kl for cell in report.cells]
    assert divergences == sorted(divergences), dict(zip(ladder, divergences, strict=True))
    assert ess[0] > 0.9999 > ess[2] > 0.99
    assert ess[1] > 0.999


def test_a_report_as_text_json_and_picture(probed, tmp_path):
    lines = probe_report.table(probed.report).splitlines()
    assert len(lines) == 3 + 8
    assert len({len(line) for line in lines}) == 1
    data = json.loads(probe_report.to_json(probed.report, {"model": "m"}))
    assert data["cells"][0]["mismatch"]["ess"] == probed.report.cells[0].mismatch.ess
    assert data["cells"][0]["mismatch"]["largest_prompt_share"] >= 1 / 3
    assert "top prompt" in lines[0]
    assert "rounding" in data["cells"][0]["meaning"]
    assert any("Noise floor" in line for line in probe_report.explanation(probed.report))
    worst = cell(probed.report, "float32", 0.5)
    assert len(list(probe_report.offenders(worst))) == 3
    path = tmp_path / "probe.png"
    probe_report.heat_map(probed.report, path, "ESS")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 150_000


FINE = Mismatch(
    ess=0.99999, ess_error=1e-6, largest_prompt_share=0.02, sequence_ess=0.9999, kl=1e-6, k3=1e-6, chi2=1e-5,
    log_ratio_abs_mean=1e-4, log_ratio_abs_max=1e-3, outside_fraction=0.0,
    ratio_mean=1.0, nonfinite=0, num_tokens=10_000, num_rows=100,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        ({}, "rounding", "mean ratio"),
        ({"ess": 0.997, "chi2": 0.003}, "slight: 0.30% of the batch", "clip"),
        ({"ess": 0.95, "chi2": 0.05, "outside_fraction": 0.2}, "a clip of 0.2 takes 20%", "mean ratio"),
        ({"ess": 0.95, "chi2": 0.05}, "P3O caps weights at 0.950", "whole responses"),
        ({"ess": 0.7, "chi2": 0.4, "sequence_ess": 0.02}, "do not weigh whole responses", "mean ratio"),
        ({"ess": 0.4, "chi2": 1.5}, "too far", "clip"),
        ({"ess": 0.83, "chi2": 0.2, "ess_error": 0.16}, "error of 0.2 it may be rounding or heavy: take more", "clip"),
        ({"ess": 0.95, "chi2": 0.05, "ess_error": 0.01}, "marked", "may be"),
        ({"ess_error": float("nan")}, "of one prompt there is no error", "may be"),
        # 0.02 off with a standard error of sqrt(0.05 / 10000) = 0.002
        ({"ess": 0.95, "chi2": 1.02**2 * 1.05 - 1, "ratio_mean": 1.02}, "mean ratio 1.02, not 1", "clip"),
        ({"ess": 0.7, "chi2": 0.4, "largest_prompt_share": 0.43}, "one prompt has 43% of the squared ratios", "may be"),
        ({"ess": 0.7, "chi2": 0.4, "largest_prompt_share": 0.09}, "heavy", "one prompt"),
        ({"largest_prompt_share": 0.4}, "rounding", "one prompt"),  # two prompts without a difference: no tail
        ({"ess_error": float("nan"), "largest_prompt_share": 1.0, "ess": 0.7}, "of one prompt there is no", "squared"),
        # A ratio of e^15 of ten thousand: the mean is one standard error from 1, and says nothing.
        ({"ess": 1e-4, "chi2": np.exp(30) / 1e4, "ratio_mean": np.exp(15) / 1e4}, "too far", "mean ratio"),
        ({"nonfinite": 2, "ess": float("nan")}, "2 log-ratios are not finite", "rounding"),
    ],
)
def test_words_follow_the_numbers(changes, said, unsaid):
    words = probe_report.meaning(replace(FINE, **changes))
    assert said in words
    assert unsaid not in words


def test_what_is_at_the_noise_floor_is_rounding():
    coarse = replace(FINE, ess=0.9998, chi2=2e-4)
    assert "rounding" in probe_report.meaning(coarse, floor=0.99989)
    assert "slight" in probe_report.meaning(coarse, floor=0.99999)


def test_what_is_not_a_number_is_null_in_json():
    broken = replace(FINE, ess=float("nan"), nonfinite=1)
    floor = Cell("float32", 1.0, 0, FINE, ())
    report = Report((Cell("int8", 1.0, 0, broken, ()),), FINE, floor, "float32/float32/float32", 1.0, "top_k")
    data = json.loads(probe_report.to_json(report, {}))
    assert data["cells"][0]["mismatch"]["ess"] is None
    assert "nan" in probe_report.table(report)
    assert "lower bound" in next(probe_report.explanation(report))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"12=\n34\xff=\n", "is not UTF-8: .* 0xff in position 6"),
        (b"12=\n\n3x=\n", "line 3 of .*prompts.txt: character 'x' .* alphabet"),
        (b"\n \n", "there is no prompt in"),
    ],
)
def test_mistakes_in_a_file_of_prompts_are_named_by_line(tmp_path, content, message):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        command.run(["random:quickstart", "--prompts", str(path)])


def test_a_line_is_a_prompt(tmp_path):
    """Whatever editor it was written with: a mark at the start, two bytes at the end, and separators that are none."""
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeff12=\r\n\r\n3\f4=\r\n".encode())
    policy = SimpleNamespace(tokenizer=CharTokenizer("0123456789=\f"), config=None, model=MODEL)
    asked = command.Arguments(model="m", prompts=path, response_tokens=8)
    prompts, limit = command._prompts(asked, policy)
    assert [(i, policy.tokenizer.decode(ids)) for i, ids in prompts] == [(0, "12="), (2, "3\f4=")]
    assert limit == 8


def test_what_is_measured_is_kept(tmp_path, monkeypatch):
    """By a probe that ends early, as of Ctrl-C, as the JSON of a complete one; the same output is refused then."""
    seen, run = [], Prober._cell

    def interrupted(self, *arguments):
        seen.append(run(self, *arguments) if len(seen) < 2 else None)
        if seen[-1] is None:
            raise KeyboardInterrupt
        return seen[-1]

    monkeypatch.setattr(Prober, "_cell", interrupted)
    arguments = ["random:quickstart", "--precisions", "bfloat16,int8", "--num-prompts", "8", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        command.run([*arguments, "--prompts-per-batch", "8", "--samples-per-prompt", "2", "--response-tokens", "2"])
    kept = json.loads((tmp_path / "probe.json").read_text())
    assert [cell["precision"] for cell in kept["cells"]] == ["bfloat16/bfloat16/bfloat16"]
    assert kept["cells"][0]["mismatch"]["ess"] == seen[1][0].mismatch.ess
    with pytest.raises(FileExistsError, match=r"probe.json exists; give another --out"):
        command.run([*arguments, "--prompts-per-batch", "8"])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["random:quickstart", "--precisions", "int3"], "'int3': precision.weights must be one of"),
        (["random:quickstart", "--precisions", "int4@48"], "precision.block_size=48 does not divide the 16 head_dim"),
        (["random:quickstart", "--temperatures", "0"], "temperatures must be positive"),
        (["random:quickstart", "--staleness", "2"], r"staleness 2 needs a run"),
        (["random:quickstart", "--staleness", "-1"], r"staleness must be one or more numbers of steps, got \(-1,\)"),
        (["random:quickstart", "--seed", "-1"], "seed must be at least 0"),
        (["random:quickstart", "--task", "quickstart", "--prompts", "/dev/null"], "--prompts or --task, not both"),
        (
            ["random:quickstart", "--response-tokens", "5000"],
            "prompt 0 of the task has 11 tokens: .* context of 4096",
        ),
        (["random:quickstart", "--prompts", "no/such"], "there is no file of prompts no/such"),
        (["smollm2-135m"], "smollm2-135m has no task of its own; give --prompts FILE or --task TASK"),
        (["random:nothing"], "no experiment 'nothing'"),
        (["random:quickstart:ppo"], "unknown variant 'ppo'"),
        (["no/such/run"], "no/such/run"),
        (["random:quickstart", "--num-prompts", "0"], "num_prompts must be at least 1"),
        (["random:quickstart", "--response-tokens", "0"], "limits on tokens must be positive"),
        (["random:quickstart", "--prompts", "/dev/null"], "there is no prompt in /dev/null"),
        (["random:quickstart", "--samples-per-prompt", "1"], "samples_per_prompt must be at least 2"),
    ],
)
def test_mistakes_are_one_line_before_anything_compiles(arguments, message):
    with pytest.raises((ValueError, OSError), match=message) as error:
        command.run(arguments)
    assert "\n" not in str(error.value)
