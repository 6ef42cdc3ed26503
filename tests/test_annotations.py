"""The annotations of the package are checked while tests run."""

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from p3o_jax.batch import stats
from tests.annotations import unchecked

LOG_PROBS = jnp.zeros((2, 3))


@pytest.mark.parametrize(
    "mask",
    [jnp.ones((2, 1), bool), jnp.ones(3, bool), jnp.ones((2, 3)), None],
    ids=["another size", "an axis too few", "another dtype", "no array"],
)
def test_arrays_that_do_not_go_together_are_refused(mask):
    with pytest.raises(TypeCheckError, match="parameter 'mask'"):
        stats.log_ratio(LOG_PROBS, LOG_PROBS, mask)


def test_a_test_may_let_them_through():
    with unchecked():
        assert stats.log_ratio(LOG_PROBS, LOG_PROBS, jnp.ones((2, 1), bool)).shape == (2, 3)
