"""Group: an element's scored trajectories become whole groups, in order.

A group is known by its group index within the step, never by its prompt's text: the same prompt twice in a step is two
groups. A trajectory that came twice is recognised by its identity and counted; one that never came is completed by a
tombstone, so that every group that leaves here has exactly G samples.

Left out on purpose: state across elements. An element carries its groups whole, so nothing has to be waited for. And
dead letters for samples that never came: the stage that lost one knows why, this one only knows that it is gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import apache_beam as beam
import numpy as np

from schemas.identity import TrajectoryId
from schemas.metrics import MetricsWriter
from schemas.recipe import Recipe
from schemas.records import (
    Group,
    GroupedBatch,
    Prompt,
    PromptBatch,
    Rollout,
    SamplingRecord,
    ScoredBatch,
    ScoredRollout,
    Turn,
)
from schemas.store import RunStore
from stages.counters import count

MISSING = "missing"


def group(batch: ScoredBatch, *, samples: int) -> GroupedBatch:
    """The batch's trajectories as complete groups, whatever order they came in.

    Args:
      batch: trajectories of one element; each may be absent, or present more than once.
      samples: G. Sample indices are 0 to G-1.

    Returns:
      One group for each prompt of the batch, in order of group index, each with G samples in order of sample index. Of
      trajectories with one identity the first in the batch is kept and the others are counted in `duplicates`. A sample
      that never came is a tombstone with error "missing".

    Raises:
      ValueError: a trajectory does not belong to this element (its step, group, sample or prompt is foreign).
    """
    kept: dict[TrajectoryId, ScoredRollout] = {}
    for scored in batch.rollouts:
        _refuse_foreign(scored.rollout, batch.prompts, samples)
        kept.setdefault(scored.rollout.id, scored)
    groups = tuple(
        _complete_group(batch, kept, batch.prompts.first_group_index + offset, prompt, samples)
        for offset, prompt in enumerate(batch.prompts.prompts)
    )
    return GroupedBatch(batch.prompts, groups, batch.failures, duplicates=len(batch.rollouts) - len(kept))


def _refuse_foreign(rollout: Rollout, prompts: PromptBatch, samples: int) -> None:
    identity = rollout.id
    offset = identity.group_index - prompts.first_group_index
    if identity.step != prompts.step:
        raise ValueError(f"trajectory {identity.path} is not of step {prompts.step}, which this element belongs to")
    if not 0 <= offset < len(prompts.prompts):
        last = prompts.first_group_index + len(prompts.prompts) - 1
        raise ValueError(
            f"trajectory {identity.path}: element {prompts.element_index} of step {prompts.step} has groups "
            f"{prompts.first_group_index} to {last}, not {identity.group_index}"
        )
    if not 0 <= identity.sample_index < samples:
        raise ValueError(f"trajectory {identity.path}: a group has samples 0 to {samples - 1}")
    if rollout.prompt_id != prompts.prompts[offset].prompt_id:
        raise ValueError(
            f"trajectory {identity.path} answers prompt {rollout.prompt_id!r}, but its group's prompt is "
            f"{prompts.prompts[offset].prompt_id!r}"
        )


def _complete_group(
    batch: ScoredBatch, kept: Mapping[TrajectoryId, ScoredRollout], group_index: int, prompt: Prompt, samples: int
) -> Group:
    identities = [TrajectoryId(batch.prompts.step, group_index, index) for index in range(samples)]
    siblings = [kept[identity].rollout for identity in identities if identity in kept]
    prompt_tokens = _prompt_tokens(siblings)
    sampling = _sampling([*siblings, *(scored.rollout for scored in batch.rollouts)])
    return Group(
        group_index,
        prompt.prompt_id,
        tuple(kept.get(identity) or _missing(identity, prompt, prompt_tokens, sampling) for identity in identities),
    )


def _prompt_tokens(siblings: Sequence[Rollout]) -> np.ndarray:
    """The group's prompt, int32 [t], as its first sample that has one knows it; [0] if none does."""
    known = (rollout.tokens[: rollout.prompt_length] for rollout in siblings if rollout.prompt_length)
    return next(known, np.zeros(0, np.int32))


def _sampling(rollouts: Sequence[Rollout]) -> SamplingRecord:
    """What the element's trajectories were drawn with. Of an element that lost all of them nothing is known, and
    nothing was drawn: temperature 1 then stands for no particular one."""
    return rollouts[0].sampling if rollouts else SamplingRecord(temperature=1.0)


def _missing(
    identity: TrajectoryId, prompt: Prompt, prompt_tokens: np.ndarray, sampling: SamplingRecord
) -> ScoredRollout:
    length = len(prompt_tokens)
    rollout = Rollout(
        id=identity,
        prompt_id=prompt.prompt_id,
        task=prompt.task,
        tokens=prompt_tokens.copy(),
        loss_mask=np.zeros(length, np.bool_),
        sampler_logprobs=np.zeros(length, np.float32),
        prompt_length=length,
        versions=(),
        turns=(Turn("prompt", 0, length, 0.0),) if length else (),
        stop_reason="failed",
        status="failed",
        error=MISSING,
        environment={},
        sampling=sampling,
        generator="",
        started_at=0.0,
        seconds=0.0,
    )
    return ScoredRollout(rollout, reward=0.0, components={})


def measure_groups(batch: GroupedBatch) -> dict[str, float]:
    """The stage's metrics, without its time. A group is mixed if rewards differ among its samples that did not fail."""
    tombstones = sum(scored.rollout.status == "failed" for group in batch.groups for scored in group.samples)
    mixed = sum(_is_mixed(group) for group in batch.groups)
    return {
        "group/groups": len(batch.groups),
        "group/duplicates": batch.duplicates,
        "group/tombstones": tombstones,
        "group/mixed/fraction": mixed / max(1, len(batch.groups)),
    }


def _is_mixed(group: Group) -> bool:
    return len({scored.reward for scored in group.samples if scored.rollout.status == "ok"}) > 1


@dataclass
class GroupByPrompt(beam.PTransform):
    """ScoredBatch -> GroupedBatch, one to one; see `group`.

    Args:
      recipe: the run's recipe.
      run: location of the run directory, where metrics go.
    """

    recipe: Recipe
    run: str

    def expand(self, batches: beam.PCollection[ScoredBatch]) -> beam.PCollection[GroupedBatch]:
        do = beam.ParDo(_GroupFn(self.recipe.rollout.samples_per_prompt, self.run))
        return batches | "Group" >> do.with_output_types(GroupedBatch)


class _GroupFn(beam.DoFn):
    def __init__(self, samples: int, run: str):
        self._samples = samples
        self._run = run

    def setup(self) -> None:
        self._metrics = MetricsWriter(RunStore.open(self._run), "group")

    def process(self, batch: ScoredBatch) -> Iterator[GroupedBatch]:
        started = time.perf_counter()
        grouped = group(batch, samples=self._samples)
        measured = measure_groups(grouped)
        seconds = time.perf_counter() - started
        self._metrics.write(
            batch.prompts.step, {**measured, "group/seconds": seconds}, element=batch.prompts.element_index
        )
        count(GroupByPrompt, "in-rollouts", len(batch.rollouts))
        count(GroupByPrompt, "dropped-duplicates", grouped.duplicates)
        count(GroupByPrompt, "out-groups", len(grouped.groups))
        count(GroupByPrompt, "out-tombstones", int(measured["group/tombstones"]))
        yield grouped
