"""How far a sampler is from the policy being trained, before anything is trained.

For every cell of precision x temperature x staleness the sampler draws responses, and the learner's forward pass, the
one that training uses, gives the log-probs of the same tokens:

    log_ratio_t = log pi(y_t) - log mu(y_t)      pi the learner, mu the sampler of the cell

and from these the ESS and what else `p3o_jax.batch.stats` says of a batch of rollouts. Besides the cells, the noise
floor:
the learner against itself on the same tokens in another batch shape, and the sampler at the learner's own precision.
"""

from p3o_jax.probe.findings import Cell, Mismatch, Report, Token
from p3o_jax.probe.prober import Prober, Settings

__all__ = ["Cell", "Mismatch", "Prober", "Report", "Settings", "Token"]
