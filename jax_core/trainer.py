"""One optimizer step on one step's shards: the same loss and gradient for any packing and any micro-batch split.

The host decides what is trained and how much each token weighs (`rows.py`, `algorithms/`); a compiled function sums
loss and gradient over micro-batches of one shape; a second one applies the sum. Nothing is averaged on the way, so
nothing depends on where the cuts fall.

Left out: several epochs over one step, a reference policy, several devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_core.algorithms import OBJECTIVES, REDUCTIONS, advantages_of, importance_ratio, is_clipped
from jax_core.lora import full_weights
from jax_core.models.config import ModelConfig
from jax_core.models.decoder import Params, bind
from jax_core.models.experts import Load, balance_loss, empty_load
from jax_core.models.passes import packed_with_loads
from jax_core.models.stacks import slot_blocks
from jax_core.optimizer import init_optimizer, learning_rate, make_optimizer, moved, zeros
from jax_core.rows import MicroBatch, Row, all_groups, group_rows, micro_batches, trained_tokens
from schemas.recipe import AlgorithmSection, OptimizerSection, Recipe
from schemas.records import Group, Placement, ShardContent


@dataclass(frozen=True)
class TrainState:
    """Weights and optimizer state after `step` optimizer steps."""

    params: Params
    opt_state: Any
    step: int


@dataclass(frozen=True, eq=False)
class StepPlan:
    """What one step trains: its rows, and what was counted on the way."""

    rows: tuple[Row, ...]
    trained_tokens: int
    trained_groups: int
    equal_groups: int
    spared_tokens: int  # of equal groups that count in the denominators, and are not computed
    lags: np.ndarray  # int [N], steps between the oldest sampling policy and this step, of each trained trajectory
    queue_lags: np.ndarray  # float [N], of them those since its shard was committed; NaN where nobody recorded that


class Trainer:
    """Trains one model by one recipe. `TrainState` goes in, a new one comes out.

    Args:
      base: the weights that adapters are merged into, where the recipe trains adapters; never changed. The params of a
        state are then the adapters alone.
    """

    def __init__(self, config: ModelConfig, recipe: Recipe, base: Params | None = None):
        self.config = config
        self.recipe = recipe
        self.base = base

    def init(self, params: Params) -> TrainState:
        params = jax.tree.map(jnp.asarray, params)
        return TrainState(params, init_optimizer(self.recipe.trainer.optimizer, params), 0)

    def state_tree(self, state: TrainState) -> dict[str, Any]:
        """What a checkpoint stores: everything that a resume needs besides the step number."""
        return {"params": state.params, "opt_state": state.opt_state}

    def restore(self, tree: dict[str, Any], step: int) -> TrainState:
        tree = jax.tree.map(jnp.asarray, tree)
        return TrainState(tree["params"], tree["opt_state"], step)

    def update(self, state: TrainState, contents: Sequence[ShardContent]) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step on all of a step's data; metrics by their names in `schemas.metrics`.

        A step with nothing to train (all groups skipped as equal, or all samples failed) leaves weights and optimizer
        state as they are, and still counts. Where all its groups are equal and count, its gradient is 0, and weights
        move by the momentum that they have. What is not computed is in no metric of tokens.
        """
        plan = plan_step(contents, self.recipe.algorithm, state.step, self.recipe.rollout.branch_tokens)
        rate = learning_rate(self.recipe.trainer.optimizer, state.step, self.recipe.trainer.steps)
        counted = _counts(plan) | {"trainer/learning_rate": rate}
        if not plan.rows and not plan.spared_tokens:
            return TrainState(state.params, state.opt_state, state.step + 1), counted
        gradient, sums, batches = self._gradient(state.params, plan.rows)
        section = self.recipe.trainer.optimizer
        params, opt_state, norm = apply_update(section, state.params, state.opt_state, gradient, rate)
        counted |= {"trainer/grad_norm": float(norm), "trainer/micro_batches": batches}
        if batches:
            counted |= _measurements({name: float(sums[name]) for name in _SUMS})
            counted |= _router_measurements(self.config, sums["routers"])
        return TrainState(params, opt_state, state.step + 1), counted

    def loss_and_gradient(self, params: Params, contents: Sequence[ShardContent], step: int) -> tuple[float, Params]:
        """The step's loss and its gradient, without an update."""
        plan = plan_step(contents, self.recipe.algorithm, step, self.recipe.rollout.branch_tokens)
        gradient, sums, _ = self._gradient(params, plan.rows)
        return float(sums["loss"]), gradient

    def score(self, params: Params, contents: Sequence[ShardContent]) -> list[np.ndarray]:
        """Log-probs float32 [T] of every trajectory, 0.0 off its mask, in order of elements, groups and samples."""
        rows, owners, scored = _rows_to_score(contents)
        static, weights = (self.config, self.recipe.sampling.temperature), (self.base, params, self.recipe.lora.alpha)
        batches = self._micro_batches(rows)
        results = [row for batch in batches for row in _used_rows(_score(*static, *weights, batch), batch)]
        for row, branches in zip(results, owners, strict=True):
            for (logprobs, mask, prompt_length), offset in branches:
                sampled = np.flatnonzero(mask)
                logprobs[sampled] = row[sampled - prompt_length + offset]
        return [logprobs for logprobs, _, _ in scored]

    def _gradient(self, params: Params, rows: Sequence[Row]) -> tuple[Params, dict[str, Any], int]:
        gradient = zeros(params)
        sums = _no_sums(self.config)
        static = (self.config, self.recipe.algorithm, self.recipe.sampling.temperature)
        batches = 0
        for batch in self._micro_batches(rows):
            gradient, sums = _accumulate(*static, self.base, params, self.recipe.lora.alpha, gradient, sums, batch)
            batches += 1
        return gradient, sums, batches

    def _micro_batches(self, rows: Sequence[Row]) -> Iterator[MicroBatch[np.ndarray]]:
        section = self.recipe.trainer
        return micro_batches(
            rows,
            rows_each=section.micro_batch_rows,
            prompts_each=section.micro_batch_prompts or max(1, section.micro_batch_rows // 2),
            row_tokens=section.row_tokens,
            prompt_tokens=self.recipe.rollout.prompt_tokens,
        )


def plan_step(contents: Sequence[ShardContent], algorithm: AlgorithmSection, step: int, norm: float) -> StepPlan:
    """Advantages, weights and rows of a step. The denominators are the whole step's, fixed here once."""
    groups = list(all_groups(contents))
    newest = [c.newest_version for c in sorted(contents, key=lambda c: c.element_index) for _ in c.groups]
    advantages = [_advantages(algorithm.advantage, group) for group, _ in groups]
    is_equal = [not a.any() for a in advantages]
    counted = _tokens(groups, [not equal or algorithm.equal_groups != "skip" for equal in is_equal])
    computed = _tokens(groups, [not equal or algorithm.equal_groups == "train" for equal in is_equal])
    weights = iter(REDUCTIONS[algorithm.reduction](np.concatenate([*counted, _NONE]), norm=norm))
    rows: list[Row] = []
    for (group, places), group_advantages, tokens in zip(groups, advantages, computed, strict=True):
        group_weights = np.array([next(weights) for _ in group.samples])
        if tokens.any():
            rows += group_rows(group, places, group_advantages, group_weights)
    trained = sum(int(tokens.sum()) for tokens in computed)
    return StepPlan(
        rows=tuple(rows),
        trained_tokens=trained,
        trained_groups=sum(bool(tokens.any()) for tokens in computed),
        equal_groups=sum(is_equal),
        spared_tokens=sum(int(tokens.sum()) for tokens in counted) - trained,
        lags=_lags(groups, computed, step),
        queue_lags=_queue_lags(newest, computed, step),
    )


_NONE = np.zeros(0, np.int64)  # so that a step without groups has an array of counts too


def _tokens(groups: Sequence[tuple[Group, Sequence[Placement]]], takes_part: Sequence[bool]) -> list[np.ndarray]:
    """Trained tokens of each sample, int64 [G] a group: 0 for groups that do not take part."""
    return [
        np.array([trained_tokens(s.rollout) if part else 0 for s in group.samples], np.int64)
        for (group, _), part in zip(groups, takes_part, strict=True)
    ]


def _advantages(name: str, group: Group) -> np.ndarray:
    rewards = np.array([s.reward for s in group.samples])
    valid = np.array([s.rollout.status == "ok" for s in group.samples])
    return advantages_of(name, rewards, valid)


def _lags(groups: Sequence[tuple[Group, Sequence[Placement]]], counts: Sequence[np.ndarray], step: int) -> np.ndarray:
    oldest = [
        min(span.policy_version for span in sample.rollout.versions)
        for (group, _), group_counts in zip(groups, counts, strict=True)
        for sample, n in zip(group.samples, group_counts, strict=True)
        if n
    ]
    return step - np.array(oldest, np.int64)


def _queue_lags(newest: Sequence[int | None], counts: Sequence[np.ndarray], step: int) -> np.ndarray:
    at_commit = [
        np.nan if version is None else version
        for version, group_counts in zip(newest, counts, strict=True)
        for n in group_counts
        if n
    ]
    return step - np.array(at_commit, np.float64)


def _counts(plan: StepPlan) -> dict[str, float]:
    return {
        "trainer/trained_tokens": plan.trained_tokens,
        "trainer/trained_groups": plan.trained_groups,
        "trainer/equal_groups": plan.equal_groups,
        "trainer/micro_batches": 0,
        **_mean_and_max("trainer/lag_steps", plan.lags),
        **_mean_and_max("trainer/lag_in_flight_steps", plan.lags - plan.queue_lags),
        **_mean_and_max("trainer/lag_in_queue_steps", plan.queue_lags),
    }


def _mean_and_max(name: str, values: np.ndarray) -> dict[str, float]:
    """NaN if one of them is: nobody knows the mean of what is partly unknown."""
    return {
        f"{name}/mean": float(values.mean()) if len(values) else 0.0,
        f"{name}/max": float(values.max()) if len(values) else 0.0,
    }


# Sums over trained tokens (and two maxima), from which a step's metrics are made once all micro-batches are in: a mean
# of micro-batch means would weigh a nearly empty micro-batch like a full one.
_SUMS = ("loss", "tokens", "entropy", "ratio", "clipped", "gap", "gap_max", "ratio_max")


def _measurements(sums: dict[str, float]) -> dict[str, float]:
    tokens = max(sums["tokens"], 1.0)
    return {
        "trainer/loss": sums["loss"],
        "trainer/entropy_nats/mean": sums["entropy"] / tokens,
        "trainer/ratio/mean": sums["ratio"] / tokens,
        "trainer/ratio/max": sums["ratio_max"],
        "trainer/clipped/fraction": sums["clipped"] / tokens,
        "trainer/sampler_logprob_gap_nats/mean": sums["gap"] / tokens,
        "trainer/sampler_logprob_gap_nats/max": sums["gap_max"],
    }


def _no_sums(config: ModelConfig) -> dict[str, Any]:
    experts = [(layers, block.experts.experts) for block, layers in slot_blocks(config) if block.experts]
    routers = tuple(empty_load(*shape) for shape in experts)  # one a slot with experts, over its layers
    return {name: jnp.float32(0.0) for name in _SUMS} | {"routers": routers}


def _router_measurements(config: ModelConfig, routers: Sequence[Load]) -> dict[str, float]:
    """Of models with experts; over all tokens that the step computed, prompts and environment text included."""
    if not routers:
        return {}
    loads = [np.asarray(load.chosen) for load in routers]  # [layers, E]
    relative = np.concatenate([(load / np.maximum(load.mean(-1, keepdims=True), 1e-9)).ravel() for load in loads])
    tokens = sum(float(load.tokens.sum()) for load in routers)
    per_token = next(block.experts.per_token for block in config.blocks if block.experts)
    layers = sum(len(load) for load in loads)
    return {
        "trainer/router_load/max": float(relative.max()),
        "trainer/router_idle_experts/fraction": float((relative == 0).mean()),
        "trainer/router_entropy_nats/mean": sum(float(load.entropy.sum()) for load in routers) / max(tokens, 1.0),
        "trainer/router_balance/mean": sum(float(balance_loss(load).sum()) for load in routers) / layers,
        "trainer/router_dropped_tokens": tokens * per_token - sum(float(load.sum()) for load in loads),
    }


def _all_logprobs(
    config: ModelConfig, temperature: float, params: Params, batch: MicroBatch[jax.Array]
) -> tuple[jax.Array, tuple[Load, ...]]:
    """Log-probs [B, L, V] of every next token, at the temperature of the sampler, and the routers' loads."""
    model = bind(config, params)
    hidden, routers = packed_with_loads(
        model,
        batch.prompts,
        batch.prompt_lengths,
        batch.row_prompt,
        batch.inputs,
        batch.segments,
        batch.positions,
    )
    return jax.nn.log_softmax(model.logits(hidden) / temperature), routers


def _of_targets(all_logprobs: jax.Array, batch: MicroBatch[jax.Array]) -> jax.Array:
    return jnp.take_along_axis(all_logprobs, batch.targets[..., None], axis=-1)[..., 0]


def target_logprobs(config: ModelConfig, temperature: float, params: Params, batch: MicroBatch[jax.Array]) -> jax.Array:
    """Log-probs [B, L], nats, of each row's targets; finite but meaningless on padding."""
    return _of_targets(_all_logprobs(config, temperature, params, batch)[0], batch)


@partial(jax.jit, static_argnums=(0, 1))
def _score(
    config: ModelConfig,
    temperature: float,
    base: Params | None,
    trained: Params,
    alpha: float,
    batch: MicroBatch[jax.Array],
) -> jax.Array:
    params = full_weights(base, trained, alpha)
    return jnp.where(batch.mask, target_logprobs(config, temperature, params, batch), 0.0)


def _loss(
    config: ModelConfig,
    algorithm: AlgorithmSection,
    temperature: float,
    base: Params | None,
    alpha: float,
    trained: Params,
    batch: MicroBatch[jax.Array],
) -> tuple[jax.Array, dict[str, Any]]:
    """This micro-batch's part of the step's loss, sum_t weight_t L_t, and its part of the metrics' sums.

    The routers' balance is not a sum over tokens: that of each micro-batch counts by the weight of its tokens.
    """
    all_logprobs, routers = _all_logprobs(config, temperature, full_weights(base, trained, alpha), batch)
    logprobs = _of_targets(all_logprobs, batch)
    tokens = (logprobs, batch.sampler_logprobs, batch.advantages, batch.mask)
    low, high = algorithm.clip_low, algorithm.clip_high
    mask = batch.mask
    entropy = jnp.where(mask, -jnp.sum(jnp.exp(all_logprobs) * all_logprobs, axis=-1), 0.0)
    losses = OBJECTIVES[algorithm.objective](*tokens, clip_low=low, clip_high=high) - algorithm.entropy_bonus * entropy
    loss = jnp.sum(batch.weights * losses)
    if routers and config.router_balance:
        balance = jnp.mean(jnp.concatenate([balance_loss(load) for load in routers]))
        loss = loss + config.router_balance * jnp.sum(batch.weights) * balance
    ratio = importance_ratio(logprobs, batch.sampler_logprobs, mask)
    gap = jnp.where(mask, jnp.abs(logprobs - batch.sampler_logprobs), 0.0)
    sums = {
        "loss": loss,
        "tokens": jnp.sum(mask, dtype=jnp.float32),
        "entropy": jnp.sum(entropy),
        "ratio": jnp.sum(jnp.where(mask, ratio, 0.0)),
        "clipped": jnp.sum(is_clipped(*tokens, clip_low=low, clip_high=high), dtype=jnp.float32),
        "gap": jnp.sum(gap),
        "gap_max": jnp.max(gap),
        "ratio_max": jnp.max(jnp.where(mask, ratio, 0.0)),
        "routers": jax.lax.stop_gradient(routers),
    }
    return loss, sums


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnames=("gradient", "sums"))
def _accumulate(
    config: ModelConfig,
    algorithm: AlgorithmSection,
    temperature: float,
    base: Params | None,
    trained: Params,
    alpha: float,
    gradient: Params,
    sums: dict[str, Any],
    batch: MicroBatch[jax.Array],
) -> tuple[Params, dict[str, Any]]:
    part, found = jax.grad(partial(_loss, config, algorithm, temperature, base, alpha), has_aux=True)(trained, batch)
    gradient = jax.tree.map(jnp.add, gradient, part)
    merge = {name: jnp.maximum if name.endswith("_max") else jnp.add for name in sums}
    return gradient, {name: jax.tree.map(merge[name], sums[name], found[name]) for name in sums}


