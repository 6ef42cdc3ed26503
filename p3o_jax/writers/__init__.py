"""What a run writes while it runs: TensorBoard events, metrics.jsonl, rollouts, a progress line."""

from p3o_jax.writers.progress import Progress
from p3o_jax.writers.writer import Writer, read_metrics

__all__ = ["Progress", "Writer", "read_metrics"]
