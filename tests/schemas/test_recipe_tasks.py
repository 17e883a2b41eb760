"""Which data, environments and rewards go together in a recipe."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from schemas.recipe import Recipe

QUESTION = {"environment": "question", "reward": "exact"}
GENERATED = {"source": "reasoning_gym", "name": "aiw"}

IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"data": {"source": "reasoning_gym"}}, "Set name to the name of a reasoning-gym data set"),
    ({"data": {"source": "files", "options": {"files": ["a.jsonl"]}}}, "Set name to a name for the files"),
    ({"data": {"source": "files", "name": "mine"}}, "without options.files"),
    ({"data": {"train_split": "test"}}, "'test' is a held-out split too"),
    ({"data": {"validation_split": "train"}}, "'train' is a held-out split too"),
    ({"data": GENERATED | {"test_split": "exam"}}, "splits are train, validation and test"),
    ({"task": {"environment": "question"}}, "would always be 0"),
    ({"task": {"reward": "exact"}}, "gives rewards of its own"),
    ({"task": QUESTION | {"reward": "reasoning_gym"}}, "know only questions of their own generators"),
]


@pytest.mark.parametrize(("sections", "message"), IMPOSSIBLE, ids=[message for _, message in IMPOSSIBLE])
def test_what_does_not_go_together_is_refused_with_the_way_out(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Recipe.model_validate({"name": "test"} | sections)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"data": {"name": "gsm8k", "train_split": "train[10%:]", "validation_split": "train[:10%]"}, "task": QUESTION},
        {"data": GENERATED, "task": QUESTION | {"reward": "reasoning_gym"}},
        {"data": GENERATED, "task": QUESTION | {"reward": "math"}},
        {"data": {"source": "files", "name": "mine", "options": {"files": ["a.jsonl"]}}, "task": QUESTION},
    ],
)
def test_what_goes_together_is_taken(sections: dict[str, Any]) -> None:
    Recipe.model_validate({"name": "test"} | sections)
