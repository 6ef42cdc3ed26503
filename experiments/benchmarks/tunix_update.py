"""One update of Tunix's GRPO learner (google-tunix 0.1.7), for `experiments.benchmarks.learner`.

Its jitted training step alone: without its loop, its logging and its data pipeline.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner, TrainExample
from tunix.rl.rollout import base_rollout

from experiments.benchmarks import shape
from experiments.integrations.tunix import Letters


def main() -> None:
    """Builds the learner and serves measurements of its update."""
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
    config = llama.ModelConfig(
        num_layers=shape.LAYERS,
        vocab_size=shape.VOCABULARY,
        embed_dim=shape.WIDTH,
        hidden_dim=shape.MLP,
        num_heads=shape.HEADS,
        head_dim=shape.HEAD_DIM,
        num_kv_heads=shape.KV_HEADS,
        rope_theta=10_000,
        norm_eps=1e-6,
    )
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    with mesh:
        cluster = rl_cluster.RLCluster(
            actor=llama.Llama3(config, rngs=nnx.Rngs(0)),
            tokenizer=Letters(),
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh=dict.fromkeys(roles, mesh),
                training_config=rl_cluster.RLTrainingConfig(
                    actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5)),
                    eval_every_n_steps=1000,
                ),
                rollout_config=base_rollout.RolloutConfig(
                    max_tokens_to_generate=8, max_prompt_length=8, kv_cache_size=32
                ),
            ),
        )
        GRPOLearner(
            rl_cluster=cluster,
            algo_config=GRPOConfig(num_generations=shape.GROUP, num_iterations=2, beta=0.0),
            reward_fns=lambda prompts, completions, **kwargs: [0.0] * len(prompts),
        )
        rng = np.random.default_rng(0)
        response = (shape.ROWS, shape.RESPONSE)
        example = TrainExample(
            prompt_ids=jnp.asarray(rng.integers(3, shape.VOCABULARY, (shape.ROWS, shape.PROMPT))),
            prompt_mask=jnp.ones((shape.ROWS, shape.PROMPT), jnp.bool_),
            completion_ids=jnp.asarray(rng.integers(3, shape.VOCABULARY, response)),
            completion_mask=jnp.ones(response, jnp.bool_),
            advantages=jnp.asarray(rng.normal(size=shape.ROWS), jnp.float32),
            ref_per_token_logps=None,
            old_per_token_logps=jnp.full(response, -6.3, jnp.float32),
        )
        update, _ = cluster.actor_trainer.jit_train_and_eval_step()

        def step() -> None:
            _, _, norm = update(example)
            jax.block_until_ready((norm, nnx.state(cluster.actor_trainer.model)))

        shape.serve(step)


if __name__ == "__main__":
    main()
