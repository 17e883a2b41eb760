"""From shards to training arrays: pack rows, their prompts, and micro-batches of one fixed shape.

Everything that decides *what* is trained happens here, on the host, in numpy: advantages, weights, which groups are
left out. What remains for the accelerator is the same compiled function for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from schemas.records import Group, Placement, Rollout, ShardContent

Array = TypeVar("Array")  # np.ndarray here, jax.Array inside a compiled function


@dataclass(frozen=True, eq=False)
class Branch:
    """What one trajectory adds to training, before it is laid into a row. n = tokens up to the last trained one."""

    inputs: np.ndarray  # int32 [n], the last prompt token and then all but the last branch token
    targets: np.ndarray  # int32 [n], the branch's tokens
    mask: np.ndarray  # bool [n], True where the target was sampled by the policy
    sampler_logprobs: np.ndarray  # float32 [n], 0.0 off the mask
    first_position: int  # position of inputs[0] in the trajectory
    advantage: float
    weight: float  # of each trained token in the step's loss


@dataclass(frozen=True, eq=False)
class Row:
    """Branches of one prompt that share a training row, each with its offset."""

    prompt: np.ndarray  # int32 [t], whole
    branches: tuple[tuple[int, Branch], ...]


class MicroBatch(NamedTuple, Generic[Array]):
    """One compiled call's input. B rows of L tokens, P prompts of Tp tokens; unused rows and prompts are padding."""

    prompts: Array  # int32 [P, Tp], without their last tokens
    prompt_lengths: Array  # int32 [P]
    row_prompt: Array  # int32 [B]
    inputs: Array  # int32 [B, L]
    targets: Array  # int32 [B, L]
    segments: Array  # int32 [B, L], 0 is padding, then 1, 2, ... for the branches of the row
    positions: Array  # int32 [B, L]
    mask: Array  # bool [B, L]
    sampler_logprobs: Array  # float32 [B, L], 0.0 off the mask
    advantages: Array  # float32 [B, L], 0.0 off the mask
    weights: Array  # float32 [B, L], 0.0 off the mask


def trained_tokens(rollout: Rollout) -> int:
    return int(rollout.loss_mask.sum())


def make_branch(rollout: Rollout, advantage: float, weight: float) -> Branch:
    """The part of a rollout that training computes: nothing behind its last sampled token."""
    p = rollout.prompt_length
    end = int(np.flatnonzero(rollout.loss_mask)[-1]) + 1
    return Branch(
        inputs=rollout.tokens[p - 1 : end - 1],
        targets=rollout.tokens[p:end],
        mask=rollout.loss_mask[p:end],
        sampler_logprobs=rollout.sampler_logprobs[p:end],
        first_position=p - 1,
        advantage=advantage,
        weight=weight,
    )


def group_rows(group: Group, placements: Sequence[Placement], advantages: np.ndarray, weights: np.ndarray) -> list[Row]:
    """The rows of one group as its packing plan lays them. advantages, weights: [G], one a sample."""
    laid: dict[int, list[tuple[int, Branch]]] = {}
    for scored, place, advantage, weight in zip(group.samples, placements, advantages, weights, strict=True):
        if place.pack_row >= 0:
            branch = make_branch(scored.rollout, float(advantage), float(weight))
            laid.setdefault(place.pack_row, []).append((place.pack_offset, branch))
    if not laid:
        return []
    prompt = next(s.rollout.tokens[: s.rollout.prompt_length] for s in group.samples if trained_tokens(s.rollout))
    return [Row(prompt, tuple(branches)) for _, branches in sorted(laid.items())]


def all_groups(contents: Sequence[ShardContent]) -> Iterator[tuple[Group, tuple[Placement, ...]]]:
    """Every group of a step with its plan, in order of elements and groups, however the shards arrived."""
    for content in sorted(contents, key=lambda c: c.element_index):
        yield from zip(content.groups, content.placements, strict=True)


