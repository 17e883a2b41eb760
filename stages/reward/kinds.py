"""Rewards by the name that a recipe's `task.reward` gives them."""

from __future__ import annotations

from schemas.recipe import Recipe
from stages.options import checked_options
from stages.reward import json_schema, matching, mathematics, python_function, reasoning_gym
from stages.reward.base import RewardFunction, RewardKind, RewardOptions
from stages.reward.environment_return import environment_return

REWARDS: dict[str, RewardKind] = {
    "environment_return": RewardKind(RewardOptions, lambda options, recipe: environment_return),
    "reasoning_gym": RewardKind(reasoning_gym.ReasoningGymRewardOptions, reasoning_gym.make),
    "math": RewardKind(mathematics.MathOptions, mathematics.make),
    "exact": RewardKind(matching.ExactOptions, matching.make_exact),
    "regex": RewardKind(matching.RegexOptions, matching.make_regex),
    "json_schema": RewardKind(json_schema.JsonSchemaOptions, json_schema.make),
    "python": RewardKind(python_function.PythonOptions, python_function.make),
}


def make_reward(recipe: Recipe) -> RewardFunction:
    """The recipe's reward function.

    Raises:
      UserError: options that are none, a package that is not installed, a function that is not there, and the like.
    """
    kind = REWARDS[recipe.task.reward]
    return kind.make(checked_options(kind.options_model, recipe.task.reward_options, "task.reward_options"), recipe)
