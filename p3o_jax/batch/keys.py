"""The roots of a run's random numbers: a function of the seed, the purpose and the step."""

from __future__ import annotations

from enum import IntEnum

import jax
from jaxtyping import Array, Key


class Purpose(IntEnum):
    """What random numbers are for."""

    INIT = 0
    TRAIN = 1
    EVALUATION = 2


def run_key(seed: int, purpose: Purpose, step: int = 0) -> Key[Array, ""]:
    """Returns the key of one purpose at one step."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), purpose), step)
