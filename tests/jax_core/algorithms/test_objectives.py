"""Laws and worked examples of the objectives. N sequences of T tokens."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_core.algorithms import OBJECTIVES, importance_ratio, is_clipped
from schemas.recipe import AlgorithmSection

CLIP = {"clip_low": 0.2, "clip_high": 0.28}

every_objective = pytest.mark.parametrize("name", sorted(OBJECTIVES))
# The third mode matters: XLA turns a product with a mask argument into a select, so it would let `values * mask` pass;
# with a constant mask the product is a product, and NaN * 0 is NaN.
every_mode = pytest.mark.parametrize("mode", ["eager", "jit", "jit with a constant mask"])


@functools.cache
def random_tokens(seed: int = 0, sequences: int = 4, tokens: int = 9):
    """logprobs, sampler_logprobs, advantages [N, T] and mask [N, T]; the last sequence is all masked."""
    rng = np.random.default_rng(seed)
    sampler_logprobs = -rng.exponential(1.0, (sequences, tokens))
    logprobs = np.minimum(sampler_logprobs + rng.normal(0.0, 0.4, (sequences, tokens)), 0.0)
    advantages = np.broadcast_to(rng.normal(size=(sequences, 1)), (sequences, tokens))
    mask = rng.random((sequences, tokens)) < 0.6
    mask[0, :2] = True, False
    mask[-1] = False
    return (*(jnp.asarray(x, jnp.float32) for x in (logprobs, sampler_logprobs, advantages)), jnp.asarray(mask))


def loss_and_gradients(name: str, logprobs, sampler_logprobs, advantages, mask, *, mode: str = "jit"):
    """The loss of each token, and the gradients of their sum for all three float inputs."""
    (_, losses), gradients = loss_function(name, mode)(logprobs, sampler_logprobs, advantages, mask)
    return losses, gradients


@functools.cache
def loss_function(name: str, mode: str):
    constant_mask = random_tokens()[-1]

    def total(logprobs, sampler_logprobs, advantages, mask):
        mask = constant_mask if mode == "jit with a constant mask" else mask
        losses = OBJECTIVES[name](logprobs, sampler_logprobs, advantages, mask, **CLIP)
        return losses.sum(), losses

    function = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)
    return function if mode == "eager" else jax.jit(function)


def one_token(name: str, ratio: float, advantage: float, logprob: float = -0.5) -> tuple[float, float]:
    """Loss and d loss / d logprob of one token with this ratio."""
    logprobs = jnp.full((1,), logprob, jnp.float32)
    losses, (gradient, _, _) = loss_and_gradients(
        name, logprobs, logprobs - jnp.log(ratio), jnp.full((1,), advantage, jnp.float32), jnp.ones((1,), bool)
    )
    return float(losses[0]), float(gradient[0])


# Worked examples: sign of the advantage x ratio, clip range 0.8 to 1.28


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient"),
    [
        (+1, 0.50, -0.50, -0.50),
        (+1, 0.79, -0.79, -0.79),
        (+1, 0.90, -0.90, -0.90),
        (+1, 1.00, -1.00, -1.00),
        (+1, 1.27, -1.27, -1.27),
        (+1, 1.29, -1.28, 0.00),
        (+1, 3.00, -1.28, 0.00),
        (-1, 0.50, 0.80, 0.00),
        (-1, 0.79, 0.80, 0.00),
        (-1, 0.81, 0.81, 0.81),
        (-1, 1.00, 1.00, 1.00),
        (-1, 1.27, 1.27, 1.27),
        (-1, 1.29, 1.29, 1.29),
        (-1, 3.00, 3.00, 3.00),
        (0, 0.50, 0.00, 0.00),
        (0, 1.00, 0.00, 0.00),
        (0, 3.00, 0.00, 0.00),
    ],
)
def test_ppo_clip_stops_the_gradient_only_where_the_ratio_left_in_the_advantages_direction(
    advantage, ratio, loss, gradient
):
    assert one_token("ppo_clip", ratio, advantage) == pytest.approx((loss, gradient), abs=1e-6)


@pytest.mark.parametrize("advantage", [+1, -1, 0])
@pytest.mark.parametrize(
    ("ratio", "weight"), [(0.5, 0.8), (0.79, 0.8), (0.9, 0.9), (1.0, 1.0), (1.27, 1.27), (1.29, 1.28), (3.0, 1.28)]
)
def test_cispo_clips_the_weight_and_keeps_the_gradient_of_every_token(advantage, ratio, weight):
    expected = (0.5 * weight * advantage, -weight * advantage)
    assert one_token("cispo", ratio, advantage, logprob=-0.5) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("advantage", [+1, -1, 0])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_policy_gradient_ignores_the_ratio(advantage, ratio):
    assert one_token("policy_gradient", ratio, advantage, logprob=-0.5) == (0.5 * advantage, -advantage)


def test_cispo_with_clip_low_of_one_has_no_lower_bound():
    tokens = jnp.full((1,), -5.0), jnp.full((1,), -1.0), jnp.ones((1,)), jnp.ones((1,), bool)
    loss = OBJECTIVES["cispo"](*tokens, clip_low=1.0, clip_high=4.0)
    np.testing.assert_allclose(loss, 5.0 * np.exp(-4.0), rtol=1e-6)


def test_losses_and_clipping_of_a_worked_batch():
    logprobs = jnp.array([[-1.0, -0.5, -2.0], [-0.3, -1.5, -0.7]])
    sampler_logprobs = jnp.array([[-1.2, -0.9, -1.5], [-0.3, -1.0, -0.9]])
    mask = jnp.array([[True, True, True], [True, True, False]])
    advantages = jnp.array([[1.0], [-1.0]])
    per_sequence = np.array([[1 / 3], [1 / 2]]) / 2
    for clip_high, sequence_mean, clipped in [(0.2, -0.051088, 3), (0.28, -0.067989, 2)]:
        inputs = (logprobs, sampler_logprobs, advantages, mask)
        losses = OBJECTIVES["ppo_clip"](*inputs, clip_low=0.2, clip_high=clip_high)
        assert np.sum(per_sequence * losses) == pytest.approx(sequence_mean, abs=1e-6)
        assert is_clipped(*inputs, clip_low=0.2, clip_high=clip_high).sum() == clipped
    ratio = importance_ratio(logprobs, sampler_logprobs, mask)
    assert (float(ratio.max()), float(ratio.min())) == pytest.approx((1.491825, 0.606531), abs=1e-6)
    assert ratio[1, 2] == 1.0


# The contract of the family


def test_the_table_holds_exactly_the_names_of_the_recipe():
    assert set(OBJECTIVES) == set(get_args(AlgorithmSection.model_fields["objective"].annotation))


@every_mode
@every_objective
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e38], ids=str)
@pytest.mark.parametrize("where", [(0,), (1,), (2,), (0, 1, 2)], ids=["logprobs", "sampler", "advantages", "all"])
def test_nothing_off_the_mask_reaches_the_loss_or_a_gradient(name, poison, where, mode):
    *inputs, mask = random_tokens()
    clean_losses, clean_gradients = loss_and_gradients(name, *inputs, mask, mode=mode)
    off_mask = ~np.asarray(mask)
    for i in where:
        inputs[i] = jnp.where(mask, inputs[i], poison)
    losses, gradients = loss_and_gradients(name, *inputs, mask, mode=mode)
    np.testing.assert_array_equal(losses, clean_losses)
    assert np.isfinite(losses).all()
    assert not np.any(np.asarray(losses)[off_mask])
    for gradient, clean in zip(gradients, clean_gradients, strict=True):
        np.testing.assert_array_equal(gradient, clean)
        assert np.isfinite(gradient).all()
        assert not np.any(np.asarray(gradient)[off_mask])


@every_objective
def test_an_all_masked_row_adds_exactly_zero(name):
    logprobs, sampler_logprobs, advantages, mask = random_tokens()
    losses, gradients = loss_and_gradients(name, logprobs, sampler_logprobs, advantages, mask & False)
    assert float(losses.sum()) == 0.0
    assert not any(np.any(gradient) for gradient in gradients)


@every_objective
def test_at_ratio_one_the_gradient_is_the_policy_gradient_exactly(name):
    logprobs, _, advantages, mask = random_tokens()
    _, (gradient, _, _) = loss_and_gradients(name, logprobs, logprobs, advantages, mask)
    np.testing.assert_array_equal(gradient, jnp.where(mask, -advantages, 0.0))


@every_objective
def test_no_gradient_flows_into_the_samplers_logprobs(name):
    _, (_, gradient, _) = loss_and_gradients(name, *random_tokens())
    assert not np.any(gradient)


@every_objective
def test_an_advantage_of_zero_has_neither_loss_nor_gradient(name):
    logprobs, sampler_logprobs, advantages, mask = random_tokens()
    losses, (gradient, _, _) = loss_and_gradients(name, logprobs, sampler_logprobs, 0 * advantages, mask)
    assert not np.any(losses)
    assert not np.any(gradient)


@every_objective
@pytest.mark.parametrize(("logprob", "sampler_logprob"), [(0.0, -1e4), (-1e4, 0.0), (-1e30, -1e-30)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_finite_logprobs_give_a_finite_loss_and_gradient_however_far_apart(name, logprob, sampler_logprob, advantage):
    losses, gradients = loss_and_gradients(
        name, *(jnp.full((3,), x, jnp.float32) for x in (logprob, sampler_logprob, advantage)), jnp.ones((3,), bool)
    )
    assert np.isfinite(losses).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@every_objective
def test_one_advantage_a_sequence_means_the_same_as_one_a_token(name):
    logprobs, sampler_logprobs, advantages, mask = random_tokens()
    function = OBJECTIVES[name]
    a_token = function(logprobs, sampler_logprobs, advantages, mask, **CLIP)
    a_sequence = function(logprobs, sampler_logprobs, advantages[:, :1], mask, **CLIP)
    np.testing.assert_array_equal(a_token, a_sequence)
    assert a_sequence.shape == mask.shape


@every_objective
def test_a_tokens_loss_depends_on_no_other_token(name):
    inputs = random_tokens()
    together = OBJECTIVES[name](*inputs, **CLIP)
    order = np.random.default_rng(1).permutation(inputs[0].size)
    shuffled = OBJECTIVES[name](*(x.reshape(-1)[order] for x in inputs), **CLIP)
    np.testing.assert_array_equal(shuffled, together.reshape(-1)[order])


@every_objective
def test_losses_are_float32_whatever_comes_in(name):
    logprobs, sampler_logprobs, advantages, mask = random_tokens()
    narrow = [x.astype(jnp.bfloat16) for x in (logprobs, sampler_logprobs, advantages)]
    widened = [x.astype(jnp.float32) for x in narrow]
    losses = OBJECTIVES[name](*narrow, mask, **CLIP)
    assert losses.dtype == jnp.float32
    np.testing.assert_array_equal(losses, OBJECTIVES[name](*widened, mask, **CLIP))


# Helpers for metrics


def test_the_ratio_is_exactly_one_off_the_mask_and_where_the_logprobs_agree():
    logprobs, _, _, mask = random_tokens()
    nan_off_mask = jnp.where(mask, logprobs, jnp.nan)
    assert np.all(importance_ratio(nan_off_mask, nan_off_mask, mask) == 1.0)


def test_a_token_counts_as_clipped_exactly_where_ppo_clip_has_no_gradient():
    logprobs, sampler_logprobs, advantages, mask = random_tokens(sequences=64)
    _, (gradient, _, _) = loss_and_gradients("ppo_clip", logprobs, sampler_logprobs, advantages, mask)
    clipped = is_clipped(logprobs, sampler_logprobs, advantages, mask, **CLIP)
    assert 0 < clipped.sum() < mask.sum()
    np.testing.assert_array_equal(clipped, mask & (gradient == 0))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf], ids=str)
def test_nothing_off_the_mask_counts_as_clipped(poison):
    *inputs, mask = random_tokens()
    clean = is_clipped(*inputs, mask, **CLIP)
    poisoned = is_clipped(*(jnp.where(mask, x, poison) for x in inputs), mask, **CLIP)
    np.testing.assert_array_equal(poisoned, clean)


def test_importing_the_algorithms_starts_no_device():
    # A platform that does not exist fails as soon as a device is asked for.
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}
    subprocess.run([sys.executable, "-c", "import jax_core.algorithms"], env=environment, check=True)
