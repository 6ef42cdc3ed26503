"""P3O as the policy loss of Tunix's GRPO learner (google-tunix 0.1.7).

    python3.11 -m venv tunix-env && tunix-env/bin/pip install google-tunix==0.1.7 jax==0.10.2      # 1.6 GB
    JAX_PLATFORMS=cpu tunix-env/bin/python -m experiments.integrations.tunix          # from the repository root

A Llama of 2 layers learns to answer with the letter a: 8 batches of 8 prompts x 4 samples, two updates
each, 36 s on 2 CPU cores. Its output:

    micro-batches of 8 prompts
      reward by batch       0.039  0.036  0.076  0.117  0.279  0.359  0.521  0.680
      policy/ess             1.000  1.000  1.000  1.000  1.000  1.000  1.000  1.000 first
      policy/ess             0.969  0.947  0.966  0.928  0.981  0.973  0.977  0.982 second
      policy/ratio_mean      1.000  1.000  1.000  1.000  1.000  1.000  1.000  1.000 first
      policy/ratio_mean      1.049  1.033  1.025  1.018  1.021  1.012  1.012  1.016 second
      policy/cap_fraction    0.930  0.279  0.693  0.913  0.291  0.258  0.617  0.955 first
      policy/cap_fraction    0.663  0.536  0.546  0.696  0.506  0.450  0.583  0.735 second
      loss/total             0.703  0.584  0.616  0.441  0.153 -0.094 -0.081 -0.194 first
      loss/total             0.642  0.505  0.563  0.365  0.140 -0.095 -0.071 -0.154 second
    micro-batches of 2 prompts
      reward by batch       0.042  0.036  0.094  0.167  0.201  0.326  0.443  0.615
      policy/ess             1.000  1.000  1.000  1.000  1.000  1.000  1.000  1.000 first
      policy/ess             0.972  0.954  0.979  0.986  0.984  0.980  0.977  0.980 second
      policy/ratio_mean      1.000  1.000  1.000  1.000  1.000  1.000  1.000  1.000 first
      policy/ratio_mean      1.035  0.998  1.009  1.018  1.007  0.999  0.992  0.997 second
      policy/cap_fraction    0.577  0.389  0.469  0.263  0.540  0.471  0.419  0.360 first
      policy/cap_fraction    0.609  0.571  0.507  0.612  0.549  0.388  0.483  0.655 second
      loss/total             0.434  0.491  0.709  0.303  0.554  0.105 -0.083 -0.145 first
      loss/total             0.405  0.457  0.661  0.293  0.508  0.085 -0.070 -0.131 second

The first update of a batch is on-policy: an ESS of 1 says that sampler and learner agree on every
log-prob at temperature 0.8 (up to rounding, hence a cap_fraction that means nothing there). The second
is one update stale, and P3O sees it.

What Tunix's structure prevents:

- The scope of the ESS. A Tunix loss sees one micro-batch, and gradients are accumulated by
  `optax.MultiSteps`: nothing can be known of the whole batch before its first gradient. The ESS is that of a
  micro-batch, and what is logged is the mean of several, which is not an ESS (with micro-batches of
  8 prompts, the whole mini-batch, it is right).
- The token mean. Micro-batches weigh the same, however many tokens they have.
- Refusal. A non-finite loss is applied like any other; nothing skips the update.
- Behaviour log-probs. Tunix's GRPO learner drops those of the sampler, and takes a recomputation (or, with
  one iteration, the learner's own, a ratio of exactly 1) for its ratio; here they are put back.
"""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.rl import common, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout import base_rollout

from p3o_jax.objectives import P3O, Objective, objective_loss

LOGGED = ("policy/ess", "policy/ratio_mean", "policy/cap_fraction", "loss/total")
STEPS = 8


class RecordingCluster(rl_cluster.RLCluster):
    """Tunix's cluster, which keeps what it sampled last: the learner drops the sampler's log-probs.

    And a new key for every rollout: without one, Tunix samples with the same noise each time.
    """

    num_rollouts = 0

    def generate(self, *args, **kwargs):
        """Samples as usual."""
        self.num_rollouts += 1
        self.cluster_config.rollout_config.seed = jax.random.PRNGKey(self.num_rollouts)
        self.last_rollout = super().generate(*args, **kwargs)
        return self.last_rollout


