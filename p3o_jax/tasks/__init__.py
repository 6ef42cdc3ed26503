"""Tasks: prompts and rewards."""

from p3o_jax.tasks.base import Prompt, PromptSource, Split, Task
from p3o_jax.tasks.dataset import Dataset
from p3o_jax.tasks.mixture import Mixture, Share
from p3o_jax.tasks.reasoning_gym import ReasoningGym
from p3o_jax.tasks.sort_digits import SortDigits

__all__ = ["Dataset", "Mixture", "Prompt", "PromptSource", "ReasoningGym", "Share", "SortDigits", "Split", "Task"]
