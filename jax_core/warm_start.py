"""A short supervised start: maximum likelihood of demonstrated answers, on the same rows and model pass as RL.

Left out: packing (each demonstration has its own prompt), evaluation, checkpoints in its midst. It is short, and a
pure function of its arguments: a killed warm start is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_core.lora import full_weights
from jax_core.models.config import ModelConfig
from jax_core.models.decoder import Params
from jax_core.optimizer import init_optimizer, learning_rate
from jax_core.rows import Branch, MicroBatch, Row, lay_rows
from jax_core.trainer import apply_update, target_logprobs
from schemas.identity import seed_int
from schemas.recipe import OptimizerSection, Recipe


class DemonstratedEpisode(NamedTuple):
    """One episode as the agent would have seen it."""

    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T], True on the answers that are taught; at least one is
    prompt_length: int  # tokens before the first answer, taught or not


_LENGTH_STEP = 8  # rows are padded to a multiple of this


def supervised(
    config: ModelConfig,
    recipe: Recipe,
    params: Params,
    demonstrations: Sequence[DemonstratedEpisode],
    report: Callable[[int, dict[str, float]], None],
    base: Params | None = None,
) -> Params:
    """`recipe.warm_start.steps` optimizer steps on mini-batches of demonstrations, drawn by seeded permutations.

    The loss is the mean negative log-likelihood of the answers' tokens, nats; the prompt and the environment's text are
    context only.

    Args:
      demonstrations: each prompt has at most `recipe.rollout.prompt_tokens` tokens.
      report: called after each step with its number and {"warm_start/loss", "warm_start/tokens",
        "warm_start/learning_rate"}.
      base: the weights that `params` are adapters of, where the recipe trains adapters.
    """
    section = recipe.warm_start
    opt_state = init_optimizer(section.optimizer, params)
    longest = max(_branch_tokens(d) for d in demonstrations)
    length = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
    for step, chosen in enumerate(_draws(recipe.seed, len(demonstrations), section.batch, section.steps)):
        batch, tokens = _rows_of(
            [demonstrations[i] for i in chosen], section.batch, length, recipe.rollout.prompt_tokens
        )
        rate = learning_rate(section.optimizer, step, section.steps)
        params, opt_state, loss = _supervised_step(
            config, section.optimizer, base, params, recipe.lora.alpha, opt_state, batch, rate
        )
        report(step, {"warm_start/loss": float(loss), "warm_start/tokens": tokens, "warm_start/learning_rate": rate})
    return params


def _draws(seed: int, count: int, batch: int, steps: int) -> Iterator[np.ndarray]:
    """Indices of each step's demonstrations: one seeded permutation an epoch, its tail carried into the next."""
    waiting = np.zeros(0, np.int64)
    epoch = 0
    for _ in range(steps):
        while len(waiting) < min(batch, count):
            order = np.random.default_rng(seed_int("warm_start", seed, epoch)).permutation(count)
            waiting, epoch = np.concatenate([waiting, order]), epoch + 1
        yield waiting[:batch]
        waiting = waiting[batch:]


def _branch_tokens(demonstration: DemonstratedEpisode) -> int:
    return _end(demonstration) - demonstration.prompt_length


def _end(demonstration: DemonstratedEpisode) -> int:
    """Behind the last token that is taught."""
    return int(np.flatnonzero(demonstration.mask)[-1]) + 1


def _rows_of(
    chosen: Sequence[DemonstratedEpisode], rows: int, length: int, prompt_tokens: int
) -> tuple[MicroBatch[np.ndarray], int]:
    total = sum(int(demonstration.mask.sum()) for demonstration in chosen)
    laid = [_row(demonstration, 1.0 / total) for demonstration in chosen]
    return lay_rows(laid, rows=rows, prompts=rows, row_tokens=length, prompt_tokens=prompt_tokens), total


def _row(demonstration: DemonstratedEpisode, weight: float) -> Row:
    tokens, mask, start = demonstration
    end = _end(demonstration)
    branch = Branch(
        inputs=tokens[start - 1 : end - 1],
        targets=tokens[start:end],
        mask=mask[start:end],
        sampler_logprobs=np.zeros(end - start, np.float32),
        first_position=start - 1,
        advantage=0.0,
        weight=weight,
    )
    return Row(tokens[:start], ((0, branch),))


@partial(jax.jit, static_argnums=(0, 1), donate_argnames="opt_state")
def _supervised_step(
    config: ModelConfig,
    section: OptimizerSection,
    base: Params | None,
    params: Params,
    alpha: float,
    opt_state: Any,
    batch: MicroBatch[jax.Array],
    rate: float,
) -> tuple[Params, Any, jax.Array]:
    def negative_log_likelihood(params: Params) -> jax.Array:
        logprobs = target_logprobs(config, 1.0, full_weights(base, params, alpha), batch)
        return -jnp.sum(batch.weights * jnp.where(batch.mask, logprobs, 0.0))

    loss, gradient = jax.value_and_grad(negative_log_likelihood)(params)
    params, opt_state, _ = apply_update(section, params, opt_state, gradient, rate)
    return params, opt_state, loss
