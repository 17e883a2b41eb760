"""FrozenLake whose steps take their time: each sleeps before it answers, log-normally, with a 99th percentile of ten
times the median. So behave tools, browsers and test suites that an agent waits for.

    task.environment = "benchmarks.sleepy_lake:SLEEPY_LAKE"

How long a step sleeps is a function of its episode's seed and its number: one that is played again waits as long.
"""

from __future__ import annotations

import math
import time

import numpy as np
from pydantic import Field

from schemas.records import Prompt
from stages.rollout.environments import EnvironmentKind, Transition
from stages.rollout.environments.frozen_lake import FrozenLake, FrozenLakeOptions

P99_OVER_MEDIAN = 10.0
SIGMA = math.log(P99_OVER_MEDIAN) / 2.326  # 2.326: the 99th percentile of the standard normal distribution


class SleepyLakeOptions(FrozenLakeOptions):
    """Options of the sleepy lake."""

    median_seconds: float = Field(0.03, gt=0.0, description="median of a step's sleep")


class SleepyLake(FrozenLake):
    """See `Environment`."""

    def __init__(self, options: SleepyLakeOptions):
        super().__init__(options)
        self._median_seconds = options.median_seconds

    def reset(self, prompt: Prompt, seed: int) -> str:
        self._draws = np.random.default_rng(seed)
        return super().reset(prompt, seed)

    def step(self, answer: str) -> Transition:
        time.sleep(sleep_seconds(self._draws, self._median_seconds))
        return super().step(answer)


def sleep_seconds(draws: np.random.Generator, median: float) -> float:
    """How long the next step of an episode sleeps."""
    return median * math.exp(SIGMA * draws.standard_normal())


SLEEPY_LAKE = EnvironmentKind(options_model=SleepyLakeOptions, make=SleepyLake)