@partial(jax.jit, static_argnums=0)
def apply_update(
    section: OptimizerSection, params: Params, opt_state: Any, gradient: Params, rate: float
) -> tuple[Params, Any, jax.Array]:
    """One update of size `rate`: new params, new optimizer state, and the gradient's global norm before clipping."""
    gradient = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient)
    count = optax.tree.get(opt_state, "count")
    updates, opt_state = make_optimizer(section).update(gradient, opt_state, params)
    return moved(params, updates, rate, count), opt_state, optax.tree.norm(gradient)


_Scored = tuple[np.ndarray, np.ndarray, int]  # log-probs float32 [T] to be filled, mask bool [T], prompt length


def _rows_to_score(
    contents: Sequence[ShardContent],
) -> tuple[list[Row], list[list[tuple[_Scored, int]]], list[_Scored]]:
    """Rows of all groups, the samples of each row with their offsets, and all samples in order."""
    rows: list[Row] = []
    owners: list[list[tuple[_Scored, int]]] = []
    scored: list[_Scored] = []
    for group, places in all_groups(contents):
        zeros = np.zeros(len(group.samples))
        rows += group_rows(group, places, zeros, zeros)
        of_row: dict[int, list[tuple[_Scored, int]]] = {}
        for sample, place in zip(group.samples, places, strict=True):
            rollout = sample.rollout
            scored.append((np.zeros(len(rollout.tokens), np.float32), rollout.loss_mask, rollout.prompt_length))
            if place.pack_row >= 0:
                of_row.setdefault(place.pack_row, []).append((scored[-1], place.pack_offset))
        owners += [of_row[row] for row in sorted(of_row)]
    return rows, owners, scored


def _used_rows(result: jax.Array, batch: MicroBatch[np.ndarray]) -> np.ndarray:
    """The rows of a micro-batch's result [B, L] that are not padding; these come first."""
    return np.asarray(result)[: int((batch.segments > 0).any(axis=1).sum())]
