"""P3O, adaptive policy optimization for on- and off-policy RL post-training (arXiv:2605.12380), in JAX."""

__version__ = "0.1.0"
