"""A completion of a prompt, as it is drawn, by any policy in any precision."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tyro
from tyro.conf import Positional, arg

from p3o_jax.commands.arguments import Counts, ModelArguments, SamplingArguments
from p3o_jax.devices.sharding import MeshShape

if TYPE_CHECKING:
    from p3o_jax.batch.types import Rollout
    from p3o_jax.policies import LoadedPolicy
    from p3o_jax.tokenizers.text import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Arguments(SamplingArguments, ModelArguments):
    """What to complete, and how."""

    prompt: Annotated[Positional[str | None], arg(metavar="[PROMPT]")] = None
    """The prompt. Default: standard input."""
    samples_per_prompt: int = 1
    """Completions; of one alone the text comes as it is drawn."""
    response_tokens: int = 256
    """Longest completion."""
    greedy: bool = False
    """Take the most likely token instead of drawing, with none of temperature, top-k, top-p and min-p; its log-prob is
    then 0."""
    log_probs: bool = False
    """Print every token with its log-probability under the distribution it was drawn from."""
    stop_ids: Counts = ()
    """Tokens that end a completion besides the model's own."""
    mesh: MeshShape = MeshShape(data=1)
    """Which devices work; --mesh.tensor shares a model that is too large for one."""
    seed: int = 0
    """Everything random is a function of it."""


def run(arguments: Sequence[str]) -> None:
    """Prints the completion; with several, or with log-probs, each under a heading."""
    asked = tyro.cli(Arguments, args=list(arguments), prog="p3o sample", description=__doc__)

    import jax

    from p3o_jax.devices import sharding
    from p3o_jax.devices.cache import enable_compilation_cache
    from p3o_jax.experience.batches import check_log_probs
    from p3o_jax.sampler import Requests, Sampler, Sampling, SamplingLimits
    from p3o_jax.sampler.sampling import check_seed
    from p3o_jax.terminal import shown

    if asked.samples_per_prompt < 1 or asked.response_tokens < 1:
        raise ValueError(
            f"sample: samples_per_prompt={asked.samples_per_prompt} and response_tokens={asked.response_tokens} must "
            "be at least 1"
        )
    check_seed(asked.seed)
    sampling, precision = asked.sampling(), asked.formats()
    if asked.greedy and sampling != Sampling():
        raise ValueError("sample: --greedy draws nothing: leave out temperature, top-k, top-p and min-p")
    shape = asked.mesh
    count = abs(shape.data) * shape.fsdp * shape.tensor * shape.slice if shape.data > 0 else jax.device_count()
    mesh = sharding.make_mesh(shape, jax.devices()[:count])
    enable_compilation_cache()
    policy = asked.open(mesh)
    ids = _encoded_prompt(asked, policy)
    limits = SamplingLimits(len(ids), asked.response_tokens, policy.tokenizer.eos_ids, asked.stop_ids)
    sampler = Sampler(policy.model, policy.tokenizer.vocab_size, limits, precision, mesh)
    weights = sampler.publish(policy.params, policy.step)

    alone = asked.samples_per_prompt == 1
    typed = Typed(policy.tokenizer, set(limits.eos_ids + limits.stop_ids), lambda piece: sys.stdout.write(shown(piece)))
    shards = sharding.num_batch_shards(mesh)  # which all need a prompt, and answer it alike
    with _ended_by_signals():
        key = jax.random.key(asked.seed)
        requests = Requests([ids] * shards, [0] * shards, key, asked.samples_per_prompt, sampling, greedy=asked.greedy)
        rollout = sampler.generate(weights, requests, on_draw=typed if alone else None)
        jax.effects_barrier()
    rollout = jax.tree.map(lambda leaf: leaf[: asked.samples_per_prompt], sharding.to_local(rollout))
    check_log_probs(rollout, rollout.action_mask)
    if alone:
        typed.finish()
    _print(rollout, policy.tokenizer, texts=not alone, log_probs=asked.log_probs)


def _encoded_prompt(asked: Arguments, policy: LoadedPolicy) -> Sequence[int]:
    """Tokenises the prompt, which may come on standard input.

    Raises:
        ValueError: it is empty, or too long for the model.
    """
    text = asked.prompt
    if text is None and sys.stdin is not None:
        text = sys.stdin.read().rstrip("\n")
    ids = policy.tokenizer.encode(text or "")
    if not text or not ids:
        raise ValueError("sample: the prompt is empty: give it as an argument, or on standard input")
    if len(ids) + asked.response_tokens > policy.model.context_tokens:
        raise ValueError(
            f"sample: the prompt has {len(ids)} tokens: with a response of {asked.response_tokens} more than the "
            f"model's context of {policy.model.context_tokens}; give fewer --response-tokens, or a shorter prompt"
        )
    return ids


def _print(rollout: Rollout, tokenizer: Tokenizer, *, texts: bool, log_probs: bool) -> None:
    """Prints completions under headings: their texts, their tokens with log-probs, or both."""
    from p3o_jax.batch.types import FinishReason, responses
    from p3o_jax.terminal import say

    for row, completion in enumerate(responses(rollout)):
        actions = rollout.action_mask[row]
        drawn, log_prob_of = rollout.tokens[row, actions].tolist(), rollout.behaviour_log_probs[row, actions]
        reason = FinishReason(int(rollout.finish_reason[row])).name.lower()
        heading = f"{len(drawn)} tokens, ended by {reason}, log-prob {float(log_prob_of.sum()):.3f}"
        if texts:
            say(f"--- {row + 1}: {heading}\n{tokenizer.decode(completion)}")
        elif log_probs:
            print(f"--- {heading}")
        for token, log_prob in zip(drawn, log_prob_of.tolist(), strict=True) if log_probs else ():
            print(f"{log_prob:10.4f}  {math.exp(log_prob):7.2%}  {token:7d}  {tokenizer.decode([token])!r}")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A block in which Ctrl-C and a closed output end the process at once, as they end other programs.

    It writes nothing but the output, and an exception does not pass through a compiled program.
    """
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGPIPE)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Typed:
    """Writes the text of row 0 as its tokens are drawn, each piece valid by itself."""

    def __init__(self, tokenizer: Tokenizer, silent: set[int], write: Callable[[str], object]):
        from p3o_jax.tokenizers.text import TextStream

        self._stream, self._silent, self._write = TextStream(tokenizer), silent, write
        self._waiting: dict[int, int] = {}
        self._next = 0

    def __call__(self, row: np.ndarray, place: np.ndarray, token: np.ndarray, log_prob: np.ndarray) -> None:
        """As `Sampler` calls it: in any order, and by every device that has the row."""
        for one_row, at, one in zip(row, place, token, strict=True):
            if one_row == 0 and at >= self._next:
                self._waiting[int(at)] = int(one)
        while self._next in self._waiting:
            one = self._waiting.pop(self._next)
            self._next += 1
            if one not in self._silent:
                self._write(self._stream.push(one))
                sys.stdout.flush()

    def finish(self) -> None:
        """What is left of the text, and a new line."""
        self._write(self._stream.finish() + "\n")
