"""Run directories as a run leaves them, with made-up numbers: for what reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from p3o_jax.batch.metrics import Histogram
from p3o_jax.batch.stats import LOG_RATIO_EDGES
from p3o_jax.config import Config, hyperparameters, to_json
from p3o_jax.writers import Writer

ENVIRONMENT = [
    {"time": "2026-01-02T03:04:05", "devices": {"kind": "TPU v5p", "count": 8}, "commit": {"hash": "abcdef0"}}
]

STOPPED = {"state": "stopped", "reason": "asked to end"}


def metrics_at(step: int, seed: int, off_policy: float) -> dict:
    """Numbers that rise and fall as those of a run do."""
    wave = np.sin(step + 3 * seed) / 40
    return {
        "reward/mean": 1 - 1 / (1 + step / 10) + wave,
        "policy/ess": 1 - off_policy + wave / 4,
        "policy/ess_min": 1 - 2 * off_policy + wave / 4,
        "policy/ess/position=1-3": 1 - off_policy / 2,
        "policy/ess/position=4-15": 1 - off_policy,
        "policy/cap_fraction": 0.5 + wave,
        "policy/behaviour_kl_proxy": off_policy / 2,
        "policy/precision_gap_kl": off_policy / 100,
        "policy/ratio_mean": 1 + wave / 10,
        "policy/entropy": 1 / (1 + step / 10),
        "policy/log_ratio_histogram": Histogram(LOG_RATIO_EDGES, np.arange(len(LOG_RATIO_EDGES) + 1)),
        "optim/grad_norm": 0.5 + wave,
        "optim/skipped_updates": 0.0,
        "rollout/staleness_mean": 0.0,
        "time/sampler_tokens_per_second": 1000.0 + step,
    }


def rows_at(step: int, num_prompts: int = 2) -> list[dict]:
    """Two completions to each prompt."""
    return [
        {
            "prompt_index": 10 * step + prompt,
            "prompt": f"{step}{prompt}=</script>",
            "completion": "13",
            "reward": float(sample),
            "advantage": sample - 0.5,
            "finish_reason": "eos",
            "policy_version": step - 1,
            "tokens": ["1", " <b>", "\n", ""],
            "behaviour_log_probs": [-0.5, -1.0, -0.25, -0.125],
            "log_ratios": [0.0, -2.0, 0.7, 0.125],
        }
        for prompt in range(num_prompts)
        for sample in range(2)
    ]


def make_run(
    path: Path, config: Config, *, steps: int, off_policy: float, extra: Mapping[int, dict] | None = None
) -> Path:
    """A run of `config` that has made some steps; `extra`: further metrics by step."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(to_json(config)))
    (path / "environment.json").write_text(json.dumps(ENVIRONMENT))
    status = {"state": "finished", "reason": ""} if steps == config.num_steps else STOPPED
    (path / "status.json").write_text(json.dumps({"host": "a", "pid": 1, "time": 0.0} | status))
    with Writer(path) as writer:
        writer.describe(hyperparameters(config))
        writer.write(0, {"eval/sort_digits/pass@1": 0.2, "eval/sort_digits/greedy": 0.5})
        for step in range(1, steps + 1):
            metrics = metrics_at(step, config.seed, off_policy) | (extra or {}).get(step, {})
            if step % 5 == 0:
                metrics["eval/sort_digits/pass@1"] = 0.2 + step / 50 + config.seed / 100
            writer.write(step, metrics)
            if step % 5 == 0:
                writer.rollouts(step, rows_at(step))
    return path
