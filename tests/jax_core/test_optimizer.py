"""The learning rate at every step that others got wrong."""

from itertools import pairwise

import numpy as np
import pytest

from jax_core.optimizer import learning_rate
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
