"""Pack: a plan that lays the branches of each group into training rows of one fixed length.

A branch is what follows a trajectory's prompt, up to the last token that the policy sampled; what the environment wrote
after that is trained by nobody and takes no room. A row holds branches of one group only, because they share that
group's prompt, which the trainer computes once:

    L = 8       group 0:  row 0  [ a a a a a c c . ]      branches a (5), b (4), c (2), d (4)
                          row 1  [ b b b b d d d d ]

Rows are filled first-fit-decreasing. The plan is a pure function of the branches' lengths and sample indices.

Left out on purpose: moving tokens. The plan travels with the trajectories, and the trainer builds rows from both.
Splitting a branch over two rows, or cutting it: a branch that is too long is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import apache_beam as beam
import numpy as np

from schemas.errors import UserError
from schemas.metrics import MetricsWriter
from schemas.recipe import Recipe
from schemas.records import Group, GroupedBatch, PackedBatch, Placement, Rollout
from schemas.store import RunStore
from stages.counters import count

NOT_PLACED = Placement(-1, -1)


def pack(batch: GroupedBatch, *, row_tokens: int) -> PackedBatch:
    """Places every branch that trains something in exactly one row, without overlap.

    Args:
      batch: whole groups; the samples of a group may be in any order.
      row_tokens: L, tokens of a row.

    Returns:
      The batch with its plan. Rows are numbered from 0 without gaps, in order of the groups; a trajectory that trains
      nothing (a tombstone, or one without a sampled token) is at row -1, offset -1.

    Raises:
      UserError: a branch is longer than a row.
      ValueError: a trajectory has sampled tokens inside its prompt, which no row would hold.
    """
    placements: list[tuple[Placement, ...]] = []
    rows = 0
    for group in batch.groups:
        placed = _place_group(group, row_tokens, first_row=rows)
        placements.append(placed)
        rows = max([rows, *(placement.pack_row + 1 for placement in placed)])
    return PackedBatch(
        batch.prompts, batch.groups, tuple(placements), row_tokens, rows, batch.failures, batch.duplicates
    )


def branch_tokens(rollout: Rollout) -> int:
    """Tokens that a trajectory needs in a row: from the end of its prompt to its last sampled token; 0 if none is."""
    sampled = np.flatnonzero(rollout.loss_mask)
    if rollout.status == "failed" or not len(sampled):
        return 0
    if sampled[0] < rollout.prompt_length:
        raise ValueError(
            f"trajectory {rollout.id.path}: loss_mask is true at token {sampled[0]}, inside the prompt of "
            f"{rollout.prompt_length} tokens"
        )
    return int(sampled[-1]) + 1 - rollout.prompt_length


def _place_group(group: Group, row_tokens: int, first_row: int) -> tuple[Placement, ...]:
    rollouts = [scored.rollout for scored in group.samples]
    lengths = [branch_tokens(rollout) for rollout in rollouts]
    for rollout, length in zip(rollouts, lengths, strict=True):
        _refuse_too_long(rollout, length, row_tokens)
    # Ties go by sample index, so that the order in which samples arrived is not in the plan.
    order = sorted(range(len(rollouts)), key=lambda i: (-lengths[i], rollouts[i].id.sample_index))
    return _first_fit(lengths, order, row_tokens, first_row)


def _first_fit(lengths: Sequence[int], order: Sequence[int], row_tokens: int, first_row: int) -> tuple[Placement, ...]:
    """Each branch, in the given order, goes into the first row that still has room for it."""
    placements = [NOT_PLACED] * len(lengths)
    filled: list[int] = []  # tokens in each row so far
    for branch in order:
        length = lengths[branch]
        if not length:
            continue
        row = next((row for row, used in enumerate(filled) if used + length <= row_tokens), len(filled))
        if row == len(filled):
            filled.append(0)
        placements[branch] = Placement(first_row + row, filled[row])
        filled[row] += length
    return tuple(placements)


def _refuse_too_long(rollout: Rollout, length: int, row_tokens: int) -> None:
    if length > row_tokens:
        raise UserError(
            f"trajectory {rollout.id.path}",
            f"has a branch of {length} tokens, and a training row holds {row_tokens}.",
            "Raise trainer.row_tokens, or lower rollout.branch_tokens.",
        )


def measure_packing(batch: PackedBatch) -> dict[str, float]:
    """The stage's metrics, without its time. `pack/tokens` are those in rows, environment text between turns too."""
    lengths = [branch_tokens(scored.rollout) for group in batch.groups for scored in group.samples]
    tokens = sum(lengths)
    return {
        "pack/trajectories": len(lengths),
        "pack/rows": batch.rows,
        "pack/tokens": tokens,
        "pack/filled/fraction": tokens / max(1, batch.rows * batch.row_tokens),
        "pack/unplaced_trajectories": lengths.count(0),
    }


@dataclass
class Pack(beam.PTransform):
    """GroupedBatch -> PackedBatch, one to one; see `pack`.

    Args:
      recipe: the run's recipe.
      run: location of the run directory, where metrics go.
    """

    recipe: Recipe
    run: str

    def expand(self, batches: beam.PCollection[GroupedBatch]) -> beam.PCollection[PackedBatch]:
        do = beam.ParDo(_PackFn(self.recipe.trainer.row_tokens, self.run))
        return batches | "Pack" >> do.with_output_types(PackedBatch)


class _PackFn(beam.DoFn):
    def __init__(self, row_tokens: int, run: str):
        self._row_tokens = row_tokens
        self._run = run

    def setup(self) -> None:
        self._metrics = MetricsWriter(RunStore.open(self._run), "pack")

    def process(self, batch: GroupedBatch) -> Iterator[PackedBatch]:
        started = time.perf_counter()
        packed = pack(batch, row_tokens=self._row_tokens)
        seconds = time.perf_counter() - started
        measured = measure_packing(packed)
        self._metrics.write(
            batch.prompts.step, {**measured, "pack/seconds": seconds}, element=batch.prompts.element_index
        )
        count(Pack, "in-groups", len(batch.groups))
        count(Pack, "out-rows", packed.rows)
        count(Pack, "out-tokens", int(measured["pack/tokens"]))
        count(Pack, "unplaced-trajectories", int(measured["pack/unplaced_trajectories"]))
        yield packed
