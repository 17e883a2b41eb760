"""Environments by the name that a recipe's `task.environment` gives them."""

from stages.rollout.environments import frozen_lake, question, question_baselines
from stages.rollout.environments.base import Demonstration, Environment, EnvironmentKind, ScriptedRule, Transition

ENVIRONMENTS: dict[str, EnvironmentKind] = {
    "frozen_lake": EnvironmentKind(
        options_model=frozen_lake.FrozenLakeOptions,
        make=frozen_lake.make,
        demonstrate=frozen_lake.demonstrate,
        scripted=frozen_lake.scripted_rules,
    ),
    "question": EnvironmentKind(
        options_model=question.QuestionOptions,
        make=question.make,
        scripted=question_baselines.scripted_rules,
    ),
}

__all__ = ["ENVIRONMENTS", "Demonstration", "Environment", "EnvironmentKind", "ScriptedRule", "Transition"]
