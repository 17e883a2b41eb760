"""Recipes of SmolLM2: their tasks, which need no model."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from schemas.recipe import Recipe
from stages.prompts.datasets import open_prompts
from stages.reward.self_test import check_task
from stages.rollout.environments import ENVIRONMENTS

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("smollm2_*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_task_of_a_recipe_works_and_its_held_out_questions_are_never_trained_on(path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    sections = tomllib.loads(path.read_text())
    without_model = {k: v for k, v in sections.items() if k not in ("model", "tokenizer", "chat", "lora")}
    recipe = Recipe.model_validate(without_model)
    assert recipe.name == path.stem
    check_task(recipe)
    asked = {}
    for split in ("train", "validation", "test"):
        data = open_prompts(recipe.data, recipe.task, split)
        asked[split] = {data[i].payload["question"] for i in range(min(3000, len(data)))}
        assert len(data) >= {"train": 20_000, "validation": 100, "test": 200}[split]
    assert not asked["train"] & asked["test"] and not asked["train"] & asked["validation"]
    assert not asked["validation"] & asked["test"] and len(asked["test"]) >= 15
    rules = ENVIRONMENTS["question"].scripted
    assert rules is not None and len(rules(recipe)) == 2
