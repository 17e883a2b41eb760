"""The reward that the environment itself gave: the sum of its rewards over the episode."""

from __future__ import annotations

from schemas.records import Rollout


def environment_return(rollout: Rollout) -> tuple[float, dict[str, float]]:
    """The episode's return, and the components "return" and, where the environment says so, "success" (0 or 1).

    Raises:
      KeyError: the rollout has no return: no environment played it.
    """
    total = rollout.environment["return"]
    components = {"return": total}
    if "success" in rollout.environment:
        components["success"] = float(rollout.environment["success"])
    return total, components
