"""The stream of prompts, and the evaluation set.

The stream is a pure function of (seed, position), the position a global example index: all
that a checkpoint needs of it is that number, which any number of processes can restore.
Every process makes the whole batch, since prompts are tiny, and takes its part of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple, TypeVar

import grain

from p3o_jax.tasks import Dataset
from p3o_jax.tasks.base import EVALUATION_SEED, Prompt, PromptSource, Split, Task, digest_of
from p3o_jax.tokenizers.text import Tokenizer

_logger = logging.getLogger(__name__)

_DRAWS_PER_PROMPT = 8
_PROCEDURAL_PROMPTS = 256


class EncodedPrompt(NamedTuple):
    """A prompt and its tokens, as the model reads it."""

    prompt: Prompt
    ids: Sequence[int]


def encoded(prompts: Iterable[Prompt], tokenizer: Tokenizer) -> list[EncodedPrompt]:
    """Tokenises prompts."""
    return [EncodedPrompt(prompt, tokenizer.encode(prompt.text)) for prompt in prompts]


def prompt_batches(
    task: Task, seed: int, prompts_per_step: int, *, position: int = 0, split: Split = "train"
) -> Iterator[list[Prompt]]:
    """Yields the stream from a position on, in batches, without end; prefetched by threads.

    Each pass over the task's prompts is in an order of its own; batches run on across passes, so none is partial.
    `Prompt.index` is the position in the stream, unique across passes: the position after a batch is one more than its
    last prompt's.

    Args:
        task: where the prompts come from.
        seed: of prompts and order.
        prompts_per_step: size of a batch, over all processes.
        position: prompts of the stream already taken or passed over, over all processes.
        split: which prompts.

    Raises:
        ValueError: `prompts_per_step` < 1 or `position` < 0.
    """
    return _in_batches(_one_by_one(task, seed, prompts_per_step, position, split), prompts_per_step)


def encoded_batches(
    task: Task, tokenizer: Tokenizer, seed: int, prompts_per_step: int, *, position: int = 0
) -> Iterator[list[EncodedPrompt]]:
    """Yields the training stream as `prompt_batches` does, tokenised, prompts longer than the task's limit passed over.

    Raises:
        ValueError: as `prompt_batches`; later, no prompt in a long stretch is short enough.
    """
    stream = _one_by_one(task, seed, prompts_per_step, position, "train")
    return _in_batches(_short_enough(stream, task.max_prompt_tokens, tokenizer), prompts_per_step)


_MAX_PASSED_OVER = 1000
T = TypeVar("T")


def _one_by_one(task: Task, seed: int, prompts_per_step: int, position: int, split: Split) -> Iterator[Prompt]:
    if prompts_per_step < 1 or position < 0:
        raise ValueError(
            f"prompts_per_step must be at least 1 and position at least 0, got {prompts_per_step} and {position}"
        )
    stream = _stream(task.prompts(split, seed), seed)[position:]
    chunks = stream.batch(prompts_per_step, batch_fn=list)  # one hand-over between threads a batch, not one a prompt
    return chain.from_iterable(chunks.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))


def _in_batches(stream: Iterator[T], size: int) -> Iterator[list[T]]:
    while batch := list(islice(stream, size)):
        yield batch


def _short_enough(stream: Iterator[Prompt], limit: int, tokenizer: Tokenizer) -> Iterator[EncodedPrompt]:
    passed_over: list[int] = []
    for prompt in stream:
        ids = tokenizer.encode(prompt.text)
        if len(ids) <= limit:
            passed_over = []
            yield EncodedPrompt(prompt, ids)
            continue
        passed_over.append(len(ids))
        if len(passed_over) == _MAX_PASSED_OVER:
            raise ValueError(
                f"{_MAX_PASSED_OVER} prompts in a row are longer than the task's limit of {limit} tokens, the "
                f"shortest of them by {min(passed_over) - limit}: raise its prompt_tokens"
            )


def _stream(source: PromptSource, seed: int) -> grain.MapDataset:
    shuffled = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    return shuffled.map_with_index(lambda position, prompt: prompt._replace(index=position))


def evaluation_prompts(task: Task, count: int) -> list[Prompt]:
    """The evaluation set: the first `count` different prompts of the evaluation split, the same for every run.

    Of a task with few different prompts there may be fewer than asked for.

    Raises:
        ValueError: the task has fewer prompts, different or not.
    """
    return _first_different(task.name, task.prompts("evaluation", EVALUATION_SEED), count)


def _first_different(name: str, source: PromptSource, count: int) -> list[Prompt]:
    if not 0 < count <= len(source):
        raise ValueError(
            f"{count} evaluation prompts of {name} were asked for (evaluation_prompts, or the number of prompts); "
            f"ask for 1 to {len(source)}"
        )
    found: dict[bytes, Prompt] = {}
    for i in range(min(len(source), _DRAWS_PER_PROMPT * count)):
        prompt = source[i]
        found.setdefault(digest_of(prompt.text), prompt)
        if len(found) == count:
            break
    if len(found) < count:
        _logger.warning("%s: only %d different evaluation prompts, not %d", name, len(found), count)
    return list(found.values())


def evaluation_sets_of(task: Task, count: int | None) -> list[list[Prompt]]:
    """The evaluation set of each of a task's components: `count` different prompts, or, of None, all that a dataset has
    and 256 of a procedural task.

    Raises:
        ValueError: one has fewer prompts, different or not.
    """
    sets = []
    for one, source in zip(task.components, task.sources("evaluation", EVALUATION_SEED), strict=True):
        all_of = len(source) if isinstance(one, Dataset) else _PROCEDURAL_PROMPTS
        sets.append(_first_different(one.name, source, all_of if count is None else count))
    return sets


def evaluation_sets(task: Task, count: int) -> dict[str, list[Prompt]]:
    """The evaluation set of each task of a mixture, by its name; of a task alone, its own."""
    return {
        one.name: [prompt._replace(task=i) for prompt in prompts]
        for i, (one, prompts) in enumerate(zip(task.components, evaluation_sets_of(task, count), strict=True))
    }
