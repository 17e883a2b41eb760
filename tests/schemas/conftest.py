"""A small element that uses all of the schema: two groups of two, two turns, two policy versions, a tombstone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from schemas.identity import TrajectoryId
from schemas.records import (
    Group,
    PackedBatch,
    Placement,
    Prompt,
    PromptBatch,
    Rollout,
    SamplingRecord,
    ScoredRollout,
    Turn,
    VersionSpan,
    tombstone,
)


def make_rollout(group: int, sample: int, **changes: Any) -> Rollout:
    """An episode of two answers; its branch is the 5 tokens after the prompt.

    position            0   1   2   3   4   5   6
    who                 P   P   A0  A0  E1  A1  A1
    sampled by version  .   .   6   6   .   6   7
    """
    fields: dict[str, Any] = {
        "id": TrajectoryId(7, group, sample),
        "prompt_id": f"prompt-{group}",
        "task": "frozen_lake",
        "tokens": np.array([10 + group, 11, 20 + sample, 21, 30, 22, 1], np.int32),
        "loss_mask": np.array([False, False, True, True, False, True, True]),
        "sampler_logprobs": np.array([0, 0, -0.5, -1.25, 0, -0.125 * (sample + 1), 0], np.float32),
        "prompt_length": 2,
        "versions": (VersionSpan(2, 4, 6), VersionSpan(5, 6, 6), VersionSpan(6, 7, 7)),
        "turns": (
            Turn("prompt", 0, 2, 0.0),
            Turn("policy", 2, 4, 0.25),
            Turn("environment", 4, 5, 0.5),
            Turn("policy", 5, 7, 0.125),
        ),
        "stop_reason": "terminated",
        "status": "ok",
        "error": None,
        "environment": {"return": 1.0, "success": True, "steps": 2, "path": ["D", "R"]},
        "sampling": SamplingRecord(temperature=0.7),
        "generator": "host-0",
        "started_at": 1_700_000_000.5,
        "seconds": 0.875,
    }
    return Rollout(**{**fields, **changes})


def make_packed(**changes: Any) -> PackedBatch:
    failed = tombstone(make_rollout(4, 1), "EnvironmentError: the lake froze over")
    groups = (
        Group(
            3,
            "prompt-3",
            (
                ScoredRollout(make_rollout(3, 0), 1.0, {"success": 1.0, "format": 0.0}),
                ScoredRollout(make_rollout(3, 1), 0.0, {"success": 0.0, "format": 0.0}),
            ),
        ),
        Group(4, "prompt-4", (ScoredRollout(make_rollout(4, 0), 0.5, {}), ScoredRollout(failed, 0.0, {}))),
    )
    fields: dict[str, Any] = {
        "prompts": PromptBatch(
            "run-a", 7, 1, 6, 3, tuple(Prompt(f"prompt-{group}", "frozen_lake", {"map": "SG"}) for group in (3, 4))
        ),
        "groups": groups,
        "placements": ((Placement(0, 0), Placement(0, 5)), (Placement(1, 0), Placement(-1, -1))),
        "row_tokens": 12,
        "rows": 2,
    }
    return PackedBatch(**{**fields, **changes})


@pytest.fixture
def packed() -> PackedBatch:
    return make_packed()


@pytest.fixture
def packed_of() -> Callable[..., PackedBatch]:
    """Makes the element with the first sample of its first group changed."""

    def make(reward: float = 1.0, components: dict[str, float] | None = None, **changes: Any) -> PackedBatch:
        scored = {"success": 1.0, "format": 0.0} if components is None else components
        whole = make_packed()
        first, second = whole.groups
        changed = ScoredRollout(make_rollout(3, 0, **changes), reward, scored)
        return make_packed(groups=(Group(3, "prompt-3", (changed, first.samples[1])), second))

    return make
