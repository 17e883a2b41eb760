"""What an environment is: it starts an episode from a prompt, answers in text, and says when the episode is over.

Environments know no tokens, policies or threads; the rollout stage encodes their text and drives many at once.
Left out: rendering, observation and action spaces, and rewards in the middle of a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel

from schemas.recipe import Recipe
from schemas.records import Prompt

if TYPE_CHECKING:  # environments are imported where JAX is not
    from jax_core.chat import Said


@dataclass(frozen=True)
class Transition:
    """What one answer led to.

    Args:
      text: what the environment writes next, as text or messages; '' when the episode is over, since nothing follows
        an end.
      reward: reward of this answer alone.
      terminated: the episode reached an end of its own.
      truncated: the episode was cut off by a limit of the environment.
      facts: what is known of the episode so far (JSON values); those of the last transition are kept with the
        trajectory. At least "return" (float), "invalid_answers" and "steps" (int); "success" (bool) if there is one.
    """

    text: Said
    reward: float
    terminated: bool
    truncated: bool
    facts: Mapping[str, Any]

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated


class Environment(Protocol):
    """One episode at a time, driven by one thread at a time. `reset` may be called again for another episode."""

    def reset(self, prompt: Prompt, seed: int) -> Said:
        """Starts an episode and returns the prompt: text, or messages for the model's chat template.

        Equal prompts and seeds and equal answers give equal episodes.

        Raises:
          UserError: the prompt's payload is not what this environment plays.
        """
        ...

    def step(self, answer: str) -> Transition:
        """Takes the policy's answer, any text at all; what cannot be understood is a turn with a consequence.

        Raises:
          RuntimeError: no episode is going on.
        """
        ...

    def close(self) -> None:
        """Frees what the episode held. Safe to call twice."""
        ...


@dataclass(frozen=True)
class Demonstration:
    """The answers of one good episode.

    Args:
      answers: all of them, in order.
      first_taught: answers before this one only lead to where the good ones begin. A policy sees them and what came of
        them, and is not taught to give them.
    """

    answers: tuple[str, ...]
    first_taught: int = 0


@dataclass(frozen=True)
class ScriptedRule:
    """Something simple that plays an environment, to be beaten before a policy can be said to have learned anything.

    Args:
      label: what it is, for the table of results.
      success: prompt -> 1.0 where it succeeds, else 0.0; one episode.
    """

    label: str
    success: Callable[[Prompt], float]


@dataclass(frozen=True)
class EnvironmentKind:
    """An environment as recipes name it.

    The functions take the options as the recipe has them (`task.options`) or as the checked model, and raise
    UserError for options that `options_model` refuses.

    Args:
      options_model: the options, each with its default and description.
      make: options -> an environment, ready for `reset`.
      demonstrate: prompt, options -> one good episode; None if nobody knows one.
      scripted: recipe -> scripted rules, some of them chosen on training prompts; None if there are no such rules.
    """

    options_model: type[BaseModel]
    make: Callable[[Mapping[str, Any] | Any], Environment]
    demonstrate: Callable[[Prompt, Mapping[str, Any] | Any], Demonstration] | None = None
    scripted: Callable[[Recipe], Sequence[ScriptedRule]] | None = None
