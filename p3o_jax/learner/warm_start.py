"""Supervised training that gives a randomly initialised policy something to improve on.

The loss is REINFORCE's with advantage 1 on demonstrations, so it is the learner's own update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from p3o_jax.batch.types import Batch, Inputs
from p3o_jax.devices import sharding
from p3o_jax.devices.processes import row_part
from p3o_jax.learner.learner import Learner
from p3o_jax.learner.optimizer import OptimizerConfig
from p3o_jax.learner.plan import StepPlan
from p3o_jax.models import lora
from p3o_jax.models.transformer import TransformerConfig
from p3o_jax.objectives import Reinforce
from p3o_jax.tasks.base import Task


@dataclass(frozen=True)
class WarmStart:
    """Supervised steps on noisy demonstrations: a policy that knows the task but is unsure of it."""

    num_steps: int = 500
    """Supervised optimizer updates."""
    rows_per_step: int = 128
    """Demonstrations in an update."""
    noise: float = 0.15
    """Probability with which each character of an answer is replaced by a random one."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-3, warmup_updates=20, decay="cosine", beta2=0.95)
    """Optimizer of the supervised steps."""

    def __post_init__(self) -> None:
        if not 0 <= self.noise <= 1:
            raise ValueError(f"warm_start.noise must be in [0, 1], got {self.noise}")
        for name in ("num_steps", "rows_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"warm_start.{name} must be at least 1, got {getattr(self, name)}")


_UPDATES_BETWEEN_PAUSES = 20


def taught(
    task: Task, config: WarmStart, model: TransformerConfig, params: nnx.State, mesh: Mesh, *, seed: int,
    pause: Callable[[], None] = lambda: None,
) -> nnx.State:  # fmt: skip
    """Trains all weights, adapters left aside, on demonstrations, and returns the parameters.

    Args:
        task: demonstrates.
        config: how much, and how noisy.
        model: the architecture.
        params: where it starts, sharded as the learner has them.
        mesh: the learner's.
        seed: of the demonstrations.
        pause: called now and then, and may raise.
    """
    teacher = Learner(
        replace(model, lora=None),  # every weight
        task.tokenizer.vocab_size,
        StepPlan(Reinforce()),
        config.optimizer,
        mesh,
        num_updates=config.num_steps,
    )
    if jax.process_index() == 0:
        print(f"warm start: {config.num_steps} supervised updates", flush=True)
    state = teacher.init_from(lora.without_adapters(params))
    process, num_processes = row_part(mesh)
    for i, batch in enumerate(demonstrations(task, config, seed, num_processes=num_processes, process=process)):
        if i % _UPDATES_BETWEEN_PAUSES == 0:
            pause()
        state, _ = teacher.update(state, sharding.to_global(batch, mesh))
    return lora.with_weights(params, state.params)


def demonstrations(
    task: Task, config: WarmStart, seed: int, *, num_processes: int = 1, process: int = 0
) -> Iterator[Batch]:
    """This process's rows of each supervised batch; a function of the seed.

    Raises:
        ValueError: a demonstration is longer than the task allows.
    """
    source = task.prompts("train", seed)
    slots = task.max_prompt_tokens + task.max_response_tokens
    share = config.rows_per_step // num_processes
    for step in range(config.num_steps):
        tokens = np.zeros((share, slots), np.int32)
        prompt_length, length = np.zeros((2, share), np.int32)
        for row in range(share):
            example = step * config.rows_per_step + process * share + row
            prompt = source[example % len(source)]
            rng = np.random.default_rng((seed, example))
            question = task.tokenizer.encode(prompt.text)
            answer = task.tokenizer.encode(task.demonstration(prompt, config.noise, rng))
            ids = [*question, *answer, task.tokenizer.eos_ids[0]]
            if len(question) > task.max_prompt_tokens or len(ids) - len(question) > task.max_response_tokens:
                raise ValueError(
                    f"warm start: demonstration {example} has {len(question)} + {len(ids) - len(question)} tokens, but "
                    f"the task allows {task.max_prompt_tokens} + {task.max_response_tokens}: {prompt.text!r}"
                )
            tokens[row, : len(ids)], prompt_length[row], length[row] = ids, len(question), len(ids)
        at = np.arange(1, slots)[None, :]
        mask = (at >= prompt_length[:, None]) & (at < length[:, None])
        ones = np.ones(mask.shape, np.float32)
        positions = np.ascontiguousarray(np.broadcast_to(np.arange(slots - 1, dtype=np.int32), mask.shape))
        yield Batch(
            mask=mask,
            behaviour_log_probs=np.zeros(mask.shape, np.float32),
            advantages=ones,
            inputs=Inputs(tokens[:, :-1], tokens[:, 1:], positions, ones),
        )
