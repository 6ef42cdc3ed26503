"""Tasks as a command line names them."""

from __future__ import annotations

import inspect

from p3o_jax.rewards.base import import_function
from p3o_jax.tasks import layouts
from p3o_jax.tasks.base import Task
from p3o_jax.tasks.reasoning_gym import ReasoningGym

LAYOUTS = [
    name
    for name, function in inspect.getmembers(layouts, inspect.isfunction)
    if function.__module__ == layouts.__name__ and not name.startswith("_")
]
"""The functions of `layouts`."""


def task_of(specification: str) -> Task:
    """The task that `LAYOUT:FILE`, `reasoning_gym:DATASET` or `module:function` names; files are for evaluation.

    Raises:
        ValueError: none of them, or a function that needs arguments.
    """
    head, _, rest = specification.partition(":")
    if head in LAYOUTS and rest:
        return getattr(layouts, head)(evaluation_path=rest)
    if head == "reasoning_gym" and rest:
        return ReasoningGym(rest)
    if not rest:
        raise ValueError(
            f"task {specification!r}: give LAYOUT:FILE ({', '.join(LAYOUTS)}), reasoning_gym:DATASET, "
            "EXPERIMENT[:VARIANT] or module:function"
        )
    function = import_function(specification)
    try:
        task = function()
    except TypeError as error:
        raise ValueError(f"task {specification!r} cannot be called without arguments: {error}") from error
    if not isinstance(task, Task):
        raise ValueError(f"task {specification!r}: it returns a {type(task).__name__}, not a task")
    return task
