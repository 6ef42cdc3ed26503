"""Policy-gradient objectives as frozen dataclasses: arrays in, loss and metrics out.

    from p3o_jax.objectives import P3O, objective_loss

    loss, metrics = objective_loss(
        P3O(), log_probs, behaviour_log_probs=..., advantages=..., mask=...
    )
"""

from p3o_jax.objectives.aggregation import ConstantNormaliser, SequenceMean, TokenMean
from p3o_jax.objectives.base import Objective
from p3o_jax.objectives.functional import objective_loss
from p3o_jax.objectives.grpo import DrGrpo, Grpo, Ppo
from p3o_jax.objectives.p3o import P3O
from p3o_jax.objectives.reinforce import Reinforce, Rloo

__all__ = [
    "P3O",
    "ConstantNormaliser",
    "DrGrpo",
    "Grpo",
    "Objective",
    "Ppo",
    "Reinforce",
    "Rloo",
    "SequenceMean",
    "TokenMean",
    "objective_loss",
]
