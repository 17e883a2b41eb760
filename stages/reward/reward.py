"""Reward: a number, and named components of it, for every trajectory of an element.

A reward function takes a finished rollout and returns a number, or a number and a dict of numbers. It runs in a worker
thread with a time limit. One that raises, hangs, or returns what is no finite number makes its trajectory a tombstone
and a `Failure`; 0.0, -0.0, integers, booleans and NumPy scalars are numbers like any other.

Left out on purpose: running what a model wrote. Code from a trajectory belongs into a sandbox that the reward function
talks to; a time limit is none. Shaping, normalising and advantages: they are the trainer's, over the whole step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import apache_beam as beam
import numpy as np

from schemas.identity import seed_words
from schemas.metrics import MetricsWriter
from schemas.recipe import Recipe
from schemas.records import Failure, Rollout, RolloutBatch, ScoredBatch, ScoredRollout, tombstone
from schemas.store import RunStore
from stages.counters import count_all
from stages.limits import Outcome, call_all
from stages.numbers import finite_number
from stages.reward.base import RewardFunction
from stages.reward.kinds import make_reward

STAGE = "reward"


def score(rollout: Rollout, reward_fn: RewardFunction) -> ScoredRollout:
    """The rollout with its reward. A tombstone is not scored: it has reward 0.0 and no components.

    Raises:
      TypeError, ValueError: the reward function returned what is no finite number, or components that are none.
      Exception: whatever the reward function raised.
    """
    if rollout.status == "failed":
        return ScoredRollout(rollout, 0.0, {})
    returned = reward_fn(rollout)
    reward, components = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(components, Mapping):
        raise TypeError(f"reward components must be a mapping of numbers, got {type(components).__name__}")
    return ScoredRollout(
        rollout,
        finite_number(reward, "the reward"),
        {str(name): finite_number(value, f"reward component {name!r}") for name, value in components.items()},
    )


def score_batch(
    batch: RolloutBatch, reward_fn: RewardFunction, seconds_limit: float, *, run_seed: int = 0
) -> ScoredBatch:
    """Scores every rollout of the batch, whatever the others do.

    Args:
      seconds_limit: wall time of one reward.
      run_seed: seed of the run, from which the seed in a `Failure` derives.

    Returns:
      All rollouts in the order that they came in, with the failures of this stage after those of the earlier ones.
    """
    outcomes = call_all([partial(score, rollout, reward_fn) for rollout in batch.rollouts], seconds_limit)
    judged = list(zip(batch.rollouts, outcomes, strict=True))
    return ScoredBatch(
        batch.prompts,
        tuple(_scored_or_tombstone(rollout, outcome) for rollout, outcome in judged),
        batch.failures
        + tuple(
            _failure(batch, rollout, outcome, run_seed) for rollout, outcome in judged if outcome.error is not None
        ),
    )


def _scored_or_tombstone(rollout: Rollout, outcome: Outcome[ScoredRollout]) -> ScoredRollout:
    if outcome.error is None:
        return outcome.result
    return ScoredRollout(tombstone(rollout, f"reward: {outcome.error}"), 0.0, {})


def _failure(batch: RolloutBatch, rollout: Rollout, outcome: Outcome[ScoredRollout], run_seed: int) -> Failure:
    identity = rollout.id
    whose = (run_seed, identity.step, identity.group_index, identity.sample_index)
    return Failure(
        id=identity,
        stage=STAGE,
        error=outcome.error or "",
        traceback=outcome.traceback,
        policy_version=batch.prompts.policy_version,
        prompt=batch.prompts.prompts[identity.group_index - batch.prompts.first_group_index],
        seed=seed_words("tokens", *whose),
        attempt_tokens=tuple(rollout.tokens.tolist()),
    )


def measure_rewards(batch: ScoredBatch) -> dict[str, float]:
    """The stage's metrics, without its time. Means are over the trajectories that did not fail; NaN if all did.

    `reward/failed_trajectories` are those that failed here. A trajectory succeeds by its component "success", or, where
    there is none, by a reward above 0.
    """
    scored = [scored for scored in batch.rollouts if scored.rollout.status == "ok"]
    rewards = np.array([one.reward for one in scored], np.float64)
    successes = [one.components.get("success", one.reward) > 0 for one in scored]
    return {
        "reward/trajectories": len(batch.rollouts),
        "reward/failed_trajectories": sum(failure.stage == STAGE for failure in batch.failures),
        "reward/total/mean": float(rewards.mean()) if scored else math.nan,
        "reward/total/std": float(rewards.std()) if scored else math.nan,
        "reward/success/fraction": sum(successes) / len(scored) if scored else math.nan,
    }


@dataclass
class Reward(beam.PTransform):
    """RolloutBatch -> ScoredBatch, one to one; see `score_batch`.

    Args:
      recipe: the run's recipe; `task.reward` names the reward function.
      run: location of the run directory, where metrics go.
    """

    recipe: Recipe
    run: str

    def expand(self, batches: beam.PCollection[RolloutBatch]) -> beam.PCollection[ScoredBatch]:
        do = beam.ParDo(_RewardFn(self.recipe, self.run))
        return batches | "Reward" >> do.with_output_types(ScoredBatch)


class _RewardFn(beam.DoFn):
    def __init__(self, recipe: Recipe, run: str):
        self._recipe = recipe
        self._run = run

    def setup(self) -> None:
        self._metrics = MetricsWriter(RunStore.open(self._run), STAGE)
        self._reward = make_reward(self._recipe)

    def process(self, batch: RolloutBatch) -> Iterator[ScoredBatch]:
        task = self._recipe.task
        started = time.perf_counter()
        scored = score_batch(batch, self._reward, task.reward_seconds_limit, run_seed=self._recipe.seed)
        seconds = time.perf_counter() - started
        measured = measure_rewards(scored)
        self._metrics.write(
            batch.prompts.step, {**measured, "reward/seconds": seconds}, element=batch.prompts.element_index
        )
        count_all(
            Reward,
            {
                "in-trajectories": len(batch.rollouts),
                "failed-trajectories": int(measured["reward/failed_trajectories"]),
            },
        )
        yield scored
