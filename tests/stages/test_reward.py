"""Reward: what is a reward, what is a failure, and what the stage says about both."""

import dataclasses
import math
import threading

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.metrics import MetricsFilter
from apache_beam.testing.util import assert_that, equal_to

from schemas.metrics import read_metrics
from schemas.records import RolloutBatch
from schemas.store import RunStore
from stages.numbers import finite_number
from stages.reward.environment_return import environment_return
from stages.reward.reward import Reward, measure_rewards, score, score_batch
from stages.rollout.episodes import run_episodes
from tests.stages.rollout_fakes import (
    AMPLE,
    DIALOGUE,
    LIMIT,
    RUN_SEED,
    EchoEnvironments,
    FakeEngine,
    environment_seed,
    make_batch,
    make_recipe,
    token_seed,
)

GATE = threading.Event()  # never set: what hangs, hangs


def raise_(error):
    raise error


def played(*texts, faults=()):
    """Groups 10, 11, ... of two samples; each has the return 0.25, or fails if (group, sample) is among `faults`."""
    broken = {(environment_seed(*who), "step", 0): lambda _: raise_(OSError("gone")) for who in faults}
    environments = EchoEnvironments(broken)
    return run_episodes(FakeEngine(), None, environments, DIALOGUE, make_batch(*texts), recipe=make_recipe())


def reward_by_sample(*rewards):
    """A reward function that gives, raises or calls what stands at the sample's index."""

    def reward_fn(rollout):
        reward = rewards[rollout.id.sample_index]
        return reward() if callable(reward) else reward

    return reward_fn


# What is a reward.


@pytest.mark.parametrize(
    "returned",
    [0.0, -0.0, 1, -3, True, False, np.float32(0.5), np.float64(0.1), np.int64(7), np.bool_(True), np.array(2)],
)
def test_any_finite_number_is_a_reward(returned):
    scored = score(played("ab").rollouts[0], lambda rollout: returned)
    assert type(scored.reward) is float and scored.reward == float(returned)
    assert math.copysign(1, scored.reward) == math.copysign(1, float(returned))
    assert scored.rollout.status == "ok" and scored.components == {}


@pytest.mark.parametrize("returned", [None, "1", b"1", [1.0], np.ones(2), 1j, object(), (1.0, 2.0), (1.0, {}, {}), {}])
def test_anything_else_is_none(returned):
    with pytest.raises(TypeError):
        score(played("ab").rollouts[0], lambda rollout: returned)


@pytest.mark.parametrize("returned", [math.nan, math.inf, -math.inf, np.float32("nan"), (0.0, {"a": math.nan})])
def test_a_reward_and_its_components_are_finite(returned):
    with pytest.raises(ValueError, match="must be finite"):
        score(played("ab").rollouts[0], lambda rollout: returned)


def test_a_reward_may_have_named_components():
    scored = score(played("ab").rollouts[0], lambda rollout: (1, {"format": np.float32(0.25), "correct": True}))
    assert (scored.reward, scored.components) == (1.0, {"format": 0.25, "correct": 1.0})


def test_a_component_that_is_no_number_is_named():
    with pytest.raises(TypeError, match="reward component 'format' must be a number, got str"):
        score(played("ab").rollouts[0], lambda rollout: (1, {"format": "good"}))


def test_an_integer_beyond_any_float_is_refused():
    with pytest.raises((TypeError, ValueError, OverflowError)):
        finite_number(10**400, "the reward")


def test_environment_return_is_what_the_environment_gave():
    scored = score(played("ab").rollouts[0], environment_return)
    assert (scored.reward, scored.components) == (0.25, {"return": 0.25, "success": 1.0})


def test_environment_return_has_no_success_where_the_environment_says_nothing_of_it():
    rollout = dataclasses.replace(played("ab").rollouts[0], environment={"return": -1.5})
    assert environment_return(rollout) == (-1.5, {"return": -1.5})


# What is a failure.

