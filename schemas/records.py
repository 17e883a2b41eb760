"""What passes between stages: one frozen record type a stage, so that no stage adds keys to another's bag.

    PromptBatch -> RolloutBatch -> ScoredBatch -> GroupedBatch -> PackedBatch -> ShardManifest -> StepReport

An element of the pipeline is always a whole batch: prompts of one step with all their samples. Axes: T tokens of one
trajectory, G samples of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from schemas.identity import TrajectoryId

StopReason = Literal["terminated", "truncated", "max_turns", "max_tokens", "failed"]
Role = Literal["prompt", "policy", "environment"]


@dataclass(frozen=True)
class Prompt:
    """One prompt of the data set. `payload` is what the environment needs to start an episode (JSON values only)."""

    prompt_id: str
    task: str
    payload: Mapping[str, Any]


@dataclass(frozen=True)
class PromptBatch:
    """The element: prompts of one step, claimed together, to be sampled by one pinned policy version.

    Group g of the batch has group index `first_group_index + g` within the step.
    """

    run_id: str
    step: int
    element_index: int
    policy_version: int
    first_group_index: int
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Turn:
    """Tokens [start, end) of a trajectory, written by `role`.

    `seconds` is what it took (sampling, or the environment).
    """

    role: Role
    start: int
    end: int
    seconds: float


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) were sampled by `policy_version`. Spans cover exactly the tokens where the mask is true."""

    start: int
    end: int
    policy_version: int


@dataclass(frozen=True)
class SamplingRecord:
    """The distribution that tokens were drawn from. top_k 0, top_p 1 and min_p 0 mean: not truncated."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled trajectory, not yet scored. A two-turn episode (P prompt, A answers, E environment text):

        tokens           = P0 + A0 + E1 + A1
        loss_mask        = [False]*len(P0) + [True]*len(A0) + [False]*len(E1) + [True]*len(A1)
        sampler_logprobs = [0.0]*len(P0) + logp(A0) + [0.0]*len(E1) + logp(A1)

    Token ids are exactly those that the sampler emitted and the environment's text was encoded to; they are never
    encoded again from text. A *tombstone* (status "failed") keeps its prompt tokens and counts in its group, but its
    loss_mask is all False, so it trains nothing.
    """

    id: TrajectoryId
    prompt_id: str
    task: str
    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T], True exactly where the policy sampled
    sampler_logprobs: np.ndarray  # float32 [T], nats; 0.0 off the mask
    prompt_length: int  # tokens [0, prompt_length) are the prompt that all samples of the group share
    versions: tuple[VersionSpan, ...]
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    status: Literal["ok", "failed"]
    error: str | None  # one line, only where status is "failed"
    environment: Mapping[str, Any]  # facts for the reward and for the reader (JSON values)
    sampling: SamplingRecord
    generator: str  # which process sampled it
    started_at: float  # seconds since the epoch
    seconds: float


@dataclass(frozen=True)
class Failure:
    """A dead letter: what failed, where, why, and all that is needed to try it again."""

    id: TrajectoryId
    stage: str
    error: str  # one line
    traceback: str
    policy_version: int
    prompt: Prompt
    seed: tuple[int, int]
    attempt_tokens: tuple[int, ...] = ()  # what had been written when it failed


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """All samples of a PromptBatch, tombstones included, in any order; and the failures behind the tombstones."""

    prompts: PromptBatch
    rollouts: tuple[Rollout, ...]
    failures: tuple[Failure, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)  # per activity: "decode", "environment", ...
    counts: Mapping[str, int] = field(default_factory=dict)  # "decode_calls" and "decoded_sessions", summed over them


@dataclass(frozen=True, eq=False)
class ScoredRollout:
    """A rollout with its reward. A tombstone has reward 0.0 and no components."""

    rollout: Rollout
    reward: float
    components: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class ScoredBatch:
    prompts: PromptBatch
    rollouts: tuple[ScoredRollout, ...]
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, eq=False)
class Group:
    """The G samples of one prompt, complete and in order of sample index."""

    group_index: int
    prompt_id: str
    samples: tuple[ScoredRollout, ...]  # [G]


@dataclass(frozen=True, eq=False)
class GroupedBatch:
    """Whole groups, in order of group index."""

    prompts: PromptBatch
    groups: tuple[Group, ...]
    failures: tuple[Failure, ...] = ()
    duplicates: int = 0  # rollouts that came twice and were recognised by identity


@dataclass(frozen=True)
class Placement:
    """Where a trajectory's branch (what follows the prompt) lies in the training rows; row -1: it trains nothing."""

    pack_row: int
    pack_offset: int


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Groups and their packing plan. `placements[g][i]` belongs to `groups[g].samples[i]`.

    A pack row holds branches of one group only; they attend to that group's prompt, which is computed once.
    """

    prompts: PromptBatch
    groups: tuple[Group, ...]
    placements: tuple[tuple[Placement, ...], ...]
    row_tokens: int  # L
    rows: int
    failures: tuple[Failure, ...] = ()
    duplicates: int = 0


@dataclass(frozen=True, eq=False)
class ShardContent:
    """What a shard holds, read back: the trainer's input. Same meaning as in PackedBatch."""

    step: int
    element_index: int
    groups: tuple[Group, ...]
    placements: tuple[tuple[Placement, ...], ...]
    row_tokens: int  # L
    rows: int
    newest_version: int | None = None  # the newest policy when the shard was committed; None where nobody recorded it


def tombstone(rollout: Rollout, error: str) -> Rollout:
    """`rollout`, failed: it keeps its tokens for the reader, counts in its group, and trains nothing."""
    return replace(
        rollout,
        loss_mask=np.zeros_like(rollout.loss_mask),
        sampler_logprobs=np.zeros_like(rollout.sampler_logprobs),
        versions=(),
        status="failed",
        stop_reason="failed",
        error=error,
    )
