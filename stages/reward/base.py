"""What a reward is made of: a function of a finished rollout, and, where answers are scored, of an answer's text.

    rollout -> answer -> extracted answer -> scorer(answer, payload) -> reward, components

The environment `question` leaves in the rollout's facts what scoring needs: "answer" (the text that the policy wrote),
"payload" (the prompt's row) and "stopped" (it ended by a stop token or stop string, and not for want of tokens).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import Field, model_validator

from schemas.errors import UserError
from schemas.recipe import Recipe, Section
from schemas.records import Rollout
from stages.killable import RemoteError
from stages.patterns import compiled, killable_pattern

RewardFunction: TypeAlias = Callable[[Rollout], Any]  # float, or (float, {name: float}); checked by `reward.score`
Scored: TypeAlias = tuple[float, dict[str, float]]
Scorer: TypeAlias = Callable[[str, Mapping[str, Any]], Scored]  # answer, payload -> reward and components

SUCCESS = 0.99  # a score from here on counts as right


class RewardOptions(Section):
    """Options of a reward that takes none."""


class AnswerOptions(Section):
    """Options that all rewards of answers have (`task.reward_options`)."""

    require_stop: bool = Field(
        True, description="an answer that ran out of tokens, instead of ending by itself, has reward 0"
    )
    tag: str = Field("", description="the answer is what the last <tag>...</tag> holds; without one, the reward is 0")
    pattern: str = Field(
        "", description="the answer is the last match of this regular expression: its first group, or all of it"
    )
    answer_key: str = Field("answer", min_length=1, description="where in a prompt's row the known answer is")
    self_test: bool = Field(
        True, description="before a run, known answers must succeed and empty or senseless ones must not"
    )

    @model_validator(mode="after")
    def _one_way_to_extract(self) -> AnswerOptions:
        if self.tag and self.pattern:
            raise ValueError("tag and pattern are two ways to find the answer. Set one of them")
        if self.pattern:
            compiled(self.pattern)
        return self


def right_or_wrong(right: bool) -> Scored:
    return float(right), {"success": float(right)}


@dataclass(frozen=True, eq=False)
class AnswerReward:
    """The reward of a rollout whose environment was `question`.

    Components: those of the scorer ("success" is 0 or 1, and right are scores from `SUCCESS` on), "answered" (there was
    an answer to score) and "stopped".

    Args:
      scorer: scores what was extracted; never called with an empty answer, whose reward is 0.
      options: how the answer is found.
      compares: it compares with the known answer, so every row has to have one.
    """

    scorer: Scorer
    options: AnswerOptions
    compares: bool = False

    def __call__(self, rollout: Rollout) -> Scored:
        facts = rollout.environment
        stopped = bool(facts["stopped"])
        answer = self.extract(str(facts["answer"])) if stopped or not self.options.require_stop else ""
        reward, components = self.score(answer, facts["payload"])
        return reward, {**components, "answered": float(bool(answer)), "stopped": float(stopped)}

    def score(self, answer: str, payload: Mapping[str, Any]) -> Scored:
        """Reward and components of an extracted answer."""
        return self.scorer(answer, payload) if answer else (0.0, {"success": 0.0})

    def extract(self, text: str) -> str:
        """The answer in what the policy wrote, without white space around it; empty if there is none."""
        if self.options.tag:
            return last_tagged(text, self.options.tag)
        if self.options.pattern:
            return last_match(self.options.pattern, text)
        return text.strip()

    def known_answer(self, payload: Mapping[str, Any]) -> str | None:
        """The answer that the data itself gives, if it gives one."""
        known = known_answers(payload, self.options.answer_key)
        return known[0] if known else None


def known_answers(payload: Mapping[str, Any], key: str) -> list[str]:
    """The texts under `key`: one answer, or a list of answers that are all right. Numbers count as texts."""
    value = payload.get(key)
    values = value if isinstance(value, list) else [value]
    return [str(v) for v in values if isinstance(v, str | int | float) and not isinstance(v, bool) and str(v).strip()]


def last_tagged(text: str, tag: str) -> str:
    """What is between the last `<tag>` that is closed and its end.

    >>> last_tagged("<answer>3</answer> or <answer> 4 </answer> <answer>", "answer")
    '4'
    """
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside.strip() if closing and opening else ""


def last_match(pattern: str, text: str) -> str:
    """The last match of `pattern`; empty if there is none, or if it takes too long."""
    try:
        found = killable_pattern()("last", pattern, text)
    except (TimeoutError, RemoteError):
        return ""
    return (found or "").strip()


def without_period(answer: str) -> list[str]:
    """An answer, and where it ends with a period, the answer without it: ways to read it.

    >>> without_period("7."), without_period("7")
    (['7.', '7'], ['7'])
    """
    shorter = answer.rstrip(".").strip()
    return [answer] if shorter in ("", answer) else [answer, shorter]


def need_package(package: str, recipe: Recipe) -> None:
    """Raises a UserError where the package that the recipe's reward needs is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"task.reward={recipe.task.reward!r}", f"needs the package {package}.", "pip install 'rollstream[tasks]'"
        )


def check_limit(seconds_limit: float, recipe: Recipe) -> None:
    """Raises a UserError where a reward's own limit is not below that of all rewards."""
    if seconds_limit >= recipe.task.reward_seconds_limit:
        raise UserError(
            f"task.reward_options.seconds_limit={seconds_limit:g}",
            f"is not below task.reward_seconds_limit={recipe.task.reward_seconds_limit:g}: late answers would "
            "fail their samples, instead of having reward 0.",
            "Lower it, or raise the other.",
        )


@dataclass(frozen=True)
class RewardKind:
    """A reward as recipes name it.

    Args:
      options_model: `task.reward_options`, each with its default and description.
      make: checked options, recipe -> the reward function. Raises UserError where options and recipe do not fit.
    """

    options_model: type[Section]
    make: Callable[[Any, Recipe], RewardFunction]
