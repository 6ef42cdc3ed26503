"""The stream of prompts, and the evaluation set.

The stream is a pure function of (seed, position), the position a global example index: all
that a checkpoint needs of it is that number, which any number of processes can restore.
Every process makes the whole batch, since prompts are tiny, and takes its part of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import grain

from p3o_jax.tasks.base import Prompt, PromptSource, Split, Task

EVALUATION_SEED = 20_260_512  # a constant: all runs are evaluated on the same prompts


def prompt_batches(
    task: Task, seed: int, prompts_per_step: int, *, position: int = 0, split: Split = "train"
) -> Iterator[list[Prompt]]:
    """The stream from a position on, in batches, without end; prefetched by threads.

    Each pass over the task's prompts is in an order of its own; batches run on across passes, so none is partial.
    `Prompt.index` is the position in the stream, unique across passes.

    Args:
        task: where the prompts come from.
        seed: of prompts and order.
        prompts_per_step: size of a batch, over all processes.
        position: prompts of the stream already taken, over all processes.
        split: which prompts.

    Raises:
        ValueError: `prompts_per_step` < 1 or `position` < 0.
    """
    if prompts_per_step < 1 or position < 0:
        raise ValueError(
            f"prompts_per_step must be at least 1 and position at least 0, got {prompts_per_step} and {position}"
        )
    stream = _stream(task.prompts(split, seed), seed)
    batches = stream[position:].batch(prompts_per_step, batch_fn=list)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))


def _stream(source: PromptSource, seed: int) -> grain.MapDataset:
    shuffled = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    return shuffled.map_with_index(lambda position, prompt: prompt._replace(index=position))


def evaluation_prompts(task: Task, count: int) -> list[Prompt]:
    """The evaluation set: the first `count` prompts of the evaluation split, the same for every run.

    Raises:
        ValueError: the task has fewer.
    """
    source = task.prompts("evaluation", EVALUATION_SEED)
    if not 0 < count <= len(source):
        raise ValueError(f"evaluation_prompts must be between 1 and the task's {len(source)}, got {count}")
    return [source[i] for i in range(count)]
