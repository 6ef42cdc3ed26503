"""Measures how far samplers are from the policy being trained: the compiled parts, and the walk over the cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float, Shaped

from p3o_jax.batch.types import AnyArray, Batch, Rollout
from p3o_jax.devices import sharding
from p3o_jax.devices.precision import Precision
from p3o_jax.experience.batches import make_batch
from p3o_jax.learner.learner import Learner
from p3o_jax.learner.optimizer import OptimizerConfig
from p3o_jax.learner.plan import StepPlan
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.objectives import P3OSnapshot, kl
from p3o_jax.probe.findings import Cell, Mismatch, Report, Token, mismatch
from p3o_jax.sampler import Engine, Requests, Sampler, Sampling, SamplingLimits
from p3o_jax.sampler.sampling import check_seed, is_temperature
from p3o_jax.tokenizers.text import Tokenizer

EXACT_VOCABULARY = 8192
"""Up to this size of the vocabulary whole distributions are compared; beyond, their top `SUPPORT_TOKENS`."""
SUPPORT_TOKENS = 256


@dataclass(frozen=True)
class Settings:
    """What is probed."""

    precisions: tuple[Precision, ...]
    temperatures: tuple[float, ...] = (1.0,)
    samples_per_prompt: int = 4
    prompts_per_batch: int = 16
    learner_temperature: float = 1.0
    top_tokens: int = 5
    """Tokens that are shown of every cell: those with the largest |log ratio|."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("samples_per_prompt", 2), ("prompts_per_batch", 1), ("top_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"probe: {name} must be at least {least}, got {getattr(self, name)}")
        for name, values in (
            ("temperatures", self.temperatures),
            ("learner_temperature", (self.learner_temperature,)),
        ):
            if not values or not all(map(is_temperature, values)):
                raise ValueError(f"probe: {name} must be positive and finite, got {values}")
        if not self.precisions:
            raise ValueError("probe: no precision was given")
        check_seed(self.seed)