FAULTS = {
    "raises": (lambda: raise_(ValueError("boom")), "ValueError: boom"),
    "exits": (lambda: raise_(SystemExit(1)), "SystemExit: 1"),
    "hangs": (GATE.wait, f"TimeoutError: took longer than {LIMIT} s"),
    "returns nothing": (None, "TypeError: the reward must be a number, got NoneType"),
    "returns NaN": (math.nan, "ValueError: the reward must be finite, got nan"),
    "returns infinity": (math.inf, "ValueError: the reward must be finite, got inf"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reward_that_fails_makes_a_tombstone_of_its_trajectory_alone(fault):
    fails, error = FAULTS[fault]
    batch = played("ab", "cd")
    scored = score_batch(batch, reward_by_sample(0.0, fails), LIMIT if fault == "hangs" else AMPLE, run_seed=RUN_SEED)
    assert [one.rollout.id for one in scored.rollouts] == [rollout.id for rollout in batch.rollouts]
    assert [one.rollout.status for one in scored.rollouts] == ["ok", "failed"] * 2
    assert [one.reward for one in scored.rollouts] == [0.0] * 4
    tombstone = scored.rollouts[1]
    assert tombstone.rollout.error == f"reward: {error}" and tombstone.components == {}
    assert not tombstone.rollout.loss_mask.any() and tombstone.rollout.versions == ()
    assert tombstone.rollout.tokens.tolist() == batch.rollouts[1].tokens.tolist()
    assert [(failure.id, failure.stage, failure.error) for failure in scored.failures] == [
        (rollout.id, "reward", error) for rollout in batch.rollouts if rollout.id.sample_index == 1
    ]


def test_a_failure_holds_the_trajectory_that_was_to_be_scored():
    batch = played("ab", "cd")
    failure = score_batch(batch, reward_by_sample(0, None), AMPLE, run_seed=RUN_SEED).failures[1]
    assert (failure.prompt, failure.policy_version, failure.seed) == (batch.prompts.prompts[1], 6, token_seed(11, 1))
    assert list(failure.attempt_tokens) == batch.rollouts[3].tokens.tolist()


def test_a_tombstone_is_not_scored_and_its_failure_is_kept():
    batch, asked = played("ab", "cd", faults=[(11, 0)]), []
    scored = score_batch(batch, lambda rollout: asked.append(rollout.id) or 5.0, AMPLE)
    assert [one.reward for one in scored.rollouts] == [5.0, 5.0, 0.0, 5.0]
    assert scored.rollouts[2].rollout is batch.rollouts[2] and scored.rollouts[2].components == {}
    assert scored.failures == batch.failures and batch.rollouts[2].id not in asked


def test_that_all_rewards_fail_is_survived():
    scored = score_batch(played("ab", "cd", "ef", "gh"), reward_by_sample(None, None), AMPLE)
    assert [one.rollout.status for one in scored.rollouts] == ["failed"] * 8 and len(scored.failures) == 8
    assert math.isnan(measure_rewards(scored)["reward/total/mean"])


def test_no_rollouts_have_no_rewards():
    assert score_batch(RolloutBatch(make_batch(), ()), environment_return, AMPLE).rollouts == ()


def test_rewards_are_limited_outside_the_main_thread_too():
    scored, batch = [], played("ab")
    score_it = lambda: scored.append(score_batch(batch, reward_by_sample(GATE.wait, 1), LIMIT))
    thread = threading.Thread(target=score_it)
    thread.start()
    thread.join()
    assert [one.rollout.status for one in scored[0].rollouts] == ["failed", "ok"]


# What the stage says.


def test_metrics_are_those_of_the_trajectories_that_did_not_fail():
    batch = played("ab", "cd", "ef", faults=[(10, 0)])
    reward_fn = lambda rollout: None if rollout.id.group_index == 11 else (2.0, {"success": rollout.id.sample_index})
    # Group 10: failed before, 2.0 and success; group 11: failed here, twice; group 12: 2.0, without and with success.
    measured = measure_rewards(score_batch(batch, reward_fn, AMPLE))
    assert measured == {
        "reward/trajectories": 6,
        "reward/failed_trajectories": 2,
        "reward/total/mean": 2.0,
        "reward/total/std": 0.0,
        "reward/success/fraction": 2 / 3,
    }


def test_without_a_component_success_is_a_reward_above_zero():
    scored = score_batch(played("ab"), reward_by_sample(-1.0, 0.5), AMPLE)
    assert measure_rewards(scored)["reward/success/fraction"] == 0.5


def test_the_stage_counts_for_beam_what_it_measures(tmp_path):
    batch = played("ab", "cd", faults=[(11, 0)])
    without_return = dataclasses.replace(batch.rollouts[0], environment={})
    batch = dataclasses.replace(batch, rollouts=(without_return, *batch.rollouts[1:]))
    pipeline = beam.Pipeline(runner="FnApiRunner")
    scored = pipeline | beam.Create([batch]) | Reward(make_recipe(), str(tmp_path))
    rewards = scored | beam.FlatMap(lambda scored: [one.reward for one in scored.rollouts])
    assert_that(rewards, equal_to([0.0, 0.25, 0.0, 0.25]))
    result = pipeline.run()
    result.wait_until_finish()
    counters = result.metrics().query(MetricsFilter().with_namespace(Reward))["counters"]
    (event,) = read_metrics(RunStore.open(tmp_path), "reward")
    assert (event.step, event.labels) == (7, {"element": 0})
    assert {c.key.metric.name: c.committed for c in counters} == {
        "in-trajectories": event.values["reward/trajectories"],
        "failed-trajectories": event.values["reward/failed_trajectories"],
    }
    assert event.values["reward/failed_trajectories"] == 1
