"""Runs that take a second: real stages, a model of a few thousand parameters, lakes of 2 x 2.

The parts that compile (engine, trainer) hold no state, so all runs of a test process share them.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from jax_core import faults
from jax_core.sampling.engine import Engine
from jax_core.trainer import Trainer
from pipelines.online import sample_shards
from schemas import run_layout
from schemas.recipe import Recipe
from schemas.store import RunStore
from stages.prompts.datasets import DATA_VARIABLE, PromptData
from stages.rollout.environments import frozen_lake
from stages.runtime import Runtime, release, runtime
from stages.shards import frozen_step, list_manifests
from stages.warm_start import warm_start

STEPS = 4
ELEMENTS = 2  # elements of a step
LARGEST_LAKE = 3
ALPHABET = frozen_lake.SIGNS + frozen_lake.NAMES[: LARGEST_LAKE**2] + frozen_lake.HOLES[: LARGEST_LAKE**2]


def tiny_recipe(**sections: dict[str, Any]) -> Recipe:
    """4 prompts x 4 samples, 4 steps, with `sections` laid over: tiny_recipe(rollout={"max_lag": 1})."""
    settings: dict[str, dict[str, Any]] = {
        # So few tokens that random weights make moves, and a reward for falling too: every step has something to learn.
        "tokenizer": {"alphabet": ALPHABET},
        "task": {"options": {"names_grid": LARGEST_LAKE, "hole_reward": -1.0}},
        "model": {"layers": 2, "width": 16, "heads": 2, "kv_heads": 2, "head_width": 8, "mlp_width": 32},
        "data": {
            "options": {
                "train_maps": 40,
                "train_sizes": {2: 1.0},
                "validation_maps": {3: 4},
                "test_maps": {3: 4},
            }
        },
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "elements_per_step": ELEMENTS,
            "prompt_tokens": 16,
            "branch_tokens": 24,
            "cohorts": 1,
            "max_turns": 8,
        },
        "trainer": {
            "steps": STEPS,
            "micro_batch_rows": 8,
            "row_tokens": 24,
            "checkpoint_every": 2,
            "keep_policies": 2,
            "optimizer": {"schedule": "constant", "learning_rate": 1e-2},
        },
        "algorithm": {"equal_groups": "train"},
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    return Recipe.model_validate({"name": "tiny", "seed": 1} | settings)


@dataclass(frozen=True)
class Parts:
    engine: Engine
    trainer: Trainer
    prompts: PromptData
    folder: tempfile.TemporaryDirectory[str]  # of the prompts' files; removed at the end of the process


@functools.cache
def _parts() -> Parts:
    folder = tempfile.TemporaryDirectory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DATA_VARIABLE, folder.name)
        shared = Runtime("unused", tiny_recipe())
        return Parts(shared.engine, shared.trainer, shared.prompts, folder)


def share_parts(monkeypatch: pytest.MonkeyPatch, *, trainer: bool = True) -> None:
    """Gives every Runtime the same compiled parts: they depend on none of what tests change in the recipe.

    Args:
      trainer: False for a recipe whose trainer is another one.
    """
    parts = _parts()
    monkeypatch.setattr(Runtime, "engine", parts.engine)
    monkeypatch.setattr(Runtime, "prompts", parts.prompts)
    if trainer:
        monkeypatch.setattr(Runtime, "trainer", parts.trainer)


@dataclass(frozen=True)
class Outcome:
    """What a run has to be equal in: weights of all versions, contents of all shards, and what each step trained on."""

    policies: tuple[str, ...]
    shards: tuple[str, ...]
    steps: tuple[tuple[str, ...], ...]


def outcome(run: Path | str) -> Outcome:
    shared = Runtime(run, tiny_recipe())
    newest = shared.policies.latest()
    assert newest is not None
    lists = [frozen_step(shared.store, step) for step in range(newest)]
    return Outcome(
        tuple(shared.policies.commit(version).digest for version in range(newest + 1)),
        tuple(manifest.content_sha256 for manifest in list_manifests(shared.store)),
        tuple(tuple(ref.content_sha256 for ref in frozen.shards) for frozen in lists if frozen is not None),
    )


def quarantined(run: Path | str) -> list[str]:
    return RunStore.open(run).list("quarantine")


def begin(run: Path | str, recipe: Recipe) -> Runtime:
    """A fresh Runtime of a run that has policy version 0."""
    release(run)
    shared = runtime(run, recipe)
    warm_start(shared, shared.warm_start_report)
    return shared


def sample_everything(run: Path | str, recipe: Recipe) -> None:
    """Samples, without a trainer in this thread, until the source has nothing left."""
    pipeline = beam.Pipeline(runner=FnApiRunner())
    _ = sample_shards(pipeline, recipe, str(run))
    pipeline.run().wait_until_finish()


def copied(run: Path, to: Path) -> Path:
    return Path(shutil.copytree(run, to))


def untrained(run: Path) -> Path:
    """Takes back all training of a run, and leaves what it has sampled."""
    for folder in ("steps", "trainer", *(run_layout.policy(version) for version in range(1, STEPS + 1))):
        shutil.rmtree(run / folder, ignore_errors=True)
    return run


class Killed(BaseException):
    """Stands for SIGKILL inside this process: nothing catches it."""


def kill_at(monkeypatch: pytest.MonkeyPatch, point: str, passing: int) -> Callable[[], None]:
    """Makes the `passing`-th passing of a crash point raise Killed; returns what disarms it."""

    def kill(pid: int, signal: int) -> None:
        raise Killed(point)

    faults._passings.clear()
    monkeypatch.setattr(faults.os, "kill", kill)
    monkeypatch.setenv(faults.VARIABLE, f"{point}:{passing}")
    return lambda: monkeypatch.delenv(faults.VARIABLE)
