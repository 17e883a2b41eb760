"""Online RL: the policy samples, is rewarded for what it did, and is trained on it.

    AdmitPrompts -> Rollout -> Reward -> GroupByPrompt -> Pack -> WriteShards -> Train
         ^                                                                       |
         +------------- policies/<version>, looked at before each claim ---------+

The arrow back is no edge of the graph: it is the run directory, where versions only grow. Labels are stable, because
runners update running jobs by them.

Left out on purpose: where it runs (`runners/`), and any barrier between stages; a runner that needs one adds it.
"""

from __future__ import annotations

import apache_beam as beam
from apache_beam.pvalue import PBegin

from schemas.manifest import ShardManifest
from schemas.recipe import Recipe
from stages.coders import register_record_coders
from stages.group import GroupByPrompt
from stages.pack import Pack
from stages.prompts.source import AdmitPrompts
from stages.reward.reward import Reward
from stages.rollout.rollout import Rollout
from stages.shards import WriteShards
from stages.train import StepReport, Train
from stages.warm_start import WarmStart


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
    start: beam.Pipeline | PBegin | beam.PCollection, recipe: Recipe, run: str
) -> beam.PCollection[ShardManifest]:
    """Sampling alone, for a trainer elsewhere: it waits for each policy version that the lag bound asks for.

    Args:
      start: the pipeline, or a collection of one element that comes when sampling may begin.
    """
    register_record_coders()
    return (
        start
        | "AdmitPrompts" >> AdmitPrompts(recipe, run)
        | "Rollout" >> Rollout(recipe, run)
        | "Reward" >> Reward(recipe, run)
        | "GroupByPrompt" >> GroupByPrompt(recipe, run)
        | "Pack" >> Pack(recipe, run)
        | "WriteShards" >> WriteShards(recipe, run)
    )
