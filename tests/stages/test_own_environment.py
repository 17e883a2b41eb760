"""An environment of the user's own, named in the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import UserError
from schemas.recipe import Recipe
from schemas.recipe_io import load_recipe
from stages.reward.self_test import check_task
from stages.rollout.environments import ENVIRONMENTS, environment_kind, environment_options
from tests.stages import environments_of_a_user as user

USER = "tests.stages.environments_of_a_user"


def recipe_of(environment: str, **options: Any) -> Recipe:
    return Recipe.model_validate({"name": "test", "task": {"environment": environment, "options": options}})


def test_an_environment_is_found_by_module_and_name() -> None:
    assert environment_kind(f"{USER}:COUNTDOWN") is user.COUNTDOWN
    assert environment_kind("question") is ENVIRONMENTS["question"]


def test_an_environment_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(Path(user.__file__).read_text())
    kind = environment_kind(f"{tmp_path}/mine.py:COUNTDOWN")
    assert kind.options_model.model_validate({"start": 5}).model_dump() == {"start": 5}
    assert environment_kind(f"{tmp_path}/mine.py:COUNTDOWN") is kind  # loaded once


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (f"{USER}:", "names no environment"),
        ("no_such_module:KIND", r"cannot be loaded \(ModuleNotFoundError"),
        (f"{USER}:ABSENT", r"cannot be loaded \(AttributeError"),
        ("nowhere/mine.py:KIND", r"cannot be loaded \(FileNotFoundError"),
        (f"{USER}:NO_KIND", "is of type type, and no EnvironmentKind"),
    ],
)
def test_what_is_no_environment_is_refused_before_a_run(environment: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_task(recipe_of(environment))


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ("frozen_lake", {"slipery": True}, r"task\.options\.slipery is unknown \(did you mean slippery\?\)"),
        (f"{USER}:COUNTDOWN", {"begin": 3}, r"task\.options\.begin is unknown"),
        (f"{USER}:COUNTDOWN", {"start": 0}, r"task\.options\.start: Input should be greater than or equal to 1"),
    ],
)
def test_options_are_checked_before_a_run_by_the_environments_own_model(
    environment: str, options: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_task(recipe_of(environment, **options))


def test_options_get_their_defaults() -> None:
    assert environment_options(recipe_of(f"{USER}:COUNTDOWN").task) == user.CountdownOptions(start=3)


def test_a_misspelt_environment_of_ours_is_refused_with_the_one_that_was_meant(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('name = "test"\n[task]\nenvironment = "frozenlake"\n')
    with pytest.raises(UserError, match=r"task\.environment: 'frozenlake' is none of .* Did you mean 'frozen_lake'\?"):
        load_recipe(tmp_path / "recipe.toml")
