"""One question, one answer: shows what a prompt's row asks, takes one answer, and ends.

    prompt Lea has 3 brothers and 2 sisters. How many ...    answer 3    (the end)

The row's `messages` are shown as they are, else the text of `question` or `prompt`. Whether the answer is right is the
reward's business: what that needs is left in the facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import Field, field_validator

from schemas.errors import UserError
from schemas.recipe import Section
from schemas.records import Prompt
from stages.options import checked_options
from stages.rollout.environments.base import Transition

if TYPE_CHECKING:  # environments are imported where JAX is not
    from jax_core.chat import Said

PLACE = "{question}"


class QuestionOptions(Section):
    """Options of the question environment."""

    template: str = Field(PLACE, description="what is shown of a text question, {question} being its place")

    @field_validator("template")
    @classmethod
    def _has_a_place(cls, template: str) -> str:
        if PLACE not in template:
            raise ValueError(f"{template!r} has no {PLACE}, so every prompt would be the same")
        return template


RawOptions: TypeAlias = Mapping[str, Any] | QuestionOptions


def make(options: RawOptions) -> Question:
    """An environment with `options` (as written in a recipe, or checked)."""
    return Question(checked_options(QuestionOptions, options, "task.options"))


class Question:
    """One question. See `Environment`.

    Facts: "answer" (the text, as the policy wrote it), "payload" (the prompt's row), "return" (0.0: the reward stage
    scores), "steps", "invalid_answers".
    """

    def __init__(self, options: QuestionOptions):
        self._options = options
        self._payload: Mapping[str, Any] | None = None

    def reset(self, prompt: Prompt, seed: int) -> Said:
        self._payload = prompt.payload
        asked = asked_in(prompt)
        return self._options.template.replace(PLACE, asked) if isinstance(asked, str) else asked

    def step(self, answer: str) -> Transition:
        if self._payload is None:
            raise RuntimeError("step() without an episode: call reset() first, and again after an episode's end.")
        facts = {"return": 0.0, "steps": 1, "invalid_answers": 0, "answer": answer, "payload": self._payload}
        self._payload = None
        return Transition("", 0.0, terminated=True, truncated=False, facts=facts)

    def close(self) -> None:
        self._payload = None


def asked_in(prompt: Prompt) -> Said:
    """What a prompt asks: messages, or a text.

    Raises:
      UserError: it asks nothing, or its messages end with an answer.
    """
    messages = prompt.payload.get("messages")
    if isinstance(messages, list) and messages:
        if messages[-1].get("role") == "assistant":
            raise UserError(
                f"prompt {prompt.prompt_id}",
                "its messages end with an assistant's, so there is nothing to answer.",
                "Leave the last message out, and put its text into a column 'answer'.",
            )
        return messages
    for name in ("question", "prompt"):
        text = prompt.payload.get(name)
        if isinstance(text, str) and text:
            return text
    raise UserError(
        f"prompt {prompt.prompt_id}",
        f"has no 'messages', 'question' or 'prompt'; it has {', '.join(prompt.payload) or 'nothing'}.",
        "Choose a data set that asks something, or another task.environment.",
    )
