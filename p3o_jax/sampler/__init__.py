"""Sampling from the policy, in its own precision, with the log-probs of what was drawn."""

from p3o_jax.sampler.decode import Sampler, SamplingLimits
from p3o_jax.sampler.weights import Weights

__all__ = ["Sampler", "SamplingLimits", "Weights"]
