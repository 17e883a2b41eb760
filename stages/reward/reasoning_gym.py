"""The reward `reasoning_gym`: the data set's own scorer, in a process that is killed when late.

Some scorers hand the answer to Python or to SymPy to evaluate: text that a model wrote can then take for ever, or do
worse. A process of its own bounds time and memory; it is no sandbox.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from schemas.recipe import Recipe
from stages.killable import KillableFunction, RemoteError
from stages.options import checked_options
from stages.prompts.reasoning_gym import KNOWN_ANSWERS, ReasoningGymOptions, entry_of, open_generator
from stages.reward.base import SUCCESS, AnswerOptions, AnswerReward, Scored, check_limit, without_period


class ReasoningGymRewardOptions(AnswerOptions):
    """Options of the reward `reasoning_gym`."""

    seconds_limit: Annotated[float, Field(gt=0.0)] = Field(
        5.0, description="an answer that takes longer to score has reward 0"
    )


class ReasoningGymReward(AnswerReward):
    """As `AnswerReward`; some data sets keep their known answer among an entry's metadata."""

    def known_answer(self, payload: Mapping[str, Any]) -> str | None:
        places = [payload.get("answer"), *(payload.get("metadata", {}).get(name) for name in KNOWN_ANSWERS)]
        return next((place for place in places if isinstance(place, str) and place), None)


def make(options: ReasoningGymRewardOptions, recipe: Recipe) -> ReasoningGymReward:
    """The reward, with its data set's name and configuration from the recipe's data section.

    Raises:
      UserError: reasoning-gym is not installed, its options are wrong, or its limit is not below that of all rewards.
    """
    check_limit(options.seconds_limit, recipe)
    config = checked_options(ReasoningGymOptions, recipe.data.options, "data.options").config
    open_generator(recipe.data.name, config, seed=0, size=1)  # says here what is wrong with them
    score, written = _scorer(options.seconds_limit), json.dumps(config)
    score.start()

    def scorer(answer: str, payload: Mapping[str, Any]) -> Scored:
        entry = {"question": payload["question"], "answer": payload["answer"], "metadata": payload["metadata"]}
        try:
            best = max(score(recipe.data.name, written, reading, entry) for reading in without_period(answer))
        except TimeoutError:
            return 0.0, {"success": 0.0, "late": 1.0}
        except RemoteError:  # scorers raise on text that they cannot read; right answers are tested before a run
            return 0.0, {"success": 0.0, "unreadable": 1.0}
        return best, {"success": float(best >= SUCCESS)}

    return ReasoningGymReward(scorer, options)


@functools.cache
def _scorer(seconds_limit: float) -> KillableFunction:
    importing = ["", "{}", "", {}]  # there is no such data set, but looking for it imports all of them
    return KillableFunction("stages.reward.reasoning_gym:score_answer", seconds_limit, warm_up=importing)


def score_answer(name: str, config: str, answer: str, entry: dict[str, Any]) -> float:
    """What the data set `name` with `config` (JSON) gives `answer`. Runs in the other process."""
    return float(_generator(name, config).score_answer(answer, entry_of(entry)))


@functools.lru_cache(maxsize=8)
def _generator(name: str, config: str) -> Any:
    return open_generator(name, json.loads(config), seed=0, size=1)
