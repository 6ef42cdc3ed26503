"""Sampling from the policy, in its own precision, with the log-probs of what was drawn."""

from p3o_jax.sampler.engine import Engine, Requests
from p3o_jax.sampler.sampler import Sampler, SamplingLimits
from p3o_jax.sampler.sampling import AS_THEY_ARE, Sampling
from p3o_jax.sampler.weights import Weights

__all__ = ["AS_THEY_ARE", "Engine", "Requests", "Sampler", "Sampling", "SamplingLimits", "Weights"]
