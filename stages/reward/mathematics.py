"""The reward `math`: math-verify compares expressions by their value, in a process that is killed when late.

Its own time limits are alarm signals, which only a main thread may set, and which cannot stop a multiplication of huge
numbers; they are switched off.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from schemas.recipe import Recipe
from stages.killable import KillableFunction, RemoteError
from stages.reward.base import (
    AnswerOptions,
    AnswerReward,
    Scored,
    check_limit,
    known_answers,
    need_package,
    right_or_wrong,
)

DELIMITER = re.compile(r"\$|\\\(|\\\[|\\boxed")
WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")  # "the answer is", but not \sqrt


class MathOptions(AnswerOptions):
    """Options of the reward `math`."""

    seconds_limit: Annotated[float, Field(gt=0.0)] = Field(
        2.0, description="an answer that takes longer to compare has reward 0"
    )


def make(options: MathOptions, recipe: Recipe) -> AnswerReward:
    """The reward.

    Raises:
      UserError: math-verify is not installed, or its limit is not below that of all rewards.
    """
    need_package("math_verify", recipe)
    check_limit(options.seconds_limit, recipe)
    verify = _verifier(options.seconds_limit)
    verify.start()

    def scorer(answer: str, payload: Mapping[str, Any]) -> Scored:
        known = known_answers(payload, options.answer_key)
        try:
            return right_or_wrong(verify(answer, known))
        except TimeoutError:
            return 0.0, {"success": 0.0, "late": 1.0}
        except RemoteError:  # what a model writes may be anything; that right answers are told is tested before a run
            return 0.0, {"success": 0.0, "unreadable": 1.0}

    return AnswerReward(scorer, options, compares=True)


@functools.cache
def _verifier(seconds_limit: float) -> KillableFunction:
    return KillableFunction("stages.reward.mathematics:verified", seconds_limit, warm_up=["1", ["1"]])


def verified(answer: str, known: list[str]) -> bool:
    """Whether `answer` equals one of `known` as mathematics.

    Text without LaTeX's delimiters is an expression as a whole ("2x + x"), or, if it has words in it, text that some
    expression ends ("the answer is 7").
    """
    from math_verify import parse, verify

    def parsed(text: str) -> list:
        return parse(text, parsing_timeout=None)

    readings = parsed(answer if DELIMITER.search(answer) or WORDS.search(answer) else f"${answer}$")
    golds = (parsed(one if DELIMITER.search(one) else f"${one}$") for one in known)
    return any(gold and readings and verify(gold, readings, timeout_seconds=None) for gold in golds)