def micro_batches(
    rows: Sequence[Row], *, rows_each: int, prompts_each: int, row_tokens: int, prompt_tokens: int
) -> Iterator[MicroBatch[np.ndarray]]:
    """Rows in order, at most `rows_each` rows and `prompts_each` prompts a micro-batch (a prompt once each).

    All are of one length: `row_tokens`, halved as often as the longest row still fits. A policy that has learned to be
    brief is not computed in rows that are mostly padding, and at most a handful of shapes is ever compiled.
    """
    row_tokens = _halved(row_tokens, max((_length(row) for row in rows), default=row_tokens))
    shape = {"rows": rows_each, "prompts": prompts_each, "row_tokens": row_tokens, "prompt_tokens": prompt_tokens}
    batch: list[Row] = []
    prompts: list[bytes] = []
    for row in rows:
        is_new = row.prompt.tobytes() not in prompts
        if len(batch) == rows_each or (is_new and len(prompts) == prompts_each):
            yield lay_rows(batch, **shape)
            batch, prompts, is_new = [], [], True
        if is_new:
            prompts.append(row.prompt.tobytes())
        batch.append(row)
    if batch:
        yield lay_rows(batch, **shape)


def _length(row: Row) -> int:
    return max(offset + len(branch.inputs) for offset, branch in row.branches)


def _halved(size: int, needed: int) -> int:
    """
    >>> _halved(48, 25), _halved(48, 24), _halved(48, 3)
    (48, 24, 3)
    """
    while size % 2 == 0 and size // 2 >= needed:
        size //= 2
    return size


def lay_rows(
    given: Sequence[Row], *, rows: int, prompts: int, row_tokens: int, prompt_tokens: int
) -> MicroBatch[np.ndarray]:
    """`given` as arrays of a fixed shape (B = rows, P = prompts, L = row_tokens), the rest padding."""
    b, p, length = rows, prompts, row_tokens
    out = MicroBatch(
        prompts=np.zeros((p, prompt_tokens - 1), np.int32),
        prompt_lengths=np.zeros(p, np.int32),
        row_prompt=np.zeros(b, np.int32),
        inputs=np.zeros((b, length), np.int32),
        targets=np.zeros((b, length), np.int32),
        segments=np.zeros((b, length), np.int32),
        positions=np.zeros((b, length), np.int32),
        mask=np.zeros((b, length), bool),
        sampler_logprobs=np.zeros((b, length), np.float32),
        advantages=np.zeros((b, length), np.float32),
        weights=np.zeros((b, length), np.float32),
    )
    index_of: dict[bytes, int] = {}
    for i, row in enumerate(given):
        index = index_of.setdefault(row.prompt.tobytes(), len(index_of))
        out.row_prompt[i] = index
        out.prompts[index, : len(row.prompt) - 1] = row.prompt[:-1]
        out.prompt_lengths[index] = len(row.prompt) - 1
        for segment, (offset, branch) in enumerate(row.branches, start=1):
            _lay(out, i, offset, segment, branch)
    return out


def _lay(out: MicroBatch[np.ndarray], row: int, offset: int, segment: int, branch: Branch) -> None:
    n = len(branch.inputs)
    at = (row, slice(offset, offset + n))
    if offset + n > out.inputs.shape[1]:
        raise ValueError(f"a branch of {n} tokens at offset {offset} leaves a row of {out.inputs.shape[1]}")
    if out.segments[at].any():
        raise ValueError(f"two branches overlap in a pack row at offset {offset}: the packing plan is wrong")
    out.inputs[at] = branch.inputs
    out.targets[at] = branch.targets
    out.segments[at] = segment
    out.positions[at] = branch.first_position + np.arange(n)
    out.mask[at] = branch.mask
    out.sampler_logprobs[at] = np.where(branch.mask, branch.sampler_logprobs, 0.0)
    out.advantages[at] = np.where(branch.mask, branch.advantage, 0.0)
    out.weights[at] = np.where(branch.mask, branch.weight, 0.0)
