"""Rewards by comparison: `exact` with the known answer, `regex` with an expression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from schemas.recipe import Recipe
from stages.killable import RemoteError
from stages.patterns import compiled, killable_pattern
from stages.reward.base import AnswerOptions, AnswerReward, Scored, known_answers, right_or_wrong, without_period


class ExactOptions(AnswerOptions):
    """Options of the reward `exact`."""

    ignore_case: bool = Field(False, description="'Paris' and 'paris' are the same answer")


def make_exact(options: ExactOptions, recipe: Recipe) -> AnswerReward:
    def scorer(answer: str, payload: Mapping[str, Any]) -> Scored:
        known = known_answers(payload, options.answer_key)
        return right_or_wrong(is_same(answer, known, ignore_case=options.ignore_case))

    return AnswerReward(scorer, options, compares=True)


def is_same(answer: str, known: list[str], *, ignore_case: bool = False) -> bool:
    """Whether the answer is one of the known ones, but for white space and a period at its end.

    >>> is_same("New  York.", ["New York"]), is_same("york", ["York"])
    (True, False)
    """
    normal = (lambda text: " ".join(text.split()).casefold()) if ignore_case else (lambda text: " ".join(text.split()))
    return bool({normal(reading) for reading in without_period(answer)} & {normal(one) for one in known})


class RegexOptions(AnswerOptions):
    """Options of the reward `regex`."""

    expression: str = Field("", description="what a right answer matches")
    expression_key: str = Field("", description="or: where in a prompt's row its own expression is")
    where: Literal["full", "first"] = Field("full", description="all of the answer must match, or some place in it")

    @model_validator(mode="after")
    def _one_expression(self) -> RegexOptions:
        if bool(self.expression) == bool(self.expression_key):
            raise ValueError("set either expression or expression_key")
        compiled(self.expression)
        return self


def make_regex(options: RegexOptions, recipe: Recipe) -> AnswerReward:
    matches = killable_pattern()

    def scorer(answer: str, payload: Mapping[str, Any]) -> Scored:
        expression = options.expression or str(payload[options.expression_key])
        try:
            return right_or_wrong(matches(options.where, compiled(expression).pattern, answer) is not None)
        except (TimeoutError, RemoteError):  # an expression that takes years on this text; the run goes on
            return 0.0, {"success": 0.0, "late": 1.0}

    return AnswerReward(scorer, options)
