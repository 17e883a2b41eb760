"""Small batches that one can hold in the head, for the tests of the stages after the reward."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jax_core import faults
from schemas.identity import TrajectoryId
from schemas.recipe import Recipe
from schemas.records import (
    Failure,
    PackedBatch,
    Prompt,
    PromptBatch,
    Rollout,
    SamplingRecord,
    ScoredBatch,
    ScoredRollout,
    Turn,
    VersionSpan,
    tombstone,
)
from schemas.store import RunStore
from stages.shards import freeze_step, list_manifests, write_shard

RUN = "run-a"
PROMPT_TOKENS = (11, 12, 13)


def prompt_batch(groups: int = 2, *, step: int = 7, element_index: int = 0, first_group_index: int = 0) -> PromptBatch:
    """Every prompt has the same text and id: only the group index tells them apart."""
    prompt = Prompt("lake-1", "frozen_lake", {"map": "SFFG"})
    return PromptBatch(RUN, step, element_index, 5, first_group_index, (prompt,) * groups)


def rollout(
    group_index: int,
    sample_index: int,
    *,
    answer: int = 2,
    tail: int = 0,
    step: int = 7,
    started_at: float = 1000.0,
    prompt: Sequence[int] = PROMPT_TOKENS,
) -> Rollout:
    """P P P A .. A E .. E: `answer` sampled tokens (each tells its sample), then `tail` of the environment's."""
    start, end = len(prompt), len(prompt) + answer
    own = 100 * group_index + 10 * sample_index
    turns = [Turn("prompt", 0, start, 0.0), Turn("policy", start, end, 0.25)]
    if tail:
        turns.append(Turn("environment", end, end + tail, 0.125))
    return Rollout(
        id=TrajectoryId(step, group_index, sample_index),
        prompt_id="lake-1",
        task="frozen_lake",
        tokens=np.array([*prompt, *range(own, own + answer), *[3] * tail], np.int32),
        loss_mask=np.array([False] * start + [True] * answer + [False] * tail),
        sampler_logprobs=np.array([0.0] * start + [-0.5] * answer + [0.0] * tail, np.float32),
        prompt_length=start,
        versions=(VersionSpan(start, end, 5),) if answer else (),
        turns=tuple(turn for turn in turns if turn.end > turn.start),
        stop_reason="terminated",
        status="ok",
        error=None,
        environment={"return": float(sample_index % 2), "success": bool(sample_index % 2)},
        sampling=SamplingRecord(1.0),
        generator="host-1",
        started_at=started_at,
        seconds=0.5,
    )


def scored(rollout: Rollout, reward: float | None = None) -> ScoredRollout:
    if rollout.status == "failed":
        return ScoredRollout(rollout, 0.0, {})
    reward = float(rollout.environment["return"]) if reward is None else reward
    return ScoredRollout(rollout, reward, {"success": reward})


def failed(group_index: int, sample_index: int, **options: int) -> Rollout:
    return replace(tombstone(rollout(group_index, sample_index, **options), "Boom: the environment broke"))


def failure(group_index: int, sample_index: int, *, error: str = "Boom: the environment broke") -> Failure:
    return Failure(
        id=TrajectoryId(7, group_index, sample_index),
        stage="rollout",
        error=error,
        traceback="Traceback ...",
        policy_version=5,
        prompt=Prompt("lake-1", "frozen_lake", {"map": "SFFG", "size": np.int64(2)}),
        seed=(1, 2**32 - 1),
        attempt_tokens=(11, 12, 13, 4),
    )


def scored_batch(groups: int = 2, samples: int = 4, *, started_at: float = 1000.0, **options: int) -> ScoredBatch:
    """Complete groups in order; sample i has i + 1 sampled tokens and reward i % 2."""
    prompts = prompt_batch(groups, **options)
    rollouts = [
        rollout(prompts.first_group_index + g, i, answer=i + 1, step=prompts.step, started_at=started_at)
        for g in range(groups)
        for i in range(samples)
    ]
    return ScoredBatch(prompts, tuple(map(scored, rollouts)))


def recipe(samples: int = 4, row_tokens: int = 8) -> Recipe:
    return Recipe(
        name="test",
        rollout={"samples_per_prompt": samples, "branch_tokens": row_tokens, "prompts_per_step": 2},
        trainer={"row_tokens": row_tokens},
    )


def write_until_killed(crash_at: str, location: str, batch: PackedBatch) -> None:
    """To be run in a process of its own."""
    os.environ[faults.VARIABLE] = crash_at
    write_shard(RunStore.open(location), batch, RUN)


def freeze_until_killed(crash_at: str, location: str, step: int) -> None:
    """To be run in a process of its own."""
    os.environ[faults.VARIABLE] = crash_at
    store = RunStore.open(location)
    freeze_step(store, step, step, list_manifests(store, step))
