"""Environments by the name that a recipe's `task.environment` gives them: ours, and the user's own."""

from typing import Any

from schemas.errors import UserError
from schemas.recipe import TaskSection
from stages.named import load_named
from stages.options import checked_options
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

WAY_OUT = 'Write "module:name" or "path.py:name" of an EnvironmentKind (stages.rollout.environments).'


def environment_kind(named: str) -> EnvironmentKind:
    """The environment that a recipe calls `named`: one of ours, or "module:name" or "path.py:name" of the user's own.

    Raises:
      UserError: it cannot be loaded, or is no EnvironmentKind.
    """
    if named in ENVIRONMENTS:
        return ENVIRONMENTS[named]
    kind = load_named(named, "task.environment", WAY_OUT)
    if not isinstance(kind, EnvironmentKind):
        is_a = f"is of type {type(kind).__name__}, and no EnvironmentKind."
        raise UserError(f"task.environment={named!r}", is_a, WAY_OUT)
    return kind


def environment_options(task: TaskSection) -> Any:
    """`task.options`, checked by the model of the environment that they are for.

    Raises:
      UserError: see `environment_kind`; or there are unknown options or wrong values.
    """
    return checked_options(environment_kind(task.environment).options_model, task.options, "task.options")


__all__ = [
    "ENVIRONMENTS",
    "Demonstration",
    "Environment",
    "EnvironmentKind",
    "ScriptedRule",
    "Transition",
    "environment_kind",
    "environment_options",
]
