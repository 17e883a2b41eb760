"""Online RL: the policy samples, is rewarded for what it did, and is trained on it.

    AdmitPrompts -> Rollout -> Reward -> GroupByPrompt -> Pack -> WriteShards -> Train
         ^                                                                       |
         +------------- policies/<version>, looked at before each claim ---------+

The arrow back is no edge of the graph: it is the run directory, where versions only grow. So the graph comes in two
forms: with the trainer as its last stage (`online`), and without, for a trainer that is another process
(`sample_shards`). Labels are stable, because runners update running jobs by them.

Left out on purpose: where it runs (`runners/`). What a runner asks of the graph comes as a `GraphShape`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import apache_beam as beam
from apache_beam.pvalue import PBegin

from schemas.manifest import ShardManifest
from schemas.recipe import Recipe
from stages.boundary import StageBoundary
from stages.coders import register_record_coders
from stages.group import GroupByPrompt
from stages.pack import Pack
from stages.prompts.shares import WHOLE_RUN, Share
from stages.prompts.source import SHORT_NAPS, AdmitPrompts, Deferral
from stages.reward.reward import Reward
from stages.rollout.rollout import Rollout
from stages.shards import WriteShards
from stages.train import StepReport, Train
from stages.warm_start import WarmStart

BOUNDARIES = ("AfterAdmitPrompts", "AfterRollout", "BeforeWriteShards")  # in the order of the flow


@dataclass(frozen=True)
class GraphShape:
    """What a placement may choose of the graph; the rest is the same everywhere.

    Attributes:
      boundaries: which of `BOUNDARIES` are on.
      deferral: how the source waits for a policy.
      rollout_hints: resources of the sampling step alone, by Beam's names of them ("accelerator", "min_ram"); a runner
        that heeds them gives that step workers of its own.
      decode_together: elements that one process samples at the same time share the engine's calls.
    """

    boundaries: frozenset[str] = frozenset()
    deferral: Deferral = SHORT_NAPS
    rollout_hints: Mapping[str, str] = field(default_factory=dict)
    decode_together: bool = False

    def __post_init__(self) -> None:
        if unknown := self.boundaries - set(BOUNDARIES):
            raise ValueError(f"{sorted(unknown)} are no boundaries of the graph, which has {BOUNDARIES}")


FUSED = GraphShape()  # one stage, as a pipeline needs that trains itself


def online(pipeline: beam.Pipeline, recipe: Recipe, run: str) -> beam.PCollection[StepReport]:
    """The whole loop in one pipeline: warm start, sampling and training, up to the recipe's last step.

    What is sampled but not trained when the pipeline starts is trained with the next shard of its step; a step that has
    all its shards must be trained before (`stages.train.train_ready_steps`), since no shard of it comes any more.

    Args:
      recipe: the run's recipe.
      run: location of the run directory.
    """
    start = pipeline | "WarmStart" >> WarmStart(recipe, run)
    return sample_shards(start, recipe, run) | "Train" >> Train(recipe, run)


def sample_shards(
    start: beam.Pipeline | PBegin | beam.PCollection,
    recipe: Recipe,
    run: str,
    share: Share = WHOLE_RUN,
    shape: GraphShape = FUSED,
) -> beam.PCollection[ShardManifest]:
    """Sampling alone, for a trainer elsewhere: it waits for each policy version that the lag bound asks for.

    Args:
      start: the pipeline, or a collection of one element that comes when sampling may begin.
      share: which of the run's positions this pipeline samples.
      shape: what the runner asks of the graph.
    """
    register_record_coders()
    prompts = start | "AdmitPrompts" >> AdmitPrompts(recipe, run, share, shape.deferral)
    rollout: beam.PTransform = Rollout(recipe, run, shape.decode_together)
    if shape.rollout_hints:
        rollout = rollout.with_resource_hints(**shape.rollout_hints)
    rollouts = _cut(prompts, "AfterAdmitPrompts", shape) | "Rollout" >> rollout
    packed = (
        _cut(rollouts, "AfterRollout", shape)
        | "Reward" >> Reward(recipe, run)
        | "GroupByPrompt" >> GroupByPrompt(recipe, run)
        | "Pack" >> Pack(recipe, run)
    )
    return _cut(packed, "BeforeWriteShards", shape) | "WriteShards" >> WriteShards(recipe, run)


def _cut(elements: beam.PCollection, boundary: str, shape: GraphShape) -> beam.PCollection:
    """The same elements, behind the boundary if the placement has it. One that is off is no step of the graph."""
    return elements | boundary >> StageBoundary() if boundary in shape.boundaries else elements