class Prober:
    """The compiled parts of a probe of one architecture."""

    def __init__(
        self,
        model: TransformerConfig,
        tokenizer: Tokenizer,
        limits: SamplingLimits,
        mesh: Mesh,
        settings: Settings,
    ):
        """
        Raises:
            ValueError: the limits or a precision do not fit the model.
        """
        self._tokenizer, self._mesh, self._settings = tokenizer, mesh, settings
        vocab_size = tokenizer.vocab_size
        self.kl: Literal["exact", "top_k"] = "exact" if vocab_size <= EXACT_VOCABULARY else "top_k"
        self._support: int | Literal["exact"] = "exact" if self.kl == "exact" else min(SUPPORT_TOKENS, vocab_size)
        # The objective's snapshot pass is the learner's forward, and takes the sampler's support.
        plan = StepPlan(P3OSnapshot(kl=self.kl), support_tokens=SUPPORT_TOKENS)
        self._learner = Learner(model, vocab_size, plan, OptimizerConfig(), mesh, num_updates=1)
        self._own = Precision(model.dtype, model.dtype, model.dtype)
        self._engines: dict[Precision, Engine] = {
            precision: Sampler(model, vocab_size, limits, precision, mesh)
            for precision in (self._own, *settings.precisions)
        }
        self._divergence = jax.jit(lambda learner, sampler: kl.distribution(self.kl, learner, sampler))

    def run(
        self,
        prompts: Sequence[tuple[int, Sequence[int]]],
        params: nnx.State,
        policies: Mapping[int, Callable[[], nnx.State]] | None = None,
        found: Callable[[Report], None] = lambda report: None,
    ) -> Report:
        """Measures every cell.

        Args:
            prompts: an index and token ids each.
            params: the learner's.
            policies: parameters of the policies that sample by their staleness, loaded when their turn comes. None: the
                learner's own.
            found: is given what is known so far, the noise floor first, after every cell.

        Raises:
            ValueError: a prompt does not fit, or a sampler's log-probs are not finite.
        """
        settings, own = self._settings, self._own
        weights = self._engines[own].publish(params)
        floor, drawn = self._cell(own, settings.learner_temperature, 0, weights, params, prompts)
        batch_shape = self._batch_shape(params, drawn)
        del drawn
        report = Report((), batch_shape, floor, str(own), settings.learner_temperature, self.kl)
        found(report)
        for staleness, load in ({0: lambda: params} if policies is None else policies).items():
            sampled_by = load()
            for precision in settings.precisions:
                weights = self._engines[precision].publish(sampled_by, -staleness)
                for temperature in settings.temperatures:
                    if (precision, temperature, staleness) == (own, settings.learner_temperature, 0):
                        cell = floor
                    else:
                        cell, _ = self._cell(precision, temperature, staleness, weights, params, prompts)
                    report = replace(report, cells=(*report.cells, cell))
                    found(report)
        return report

    def _cell(
        self,
        precision: Precision,
        temperature: float,
        staleness: int,
        weights: Any,
        params: nnx.State,
        prompts: Sequence[tuple[int, Sequence[int]]],
    ) -> tuple[Cell, list[tuple[Batch, Any]]]:
        """A cell, and its batches with the prompt of each row."""
        batches, rollouts, of_learner, divergences = [], [], [], []
        for part in _parts(prompts, self._settings.prompts_per_batch):
            rollout = self._draw(precision, weights, temperature, part)
            batch = self._batch(rollout)
            seen = self._learner.snapshot(params, sharding.to_global(batch, self._mesh))
            divergence = self._divergence(seen.support.proximal_log_probs, seen.support.behaviour_log_probs)
            of_learner.append(sharding.to_local(seen.proximal_log_probs))
            divergences.append(sharding.to_local(divergence))
            rollouts.append(rollout._replace(support=None))
            batches.append(batch._replace(support=None))
        mask, behaviour = (_stack([getattr(b, name) for b in batches]) for name in ("mask", "behaviour_log_probs"))
        log_probs, divergence = _stack(of_learner), _stack(divergences)
        group = np.concatenate([rollout.group for rollout in rollouts])
        found = mismatch(log_probs, behaviour, divergence, mask, group)
        top = tuple(self._top(rollouts, of_learner, batches))
        drawn = [(batch, rollout.group) for batch, rollout in zip(batches, rollouts, strict=True)]
        return Cell(str(precision), temperature, staleness, found, top), drawn

    def _draw(self, precision: Precision, weights: Any, temperature: float, prompts: Sequence) -> Rollout:
        requests = Requests(
            [ids for _, ids in prompts],
            [index for index, _ in prompts],
            jax.random.key(self._settings.seed),
            self._settings.samples_per_prompt,
            Sampling(temperature),
            support=self._support,
        )
        return sharding.to_local(self._engines[precision].generate(weights, requests))

    def _batch(self, rollout: Rollout) -> Batch:
        no_advantages = np.zeros(len(rollout.tokens), np.float32)
        return make_batch(rollout, no_advantages, learner_temperature=self._settings.learner_temperature, step=0)

    def _batch_shape(self, params: nnx.State, drawn: Sequence[tuple[Batch, Any]]) -> Mismatch:
        """The learner's forward pass of the same rows, at once and in two halves with a column more of padding."""
        whole, halves, masks, groups = [], [], [], []
        shards = sharding.num_batch_shards(self._mesh)
        for batch, group in drawn:
            rows = len(batch.mask) // 2 // shards * shards

            def part(start: int, batch: Batch = batch, rows: int = rows) -> Batch:
                padding = ((0, 0), (0, 1))
                return jax.tree.map(lambda leaf: np.pad(leaf[start : start + rows], padding, mode="edge"), batch)

            log_probs = [
                sharding.to_local(self._learner.log_probs(params, sharding.to_global(rows_of, self._mesh))[0])
                for rows_of in (batch, part(0), part(rows))
            ]
            whole.append(log_probs[0][: 2 * rows])
            halves.append(np.concatenate(log_probs[1:])[:, :-1])
            masks.append(batch.mask[: 2 * rows])
            groups.append(group[: 2 * rows])
        return mismatch(_stack(whole), _stack(halves), None, _stack(masks), np.concatenate(groups))

    def _top(
        self, rollouts: list[Rollout], of_learner: list[Float[np.ndarray, "_ _"]], batches: list[Batch]
    ) -> Iterator[Token]:
        """The tokens with the largest |log ratio|, those that are not finite first; each prompt and position once."""
        found: dict[tuple[int, int], tuple[float, int, int, int]] = {}
        for i, (log_probs, batch) in enumerate(zip(of_learner, batches, strict=True)):
            size = np.abs(log_probs - batch.behaviour_log_probs)
            size = np.where(batch.mask, np.where(np.isfinite(size), size, np.inf), -1.0)
            for at in np.argsort(-size, axis=None)[: 8 * self._settings.top_tokens]:
                row, column = divmod(int(at), size.shape[1])
                place = (int(rollouts[i].group[row]), column)
                if size[row, column] > found.get(place, (-1.0,))[0]:
                    found[place] = (float(size[row, column]), i, row, column)
        for _, i, row, column in sorted(found.values(), reverse=True)[: self._settings.top_tokens]:
            rollout, at = rollouts[i], column + 1
            before = rollout.tokens[row, max(0, at - 24) : at].tolist()
            yield Token(
                int(rollout.group[row]),
                int(rollout.action_mask[row, :at].sum()),
                self._tokenizer.decode(before),
                self._tokenizer.decode([int(rollout.tokens[row, at])]) or f"<{int(rollout.tokens[row, at])}>",
                float(of_learner[i][row, column]),
                float(batches[i].behaviour_log_probs[row, column]),
            )


def _parts(prompts: Sequence, size: int) -> list[Sequence]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def _stack(parts: Sequence[Shaped[AnyArray, "_ _"]]) -> Shaped[np.ndarray, "B T"]:
    """Rows of all parts [B, T]; shorter ones are padded at the end, where the mask is False."""
    longest = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (0, longest - part.shape[1]))) for part in parts])
