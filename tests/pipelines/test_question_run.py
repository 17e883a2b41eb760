"""A run on questions from a file: asked, answered, scored, trained on and evaluated by the real stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.evaluate import run_results
from runners import colocated
from schemas.errors import UserError
from schemas.metrics import read_metrics
from schemas.recipe import Recipe
from stages.runtime import Runtime, release


def sums_recipe(folder: Path, **task: Any) -> Recipe:
    """Sums below ten that a few thousand parameters are asked for, as "3+4=" and one digit."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10) if a + b < 10]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Recipe.model_validate(
        {
            "name": "sums",
            "model": {"layers": 1, "width": 16, "heads": 2, "kv_heads": 2, "head_width": 8, "mlp_width": 32},
            "tokenizer": {"alphabet": "0123456789+="},
            "data": {"source": "files", "name": "sums", "options": {"files": [str(folder / "sums.jsonl")]}},
            "task": {"environment": "question", "reward": "exact"} | task,
            "sampling": {"answer_tokens": 2},
            "rollout": {
                "prompts_per_step": 4,
                "samples_per_prompt": 4,
                "prompt_tokens": 4,
                "branch_tokens": 4,
                "cohorts": 1,
            },
            "trainer": {"steps": 2, "micro_batch_rows": 8, "row_tokens": 8, "checkpoint_every": 2},
            "algorithm": {"equal_groups": "train"},
            "evaluation": {"every": 0, "test_prompts": 4, "samples": 2},
        }
    )


def test_a_run_on_questions_goes_from_the_file_to_the_table_of_results(tmp_path: Path) -> None:
    recipe = sums_recipe(tmp_path)
    colocated.run(recipe, tmp_path / "run")
    shared = Runtime(tmp_path / "run", recipe)
    rewards = [event.values for event in read_metrics(shared.store, "reward")]
    assert [values["reward/failed_trajectories"] for values in rewards] == [0, 0]
    assert [values["reward/trajectories"] for values in rewards] == [16, 16]
    results = run_results(shared).results
    labels = [result.label for result in results]
    assert labels[:2] == ["random weights", "after RL (2 steps)"]
    assert labels[2:] == ["always '9', the commonest answer", "the first number + the second, the best shortcut"]
    assert results[-1].total.success == 1.0
    release(tmp_path / "run")


def test_a_reward_that_cannot_work_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    options = {"function": "tests.stages.rewards_of_a_user:never_checks"}
    with pytest.raises(UserError, match="says right, although it is no answer"):
        colocated.run(sums_recipe(tmp_path, reward="python", reward_options=options), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()
