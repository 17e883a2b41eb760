"""What the benchmarks measure with. How fast anything is, no test says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.measures import covered, steps_per_second, total, typical_steps_per_second, within
from benchmarks.placements import STAGES, idle_share, outside_seconds, success
from benchmarks.sleepy_lake import P99_OVER_MEDIAN, SLEEPY_LAKE, sleep_seconds
from schemas.metrics import MetricEvent
from schemas.recipe_io import load_recipe
from stages.reward.self_test import check_task
from stages.rollout.environments import environment_kind

REPOSITORY = Path(__file__).parents[1]


def test_one_step_in_a_hundred_sleeps_ten_times_the_median_or_more() -> None:
    draws = np.random.default_rng(0)
    slept = [sleep_seconds(draws, median=0.03) for _ in range(20_000)]
    assert np.median(slept) == pytest.approx(0.03, rel=0.05)
    assert np.quantile(slept, 0.99) == pytest.approx(0.03 * P99_OVER_MEDIAN, rel=0.1)


def test_an_episode_that_is_played_again_sleeps_as_long() -> None:
    first, again, other = (
        [sleep_seconds(draws, 1.0) for _ in range(3)] for draws in map(np.random.default_rng, (7, 7, 8))
    )
    assert first == again != other


def test_the_recipe_of_the_waiting_benchmark_is_one_with_the_sleepy_lake() -> None:
    recipe = load_recipe(REPOSITORY / "benchmarks/waiting.toml")
    check_task(recipe)
    assert environment_kind(recipe.task.environment) is SLEEPY_LAKE


def test_covered_time_counts_overlaps_once_and_total_time_each() -> None:
    intervals = [(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (7.0, 8.0)]
    assert (covered(intervals), total(intervals)) == (6.0, 8.0)
    assert covered(within(intervals, (4.5, 7.5))) == 1.0


def trained(ends: list[float]) -> list[MetricEvent]:
    return [MetricEvent("train", step, end, {"trainer/seconds": 0.5}) for step, end in enumerate(ends)]


def test_a_pause_between_steps_counts_in_the_speed_of_all_and_not_of_the_typical_one() -> None:
    train = trained([100.0, 101.0, 101.5, 102.0, 112.0])  # the first one compiled, before the last one was a pause
    assert steps_per_second(train, first=1) == pytest.approx(4 / 12)
    assert typical_steps_per_second(train, first=2) == pytest.approx(2.0)


def element(admitted: float, work: float, waits: float = 0.0) -> dict[str, MetricEvent]:
    """An element that works `work` seconds in each stage, one after another, and waits as long before each."""
    events = {"prompts": MetricEvent("prompts", 0, admitted, {})}
    for number, stage in enumerate(STAGES, start=1):
        events[stage] = MetricEvent(stage, 0, admitted + number * (work + waits), {f"{stage}/seconds": work})
    return events


def test_what_an_element_spends_outside_the_stages_is_what_it_waits_between_them() -> None:
    assert outside_seconds(element(10.0, work=2.0)) == pytest.approx(0.0)
    assert outside_seconds(element(10.0, work=2.0, waits=0.25)) == pytest.approx(0.25 * len(STAGES))


def test_a_generator_is_idle_where_none_of_its_elements_is_in_a_stage() -> None:
    elements = {(0, 0): element(0.0, work=1.0), (0, 1): element(0.0, work=2.0)}
    assert idle_share(elements, (0.0, 10.0), generators=1) == pytest.approx(0.0)
    assert idle_share(elements, (0.0, 10.0), generators=2) == pytest.approx(0.25)  # one of two is done after half


def test_success_is_compared_with_the_policy_that_reinforcement_learning_began_with() -> None:
    versions = [(0, 0.1), (0, 0.6), (9, 0.9), (None, 0.2)]  # random weights, warm start, trained, a scripted rule
    results = [{"version": version, "total": {"success": share}} for version, share in versions]
    assert success({"results": results}) == (0.6, 0.9)
