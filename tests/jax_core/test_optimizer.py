"""The learning rate at every step that others got wrong; updates too small for bfloat16, which are not lost."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_core.optimizer import init_optimizer, learning_rate, moved, stochastic_bfloat16
from schemas.recipe import OptimizerSection


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_warms_up_peaks_and_ends_at_its_final_share(schedule):
    section = OptimizerSection(learning_rate=1.0, schedule=schedule, warmup_steps=4, final_fraction=0.1)
    rates = [learning_rate(section, step, 20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert all(later < earlier for earlier, later in pairwise(rates[4:]))
    np.testing.assert_allclose(rates[-1], 0.1)


def test_a_constant_schedule_stays_at_the_peak():
    section = OptimizerSection(learning_rate=0.5, schedule="constant")
    assert {learning_rate(section, step, 10) for step in range(10)} == {0.5}


def test_a_run_of_one_step_trains_at_the_peak():
    assert learning_rate(OptimizerSection(learning_rate=0.5), 0, 1) == 0.5


BELOW_ONE = 1 - 2**-8  # the next bfloat16


def stepped(weight: float, update: float, rate: float, count: int = 0, size: int = 100_000) -> np.ndarray:
    params = {"w": jnp.full(size, weight, jnp.bfloat16)}
    new = moved(params, {"w": jnp.full(size, update, jnp.float32)}, rate, jnp.int32(count))["w"]
    assert new.dtype == jnp.bfloat16
    return np.asarray(new, np.float64)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_update_too_small_for_a_bfloat16_weight_moves_it_on_average(sign):
    """A quarter of the way to the next number: a quarter of the weights go there, and rounding to the nearest none."""
    new = stepped(sign, sign, rate=2**-10)
    assert set(new) == {sign, sign * BELOW_ONE}
    assert new.mean() == pytest.approx(sign * (1 - 2**-10), abs=1e-4 * 2**-2)
    assert float(jnp.bfloat16(1 - 2**-10)) == 1.0


def test_what_bfloat16_holds_is_not_rounded():
    assert set(stepped(1.0, 1.0, rate=2**-8)) == {BELOW_ONE}
    assert set(stepped(1.0, 0.0, rate=1.0)) == {1.0}
    held = jnp.array([0.0, -0.0, 1.5, -3.0, 2.0**100, 2.0**-100], jnp.float32)
    assert stochastic_bfloat16(held, jax.random.key(0)).astype(jnp.float32).tolist() == held.tolist()


def test_random_rounding_is_a_pure_function_of_the_update_number_and_differs_from_one_to_the_next():
    first, again, next_one = (stepped(1.0, 1.0, 2**-9, count, size=100) for count in (5, 5, 6))
    np.testing.assert_array_equal(first, again)
    assert (first != next_one).any()


def test_each_weight_has_a_rounding_of_its_own():
    params = {name: jnp.ones(100, jnp.bfloat16) for name in "ab"}
    updates = {name: jnp.ones(100, jnp.float32) for name in "ab"}
    new = moved(params, updates, 2**-9, jnp.int32(0))
    assert (new["a"] != new["b"]).any()


def test_float32_weights_are_moved_exactly():
    weights, updates = (np.random.default_rng(i).standard_normal(50).astype(np.float32) for i in range(2))
    new = moved({"w": jnp.asarray(weights)}, {"w": jnp.asarray(updates)}, 0.25, jnp.int32(0))["w"]
    np.testing.assert_array_equal(new, weights - np.float32(0.25) * updates)


def test_the_moments_of_bfloat16_weights_are_float32():
    state = init_optimizer(OptimizerSection(), {"w": jnp.ones(3, jnp.bfloat16)})
    assert {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim} == {jnp.dtype(jnp.float32)}
