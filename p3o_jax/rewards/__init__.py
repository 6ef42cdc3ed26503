"""Rewards: what a completion is worth, as composable frozen dataclasses.

WeightedSum((Part("answer", MathVerify()), Part("format", Tags()), Part("length", OverlongPenalty(4096, 1024))))
"""

from p3o_jax.rewards.base import Completion, Function, Graded, Part, Prompt, Reward, WeightedSum, gold_fault
from p3o_jax.rewards.form import Matches, OverlongPenalty, Tags
from p3o_jax.rewards.matching import ExactMatch, NumericMatch
from p3o_jax.rewards.mathematics import MathVerify

__all__ = [
    "Completion",
    "ExactMatch",
    "Function",
    "Graded",
    "Matches",
    "MathVerify",
    "NumericMatch",
    "OverlongPenalty",
    "Part",
    "Prompt",
    "Reward",
    "Tags",
    "WeightedSum",
    "gold_fault",
]
