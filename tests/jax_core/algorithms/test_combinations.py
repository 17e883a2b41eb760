"""Any objective with any reduction: no micro-batch split and no packing changes the step's loss or gradient.

A small model with parameters that all tokens share stands for the policy, so that gradients really add up:
log-probs = log_softmax(features @ parameters)[token].
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_core.algorithms import ADVANTAGES, OBJECTIVES, REDUCTIONS, advantages_of

SEQUENCES, TOKENS, FEATURES, VOCABULARY = 24, 16, 5, 7
GROUP = 6
NORM = 16.0

every_combination = [
    pytest.param(objective, reduction, id=f"{objective}-{reduction}")
    for objective in sorted(OBJECTIVES)
    for reduction in sorted(REDUCTIONS)
]


@dataclass(frozen=True)
class Step:
    """All tokens of a step as arrays [N, T, ...]; a row is one sequence, and off the mask there is rubbish."""

    features: np.ndarray  # [N, T, F]
    ids: np.ndarray  # [N, T]
    sampler_logprobs: np.ndarray  # [N, T]
    advantages: np.ndarray  # [N, T]
    weights: np.ndarray  # [N, T]
    mask: np.ndarray  # [N, T]

    @property
    def arrays(self) -> list[np.ndarray]:
        return [self.features, self.ids, self.sampler_logprobs, self.advantages, self.weights, self.mask]


@functools.cache
def parameters() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(FEATURES, VOCABULARY)).astype(np.float32)


def make_step(reduction: str, advantage: str = "grpo") -> Step:
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, TOKENS + 1, SEQUENCES)
    lengths[:3] = 0, 1, TOKENS
    mask = (np.arange(TOKENS) < lengths[:, None]) & (rng.random((SEQUENCES, TOKENS)) < 0.8)  # holes: environment text
    features = rng.normal(size=(SEQUENCES, TOKENS, FEATURES)).astype(np.float32)
    ids = rng.integers(0, VOCABULARY, (SEQUENCES, TOKENS))
    logprobs = np.take_along_axis(np.asarray(jax.nn.log_softmax(features @ parameters())), ids[..., None], -1)[..., 0]
    rewards = rng.normal(size=(SEQUENCES // GROUP, GROUP))
    of_sequence = np.concatenate([advantages_of(advantage, group, np.ones(GROUP, bool)) for group in rewards])
    weights = REDUCTIONS[reduction](mask.sum(axis=1), norm=NORM)
    return Step(
        features=features,
        ids=ids,
        sampler_logprobs=np.where(mask, logprobs + rng.normal(0, 0.3, mask.shape), np.nan).astype(np.float32),
        advantages=np.where(mask, of_sequence[:, None], np.inf).astype(np.float32),
        weights=np.broadcast_to(weights[:, None], mask.shape).astype(np.float32),
        mask=mask,
    )


@functools.cache
def loss_and_gradient(objective: str):
    def loss(theta, features, ids, sampler_logprobs, advantages, weights, mask):
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(features @ theta), ids[..., None], axis=-1)[..., 0]
        losses = OBJECTIVES[objective](logprobs, sampler_logprobs, advantages, mask, clip_low=0.2, clip_high=0.28)
        return jnp.sum(weights * losses), jnp.sum(jnp.abs(weights * losses))

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def accumulate(objective: str, micro_batches) -> tuple[np.float32, np.float32, np.ndarray]:
    """Float32 sums over micro-batches of the loss, of its terms' sizes, and of the gradient."""
    loss, size, gradient = np.float32(0), np.float32(0), np.zeros_like(parameters())
    for arrays in micro_batches:
        (part, part_size), part_gradient = loss_and_gradient(objective)(parameters(), *arrays)
        loss, size, gradient = loss + part, size + part_size, gradient + part_gradient
    return loss, size, gradient


def split(step: Step, sizes: list[int], order: np.ndarray):
    """The step's rows in this order, cut into micro-batches of these sizes."""
    assert sum(sizes) == SEQUENCES
    for rows in np.split(order, np.cumsum(sizes)[:-1]):
        yield [array[rows] for array in step.arrays]


def pack(step: Step, row_tokens: int, order: np.ndarray):
    """Sequences without their padding, first fit, into rows of `row_tokens`; the rest of a row is off the mask."""
    rows: list[list[tuple[int, int]]] = []
    for sequence in order:
        tokens = [(int(sequence), t) for t in range(int(np.flatnonzero(step.mask[sequence]).max(initial=-1)) + 1)]
        home = next((row for row in rows if len(row) + len(tokens) <= row_tokens), None)
        rows.append(tokens) if home is None else home.extend(tokens)
    for row in rows:
        where = tuple(np.array(row, int).reshape(-1, 2).T)
        yield [packed_row(array, where, row_tokens) for array in step.arrays]


def packed_row(array: np.ndarray, where: tuple[np.ndarray, ...], row_tokens: int) -> np.ndarray:
    out = np.zeros((1, row_tokens, *array.shape[2:]), array.dtype)
    out[0, : len(where[0])] = array[where]
    return out


def assert_same(found, expected) -> None:
    loss, _, gradient = found
    expected_loss, size, expected_gradient = expected
    assert abs(loss - expected_loss) <= 1e-6 * size
    assert np.linalg.norm(gradient - expected_gradient) <= 1e-6 * np.linalg.norm(expected_gradient)


@pytest.mark.parametrize(("objective", "reduction"), every_combination)
@pytest.mark.parametrize("sizes", [[8, 8, 8], [1] * 24, [8, 1, 1, 1, 1, 1, 1, 1, 1, 8]], ids=["8", "1", "uneven"])
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(objective, reduction, sizes):
    step = make_step(reduction)
    whole = accumulate(objective, [step.arrays])
    order = np.random.default_rng(2).permutation(SEQUENCES)
    assert_same(accumulate(objective, split(step, sizes, order)), whole)


@pytest.mark.parametrize(("objective", "reduction"), every_combination)
@pytest.mark.parametrize("row_tokens", [16, 64])
def test_any_packing_gives_the_same_loss_and_gradient(objective, reduction, row_tokens):
    step = make_step(reduction)
    whole = accumulate(objective, [step.arrays])
    order = np.random.default_rng(3).permutation(SEQUENCES)
    assert_same(accumulate(objective, pack(step, row_tokens, order)), whole)


@pytest.mark.parametrize(("objective", "reduction"), every_combination)
def test_an_empty_micro_batch_adds_exactly_zero(objective, reduction):
    step = make_step(reduction)
    empty = [*step.arrays[:-1], np.zeros_like(step.mask)]
    loss, _, gradient = accumulate(objective, [empty])
    assert loss == 0.0
    assert not gradient.any()


@pytest.mark.parametrize("advantage", sorted(ADVANTAGES))
@pytest.mark.parametrize(("objective", "reduction"), every_combination)
def test_every_advantage_works_with_every_objective_and_reduction(advantage, objective, reduction):
    loss, _, gradient = accumulate(objective, [make_step(reduction, advantage).arrays])
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()
    assert gradient.any()
