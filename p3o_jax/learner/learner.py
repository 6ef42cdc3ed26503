"""The learner: one jitted update, the same however the batch is cut.

1. statistics of the whole optimizer batch (a gradient-free pass, only if the objective has any
   and there is more than one micro-batch), reduced over devices once; the same pass is the
   snapshot, for an objective that wants one of the epoch's start and gets a batch without
2. gradients of local sums over one global denominator, accumulated over micro-batches in
   float32, reduced over `data` once
3. clip, AdamW, and a guard: nothing changes, anywhere, if loss or gradient is not finite or no token counts
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key

from p3o_jax.batch import metrics as metrics_lib
from p3o_jax.batch.breakdowns import EssByGroup, ess_breakdowns
from p3o_jax.batch.stats import num_sequences
from p3o_jax.batch.types import Batch, Policy, Support, required
from p3o_jax.devices import sharding
from p3o_jax.learner.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer, select
from p3o_jax.learner.plan import StepPlan
from p3o_jax.models import lora
from p3o_jax.models.log_probs import TokenDistributions, token_distributions
from p3o_jax.models.transformer import Transformer, TransformerConfig, abstract_model, weight_specs

Metrics = dict[str, Any]


class TrainState(NamedTuple):
    """What an update changes; one that is not finite changes the last two fields only, an empty one the last."""

    params: nnx.State  # float32
    opt_state: optax.OptState
    num_updates: Int[Array, ""]  # applied
    num_skipped: Int[Array, ""]  # since the start of the run
    num_skipped_in_a_row: Int[Array, ""]


class Gradients(NamedTuple):
    """What one optimizer batch says, before anything is updated."""

    gradients: nnx.State
    loss: Float[Array, ""]
    statistics: Any  # the objective's, of the whole batch
    metrics: Metrics
    sequences: metrics_lib.Sum  # that the batch holds
    log_probs: Float[Array, "B T"] | None  # the policy's, of the targets, where they are kept


class Update(NamedTuple):
    """What an update leaves besides the state."""

    metrics: Metrics
    log_probs: Float[Array, "B T"] | None  # that it saw of the targets, where they are kept


class Learner:
    """Updates a model's parameters by an objective, on a mesh."""

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        plan: StepPlan,
        optimizer: OptimizerConfig,
        mesh: Mesh,
        *,
        num_updates: int,
        num_tasks: int = 1,
        keep_log_probs: bool = False,
    ):
        """
        Args:
            plan: the objective, and how a batch goes through the model.
            num_updates: optimizer updates in the whole run, for the learning-rate schedule.
            num_tasks: components of a mixture, whose ESS is logged each.
            keep_log_probs: whether an update returns the log-probs [B, T] that it saw.
        """
        self.mesh, self.plan, self.objective = mesh, plan, plan.objective
        self._config, self._vocab_size = config, vocab_size
        self._groups = {"max_staleness": plan.staleness, "num_tasks": num_tasks}
        self._keep_log_probs = keep_log_probs
        self._graphdef, self._abstract = abstract_model(config, vocab_size)
        self._specs = weight_specs(self._abstract, mesh, sharding.LEARNER_RULES)
        self._optimizer = make_optimizer(optimizer, num_updates)
        self._learning_rate = learning_rate_schedule(optimizer, num_updates)
        self.update = jax.jit(self._update, donate_argnums=0)
        """(state, batch) -> (state, `Update`): one optimizer update; the old state's buffers are reused."""
        self.gradients = jax.jit(self._sharded_gradients)
        """(params, batch) -> `Gradients` of one optimizer batch, without updating."""
        self.log_probs = jax.jit(self._sharded_log_probs)
        """(params, batch) -> log-probs and entropy [B, T] of the batch's targets, no gradient."""
        self.snapshot = jax.jit(self._with_snapshot)
        """(params, batch) -> the batch with `proximal_log_probs` of these parameters, and what else of their
        distributions the objective asks for."""

    def init(self, key: Key[Array, ""]) -> TrainState:
        """Random parameters, created where they belong on the mesh."""
        return self.init_from(jax.jit(self._random, out_shardings=self._shardings(self._specs))(key))

    def init_with(self, key: Key[Array, ""], weights: nnx.State) -> TrainState:
        """Given weights, whose buffers are taken over, and beside them random adapters if the model has any."""
        params = weights
        if self._config.lora is not None:
            places = lora.split(self._shardings(self._specs))[0]
            adapters = jax.jit(lambda key: lora.split(self._random(key))[0], out_shardings=places)(key)
            params = lora.join(adapters, weights)
        return jax.jit(self._fresh, out_shardings=self.state_shardings(), donate_argnums=0)(params)

    def _random(self, key: Key[Array, ""]) -> nnx.State:
        return nnx.state(Transformer(self._config, self._vocab_size, nnx.Rngs(params=key)))

    def init_from(self, params: nnx.State) -> TrainState:
        """A fresh optimizer for given parameters, which are copied."""
        return jax.jit(self._fresh, out_shardings=self.state_shardings())(params)

    def _fresh(self, params: nnx.State) -> TrainState:
        zero = jnp.zeros((), jnp.int32)
        copy = jax.tree.map(partial(jnp.array, copy=True), params)
        return TrainState(copy, self._optimizer.init(lora.split(params)[0]), zero, zero, zero)

    def abstract_state(self) -> Any:
        """`TrainState` of shapes, dtypes and shardings of the state, for restoring a checkpoint."""
        shapes = jax.eval_shape(self._fresh, self._abstract)
        return jax.tree.map(
            lambda shape, place: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place),
            shapes,
            self.state_shardings(),
        )

    def state_shardings(self) -> Any:
        """`TrainState` of shardings: parameters by the table of logical axes, moments where their parameters are."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        params = self._shardings(self._specs)
        shapes = jax.eval_shape(self._optimizer.init, lora.split(self._abstract)[0])
        opt_state = optax.tree.map_params(
            self._optimizer, lambda _, place: place, shapes, lora.split(params)[0], transform_non_params=lambda _: whole
        )
        return TrainState._make((params, opt_state, whole, whole, whole))

    def _shardings(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    # One update, in plain jit: what needs no manual communication.

    def _update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Update]:
        gradients, loss, statistics, metrics, sequences, log_probs = self._sharded_gradients(state.params, batch)
        gradient_norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(loss) & jnp.isfinite(gradient_norm)
        empty = sequences.total == 0  # where all rows were dropped, momentum alone would move the parameters
        applied = finite & ~empty

        trained, kept = lora.split(state.params)
        with jax.named_scope("optimizer"):
            updates, opt_state = self._optimizer.update(gradients, state.opt_state, trained)
        factor = self.objective.learning_rate_factor(statistics)
        params = optax.apply_updates(trained, jax.tree.map(lambda update: update * factor, updates))

        skipped = (~finite).astype(jnp.int32)
        new_state = TrainState(
            params=lora.join(select(applied, params, trained), kept),
            opt_state=select(applied, opt_state, state.opt_state),
            num_updates=state.num_updates + applied.astype(jnp.int32),
            num_skipped=state.num_skipped + skipped,
            num_skipped_in_a_row=(state.num_skipped_in_a_row + 1) * skipped,
        )
        one, as_float = jnp.ones((), jnp.float32), skipped.astype(jnp.float32)
        learning_rate = jnp.asarray(self._learning_rate(state.num_updates) * factor, jnp.float32)
        metrics |= {
            "optim/grad_norm": metrics_lib.Mean(gradient_norm, one),
            "optim/grad_norm_max": metrics_lib.Max(gradient_norm),
            "optim/learning_rate": metrics_lib.Mean(learning_rate, one),
            "optim/skipped_updates": metrics_lib.Sum(as_float),
            "optim/empty_updates": metrics_lib.Sum(empty.astype(jnp.float32)),
            "rollout/dropped/nonfinite_update": metrics_lib.Sum(as_float * sequences.total),
        }
        return new_state, Update(metrics, log_probs)

    # What runs on each device, on its rows and its shards of the weights.

    def _check(self, batch: Batch) -> None:
        """Raises ValueError if the rows do not divide over devices and micro-batches."""
        rows, shards = batch.mask.shape[0], sharding.num_batch_shards(self.mesh)
        if rows % (shards * self.plan.micro_batches):
            raise ValueError(
                f"learner: {rows} rows do not divide over {shards} devices x micro_batches={self.plan.micro_batches}"
            )

    def _sharded_gradients(self, params: nnx.State, batch: Batch) -> Gradients:
        self._check(batch)
        rows, whole = sharding.batch_spec(self.mesh), PartitionSpec()
        gradients = jax.shard_map(
            self._local_gradients,
            mesh=self.mesh,
            in_specs=(self._specs, rows),
            out_specs=Gradients._make((lora.split(self._specs)[0], whole, whole, whole, whole, rows)),
        )
        return gradients(params, batch)

    def _sharded_log_probs(self, params: nnx.State, batch: Batch) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
        found = self._over_micro_batches(
            lambda params, rows: self._distributions(params, rows, None)[:2], params, batch
        )
        return found[0], found[1]

    def _with_snapshot(self, params: nnx.State, batch: Batch) -> Batch:
        def snapshot(params: nnx.State, rows: Batch):
            seen = self._as_snapshot(self._distributions(params, rows, self._support_of(rows)), rows)
            return seen.proximal_log_probs, seen.support

        proximal, support = self._over_micro_batches(snapshot, params, batch)
        return batch._replace(proximal_log_probs=proximal, support=support)

    def _over_micro_batches(self, function: Callable[[nnx.State, Batch], Any], params: nnx.State, batch: Batch) -> Any:
        """A tree of [B, ...] from a function of each device's micro-batches, without gradient."""
        self._check(batch)
        rows = sharding.batch_spec(self.mesh)

        def local(params: nnx.State, batch: Batch):
            found = jax.lax.map(partial(function, params), self._split(batch))
            return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), found)

        return jax.shard_map(local, mesh=self.mesh, in_specs=(self._specs, rows), out_specs=rows)(params, batch)

    def _split(self, batch: Batch) -> Batch:
        """Rows [B, ...] of a device -> micro-batches [M, B / M, ...]."""
        count, rows = self.plan.micro_batches, batch.mask.shape[0]
        return jax.tree.map(lambda leaf: leaf.reshape(count, rows // count, *leaf.shape[1:]), batch)

    def _distributions(self, params: nnx.State, batch: Batch, support: Any) -> TokenDistributions:
        """The model on these rows; `support` as in `token_distributions`."""
        model: Transformer = nnx.merge(self._graphdef, params)
        tokens, targets, positions, temperature = map(jnp.asarray, required(batch.inputs, "inputs"))
        hidden, _ = model.hidden(
            tokens, positions, None if batch.segment_ids is None else jnp.asarray(batch.segment_ids)
        )
        arrays = (hidden, model.output_weights(), targets, temperature)
        return token_distributions(*arrays, support, softcap=self._config.logit_softcap)

    def _support_of(self, batch: Batch) -> Any:
        """At which tokens the objective must see the policy: those of the batch, or as a snapshot chooses them."""
        if self.objective.support is None:
            return None
        if batch.support is not None and batch.support.indices is not None:
            return batch.support.indices
        return "exact" if self.objective.support_form == "exact" else self.plan.support_tokens

    def _policy(self, params: nnx.State, batch: Batch) -> Policy:
        """What the objective sees of the model on these rows."""
        return Policy(*self._distributions(params, batch, self._support_of(batch))[:3])

    def _as_snapshot(self, seen: Policy | TokenDistributions, batch: Batch) -> Batch:
        """The batch with what was seen of a policy as its snapshot, a constant."""
        seen = jax.lax.stop_gradient(seen)
        batch = batch._replace(proximal_log_probs=seen.log_probs)
        if self.objective.support not in ("proximal", "both"):
            return batch
        support = (batch.support or Support())._replace(proximal_log_probs=seen.support_log_probs)
        if isinstance(seen, TokenDistributions) and seen.indices is not None:
            support = support._replace(indices=seen.indices)
        return batch._replace(support=support)

    def _local_gradients(self, params: nnx.State, batch: Batch) -> Gradients:
        objective, axes = self.objective, sharding.batch_axes()
        denominator = jnp.maximum(sharding.sum_over_batch(objective.aggregation.count(batch)), 1.0)
        micro_batches = self._split(batch)
        local_params = sharding.vary_over_batch(params)
        trained, kept = lora.split(local_params)

        takes_snapshot = self.plan.snapshot_in_update and batch.proximal_log_probs is None
        looks_first = self.plan.first_look and (takes_snapshot or self.plan.statistics_of_batch)
        whole_batch = looks_first and self.plan.statistics_of_batch

        @jax.named_scope("statistics")
        def look(rows: Batch):
            """The gradient-free pass: a snapshot if one is to be taken, and statistics if they are the batch's."""
            seen = self._distributions(local_params, rows, self._support_of(rows))
            rows = self._as_snapshot(seen, rows) if takes_snapshot else rows
            statistics = objective.statistics(Policy(*seen[:3]), rows) if whole_batch else None
            return statistics, (rows.proximal_log_probs, rows.support)

        if looks_first:
            parts, (proximal, support) = jax.lax.map(look, micro_batches)
            micro_batches = micro_batches._replace(proximal_log_probs=proximal, support=support)
            statistics = metrics_lib.all_reduce(metrics_lib.fold(parts), axes)

        def reduced_statistics(policy: Policy, rows: Batch):
            statistics = objective.statistics(jax.lax.stop_gradient(policy), rows)
            return metrics_lib.all_reduce(statistics, axes)

        @jax.named_scope("loss")
        def local_loss(trained: nnx.State, rows: Batch):
            """This device's share of the loss, so that its gradient is a share of the gradient."""
            policy = self._policy(lora.join(trained, kept), rows)
            if takes_snapshot and not looks_first:
                rows = self._as_snapshot(policy, rows)
            of_batch = statistics if whole_batch else reduced_statistics(policy, rows)
            per_token, metrics = objective.loss(policy, rows, of_batch)
            share = jnp.sum(objective.aggregation.weights(rows) * per_token) / denominator
            log_probs = jax.lax.stop_gradient(policy.log_probs)
            metrics |= ess_breakdowns(log_probs, rows, **self._groups)
            sequences = metrics_lib.Sum(num_sequences(rows.mask, rows.segment_ids))
            return share, (of_batch, metrics, sequences, log_probs if self._keep_log_probs else None)

        value_and_gradient = jax.value_and_grad(local_loss, has_aux=True)
        if self.plan.micro_batches == 1:
            only = jax.tree.map(lambda leaf: leaf[0], micro_batches)
            (loss, (statistics, metrics, sequences, log_probs)), gradients = value_and_gradient(trained, only)
            metrics, sequences = jax.tree.map(lambda leaf: leaf[None], (metrics, sequences))
        else:

            def accumulate(total, rows: Batch):
                (loss, (of_batch, *seen)), gradients = value_and_gradient(trained, rows)
                return jax.tree.map(jnp.add, total, gradients), (loss, of_batch, *seen)

            zeros = jax.tree.map(lambda p: sharding.match_variance(jnp.zeros(p.shape, p.dtype), p), trained)
            gradients, scanned = jax.lax.scan(accumulate, zeros, micro_batches)
            losses, of_micro_batches, metrics, sequences, log_probs = scanned
            log_probs = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), log_probs)
            loss = losses.sum()
            if not whole_batch:
                statistics = metrics_lib.fold(of_micro_batches)

        metrics, sequences = metrics_lib.all_reduce((metrics, sequences), axes)  # [M] of each, over devices in one go
        worst = jnp.min(metrics["policy/ess"].value())
        metrics = {tag: _of_this_batch(metric) for tag, metric in metrics_lib.fold(metrics).items()}
        metrics["policy/ess_min"] = metrics_lib.Min(metrics["policy/ess"].value())
        metrics["policy/ess_min_micro_batch"] = metrics_lib.Min(worst)
        gradients = sharding.reduce_gradients(gradients, lora.split(params)[0])
        loss = sharding.sum_over_batch(loss)
        return Gradients(gradients, loss, statistics, metrics, metrics_lib.fold(sequences), log_probs)


def _of_this_batch(metric: Any) -> metrics_lib.Metric:
    """A metric that several updates' metrics can be merged with: an ESS belongs to one optimizer batch, so of
    several the mean is logged, not the ESS of all their ratios, which compare with different policies."""
    if isinstance(metric, EssByGroup):
        return metric.of_this_batch()
    if isinstance(metric, metrics_lib.Mean | metrics_lib.Sum | metrics_lib.Max | metrics_lib.Min):
        return metric
    return metrics_lib.Mean(metric.value(), jnp.ones((), jnp.float32))
