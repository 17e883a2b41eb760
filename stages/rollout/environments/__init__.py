"""Environments by the name that a recipe's `task.environment` gives them."""

from stages.rollout.environments import frozen_lake
from stages.rollout.environments.base import Environment, EnvironmentKind, Transition

ENVIRONMENTS: dict[str, EnvironmentKind] = {
    "frozen_lake": EnvironmentKind(
        options_model=frozen_lake.FrozenLakeOptions,
        make=frozen_lake.make,
        demonstrate=frozen_lake.demonstrate,
        scripted=frozen_lake.scripted_success,
    ),
}

__all__ = ["ENVIRONMENTS", "Environment", "EnvironmentKind", "Transition"]
