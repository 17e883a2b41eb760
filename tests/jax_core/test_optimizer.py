"""The learning rate at every step that others got wrong; changes too small for bfloat16, which are not lost."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_core.optimizer import init_optimizer, learning_rate, make_optimizer, moved, stochastic_bfloat16
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


# Moments in bfloat16

BETA2 = 0.999
NEVER_CLIPPED = 1e9


def moments_section(dtype: str) -> OptimizerSection:
    return OptimizerSection(beta2=BETA2, clip_norm=NEVER_CLIPPED, moments_dtype=dtype)


def of_constant_gradient(dtype: str, gradient: float, steps: int, size: int = 1000) -> tuple[jax.Array, jax.Array]:
    """The first and the second moment after `steps` updates, float32 [size]."""
    optimizer, params = make_optimizer(moments_section(dtype)), {"w": jnp.zeros(size)}
    constant = {"w": jnp.full(size, gradient)}
    last = jax.lax.fori_loop(0, steps, lambda _, s: optimizer.update(constant, s, params)[1], optimizer.init(params))
    (found,) = (part for part in last if hasattr(part, "nu"))
    assert found.nu["w"].dtype == found.mu["w"].dtype == jnp.dtype(dtype)
    return found.mu["w"].astype(jnp.float32), found.nu["w"].astype(jnp.float32)


@pytest.mark.parametrize("steps", [10, 300, 4000])
def test_moments_in_bfloat16_follow_a_constant_gradient_and_its_square(steps):
    first, second = of_constant_gradient("bfloat16", 0.3, steps)
    assert float(first.mean()) == pytest.approx(0.3 * (1 - 0.9**steps), rel=0.01)
    assert float(second.mean()) == pytest.approx(0.3**2 * (1 - BETA2**steps), rel=0.02)
    assert float(second.std() / second.mean()) < 0.1


def test_a_second_moment_rounded_to_the_nearest_would_stop_on_its_way():
    """What the law above would not hold for: from a third of the way on, a step is below half of the last bit."""
    nearest = ml_dtypes.bfloat16(0.0)
    for _ in range(4000):
        nearest = ml_dtypes.bfloat16(BETA2 * float(nearest) + (1 - BETA2) * 0.3**2)
    assert float(nearest) < 0.5 * 0.3**2


def test_moments_in_bfloat16_take_half_the_memory():
    params = {"w": jnp.ones((30, 20)), "scale": jnp.ones(20)}
    sizes = {
        dtype: sum(leaf.nbytes for leaf in jax.tree.leaves(init_optimizer(moments_section(dtype), params)) if leaf.ndim)
        for dtype in ("float32", "bfloat16")
    }
    assert sizes["float32"] == 2 * sizes["bfloat16"] == 2 * 4 * (30 * 20 + 20)


def test_the_moments_roundings_are_drawn_apart_from_each_other_and_from_the_weights():
    size, optimizer = 1000, make_optimizer(moments_section("bfloat16"))
    params = {"w": jnp.zeros(size, jnp.bfloat16)}
    gradient = {"w": jnp.full(size, 0.3)}
    _, state = optimizer.update(gradient, optimizer.init(params), params)
    (found,) = (part for part in state if hasattr(part, "nu"))
    ups = [np.asarray(leaf == leaf.max()) for leaf in (found.mu["w"], found.nu["w"])]
    ups.append(stepped(1.0, 1.0, 2**-9, size=size) == 1.0)
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert 0.0 < ups[one].mean() < 1.0
        assert abs(np.corrcoef(ups[one], ups[other])[0, 1]) < 0.15


def test_the_first_update_is_that_of_float32_moments_as_only_what_is_kept_is_rounded():
    params, gradient = {"w": jnp.zeros(50)}, {"w": jax.random.normal(jax.random.key(0), 50)}
    made = []
    for dtype in ("float32", "bfloat16"):
        optimizer = make_optimizer(moments_section(dtype))
        made.append(optimizer.update(gradient, optimizer.init(params), params)[0]["w"])
    np.testing.assert_array_equal(*made)