class ObjectiveLearner(GRPOLearner):
    """Tunix's GRPO learner with one of our objectives for its loss, against the sampler's own log-probs."""

    def __init__(self, *, objective: Objective, log: dict[str, list], **kwargs):
        super().__init__(**kwargs)
        pad_id, eos_id = self.rl_cluster.rollout.pad_id(), self.rl_cluster.rollout.eos_id()

        def loss(model, train_example, algo_config):
            graphdef, state = nnx.split(model)
            log_probs = common.compute_per_token_logps(
                graphdef,
                state,
                prompt_tokens=train_example.prompt_ids,
                completion_tokens=train_example.completion_ids,
                pad_id=pad_id,
                eos_id=eos_id,
                stop_gradient=False,
                temperature=algo_config.temperature,
            )
            return objective_loss(
                objective,
                log_probs,
                behaviour_log_probs=train_example.old_per_token_logps,
                advantages=train_example.advantages,
                mask=train_example.completion_mask,
            )

        def mean_of(name):
            def mean(values):
                log[name].append(np.mean(values))
                return log[name][-1]

            return mean

        self.rl_cluster.actor_trainer.with_loss_fn(loss, has_aux=True)
        self.rl_cluster.actor_trainer.with_rl_metrics_to_log({name: mean_of(name) for name in LOGGED})
        self.rl_cluster.actor_trainer.with_tqdm_metrics_to_display([])

    def _generate_and_compute_advantage(self, training_input, mode=rl_cluster.Mode.TRAIN):
        example = super()._generate_and_compute_advantage(training_input, mode)
        rollout = self.rl_cluster.last_rollout
        behaviour = np.full(example.completion_ids.shape, np.nan, np.float32)  # NaN, should it ever be read
        for row, tokens, log_probs in zip(behaviour, rollout.tokens, rollout.logprobs, strict=True):
            if len(tokens) != len(log_probs):
                raise ValueError(f"{len(tokens)} tokens with {len(log_probs)} log-probs")
            row[: len(log_probs)] = log_probs
        return example.replace(old_per_token_logps=jnp.asarray(behaviour))


class Letters:
    """A tokenizer of single letters, for a run without downloads."""

    letters = "abcdefghijklmnop"

    def encode(self, text: str, **kwargs) -> list[int]:
        """Ids of a text."""
        return [3 + self.letters.index(letter) for letter in text]

    def decode(self, ids, **kwargs) -> str:
        """The text of ids, without special tokens."""
        return "".join(self.letters[i - 3] for i in ids if 3 <= i < 3 + len(self.letters))

    def pad_id(self) -> int:
        """Padding."""
        return 0

    def bos_id(self) -> int:
        """Beginning of a sequence."""
        return 1

    def eos_id(self) -> int:
        """End of a sequence."""
        return 2


def share_of_a(prompts, completions, **kwargs) -> list[float]:
    """The reward: how much of the answer is the letter a."""
    return [completion.count("a") / 12 for completion in completions]


def run(micro_batch: int) -> dict[str, list]:
    """Trains a small Llama on a toy reward, two updates a batch; what was logged, by update."""
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
    config = llama.ModelConfig(
        num_layers=2,
        vocab_size=19,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    with mesh:
        actor = llama.Llama3(config, rngs=nnx.Rngs(0))
    cluster = RecordingCluster(
        actor=actor,
        tokenizer=Letters(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={
                rl_cluster.Role.ACTOR: mesh,
                rl_cluster.Role.REFERENCE: mesh,
                rl_cluster.Role.ROLLOUT: mesh,
            },
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(3e-3),
                eval_every_n_steps=1000,
                max_steps=10_000,
                mini_batch_size=8,
                train_micro_batch_size=micro_batch,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=12,
                max_prompt_length=4,
                kv_cache_size=32,
                temperature=0.8,
                return_logprobs=True,
            ),
        ),
    )
    log: dict[str, list] = collections.defaultdict(list)

    def reward(prompts, completions, **kwargs):
        rewards = share_of_a(prompts, completions)
        log["reward"].append(np.mean(rewards))
        return rewards

    learner = ObjectiveLearner(
        objective=P3O(ess_scope="micro_batch"),  # which is all that Tunix offers
        log=log,
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=4, num_iterations=2, beta=0.0),
        reward_fns=reward,
    )
    prompts = ["bcd", "dcb", "ace", "fgh", "hgf", "abc", "cab", "ddd"]
    with mesh:  # deprecated in JAX, but what Tunix looks for
        learner.train([{"prompts": np.array(prompts)}] * STEPS)
    return log


def main() -> None:
    """Prints a run with the batch in one piece, and one with it in four."""
    for micro_batch in (8, 2):
        log = run(micro_batch)
        print(f"micro-batches of {micro_batch} prompts")
        rewards = np.reshape(log["reward"], (STEPS, -1)).mean(axis=1)
        print("  reward by batch     ", " ".join(f"{value:6.3f}" for value in rewards))
        for name in LOGGED:
            for update, which in enumerate(("first", "second")):
                print(f"  {name:<20} ", " ".join(f"{value:6.3f}" for value in log[name][update::2]), which)


if __name__ == "__main__":
    main()
