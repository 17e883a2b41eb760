"""An environment as a user might write it, found by its name; and what is none."""

from __future__ import annotations

from pydantic import Field

from schemas.recipe import Section
from schemas.records import Prompt
from stages.rollout.environments import EnvironmentKind, Transition


class CountdownOptions(Section):
    """Options of the countdown."""

    start: int = Field(3, ge=1, description="turns of an episode")


class Countdown:
    """Says how many answers are still to come, and pays for each that is the letter of a move."""

    def __init__(self, options: CountdownOptions):
        self._start = options.start

    def reset(self, prompt: Prompt, seed: int) -> str:
        self._left, self._return = self._start, 0.0
        return "abc"[: min(3, self._left)]

    def step(self, answer: str) -> Transition:
        reward = float(answer in "LDRU")
        self._left -= 1
        self._return += reward
        facts = {"return": self._return, "invalid_answers": 0, "steps": self._start - self._left}
        return Transition("a" if self._left else "", reward, self._left == 0, False, facts)

    def close(self) -> None:
        pass


COUNTDOWN = EnvironmentKind(options_model=CountdownOptions, make=lambda options: Countdown(options))
NO_KIND = Countdown
