"""Policy-gradient objectives as frozen dataclasses: arrays in, loss and metrics out.

from p3o_jax.objectives import P3O, objective_loss

loss, metrics = objective_loss(
    P3O(), log_probs, behaviour_log_probs=..., advantages=..., mask=...
)
"""

from p3o_jax.objectives.aggregation import Aggregation, ConstantNormaliser, SequenceMean, TokenMean
from p3o_jax.objectives.base import Objective
from p3o_jax.objectives.cispo import Cispo
from p3o_jax.objectives.decoupled import DecoupledCispo, DecoupledPpo
from p3o_jax.objectives.functional import objective_loss
from p3o_jax.objectives.grpo import DrGrpo, Grpo, Ppo
from p3o_jax.objectives.gspo import Gspo, GspoToken
from p3o_jax.objectives.p3o import P3O
from p3o_jax.objectives.p3o_snapshot import P3OSnapshot
from p3o_jax.objectives.p4o import P4O
from p3o_jax.objectives.reinforce import Reinforce, Rloo
from p3o_jax.objectives.sapo import Sapo
from p3o_jax.objectives.truncated_is import MaskedIs, TruncatedIs, Vcpo

__all__ = [
    "P3O",
    "P4O",
    "Aggregation",
    "Cispo",
    "ConstantNormaliser",
    "DecoupledCispo",
    "DecoupledPpo",
    "DrGrpo",
    "Grpo",
    "Gspo",
    "GspoToken",
    "MaskedIs",
    "Objective",
    "P3OSnapshot",
    "Ppo",
    "Reinforce",
    "Rloo",
    "Sapo",
    "SequenceMean",
    "TokenMean",
    "TruncatedIs",
    "Vcpo",
    "objective_loss",
]
