"""The reward `python`: a function of the user's own, named in the recipe.

    task.reward_options.function = "my_package.rewards:length"     # or "rewards.py:length", a file

    def length(answer: str, row: Mapping[str, Any]) -> float | tuple[float, dict[str, float]]: ...

`answer` is what was extracted from the policy's text, never empty; `row` is the prompt's row of the data. The function
runs in a thread: it must not hang, and code that a model wrote belongs into a sandbox. A reward from 0.99 on counts as
success, unless the function returns a component "success".
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from schemas.errors import UserError
from schemas.recipe import Recipe
from stages.named import load_named
from stages.reward.base import SUCCESS, AnswerOptions, AnswerReward, Scored

Function = Callable[[str, Mapping[str, Any]], Any]
WAY_OUT = 'Write "module:function" or "path.py:function" of a function of (answer, row).'


class PythonOptions(AnswerOptions):
    """Options of the reward `python`."""

    function: str = Field(description='"module:function" or "path.py:function"')


def make(options: PythonOptions, recipe: Recipe) -> AnswerReward:
    """The reward.

    Raises:
      UserError: there is no such function, or it does not take (answer, row).
    """
    return AnswerReward(_Scorer(load_function(options.function)), options)


@dataclass(frozen=True)
class _Scorer:
    function: Function

    def __call__(self, answer: str, payload: Mapping[str, Any]) -> Scored:
        returned = self.function(answer, payload)
        reward, components = returned if isinstance(returned, tuple) else (returned, {})
        return reward, {"success": float(reward >= SUCCESS), **components}


@functools.cache
def load_function(named: str) -> Function:
    """The function called `named`.

    Raises:
      UserError: see `make`.
    """
    function = load_named(named, "task.reward_options.function", WAY_OUT)
    try:
        inspect.signature(function).bind("answer", {})
    except (TypeError, ValueError) as error:
        raise UserError(f"task.reward_options.function={named!r}", f"cannot be called ({error}).", WAY_OUT) from None
    return function
