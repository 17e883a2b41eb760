"""Rollout: a batch of prompts becomes all its sampled trajectories, by the policy version that the batch has pinned.

Left out on purpose: choosing a version. The prompt source pinned one in the element, so a bundle that is tried again
samples from the same weights and remakes the same tokens.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import apache_beam as beam
import numpy as np

from schemas import run_layout
from schemas.metrics import MetricsWriter
from schemas.recipe import Recipe
from schemas.records import PromptBatch, Role, RolloutBatch
from schemas.records import Rollout as RolloutRecord
from stages.counters import count_all
from stages.rollout.environments import environment_kind, environment_options
from stages.rollout.episodes import STAGE, run_episodes

if TYPE_CHECKING:
    from stages.runtime import Runtime


def roll_out(runtime: Runtime, recipe: Recipe, batch: PromptBatch, *, decode_together: bool = False) -> RolloutBatch:
    """Samples every trajectory of `batch` with what this process shares (engine, weights, dialogue); see
    `run_episodes`.

    Args:
      decode_together: with the cohorts of all batches that are sampled at the same time, in other threads too.
    """
    return run_episodes(
        runtime.shared_engine if decode_together else runtime.engine,
        runtime.policy_cache.get(batch.policy_version),
        partial(environment_kind(recipe.task.environment).make, environment_options(recipe.task)),
        runtime.dialogue,
        batch,
        recipe=recipe,
        generator=f"{socket.gethostname()}:{os.getpid()}",
    )


def measure_rollouts(batch: RolloutBatch) -> dict[str, float]:
    """The stage's metrics. Answers, turns and branches are of the trajectories that did not fail; NaN if all did.

    A prompt is computed once a group and counts once, whatever became of the group's samples; a refused one has no
    tokens. Decoding and environments overlap: their seconds may add up to more than all.
    """
    played = [rollout for rollout in batch.rollouts if rollout.status == "ok"]
    answers = [sum(turn.role == "policy" for turn in rollout.turns) for rollout in played]
    branches = [len(rollout.tokens) - rollout.prompt_length for rollout in played]
    prompts = {rollout.id.group_index: rollout.prompt_length for rollout in batch.rollouts}
    sampled = sum(_tokens_of(rollout, "policy") for rollout in played)
    calls = batch.counts["decode_calls"]
    return {
        "rollout/trajectories": len(batch.rollouts),
        "rollout/failed_trajectories": len(batch.rollouts) - len(played),
        "rollout/prompt_tokens": sum(prompts.values()),
        "rollout/sampled_tokens": sampled,
        "rollout/environment_tokens": sum(_tokens_of(rollout, "environment") for rollout in played),
        "rollout/turns/mean": float(np.mean(answers)) if played else np.nan,
        "rollout/branch_tokens/mean": float(np.mean(branches)) if played else np.nan,
        "rollout/branch_tokens/max": max(branches) if played else np.nan,
        "rollout/seconds": batch.seconds["total"],
        "rollout/decode_seconds": batch.seconds["decode"],
        "rollout/environment_seconds": batch.seconds["environment"],
        "rollout/decode_calls": calls,
        "rollout/sessions_per_decode_call/mean": batch.counts["decoded_sessions"] / calls if calls else np.nan,
        "rollout/sampled_tokens_per_second": sampled / batch.seconds["total"],
        "rollout/policy_version": batch.prompts.policy_version,
    }


def _tokens_of(rollout: RolloutRecord, role: Role) -> int:
    return sum(turn.end - turn.start for turn in rollout.turns if turn.role == role)


@dataclass
class Rollout(beam.PTransform):
    """PromptBatch -> RolloutBatch, one to one; see `run_episodes`.

    Args:
      recipe: the run's recipe.
      run: location of the run directory, where policies are read and metrics go.
      decode_together: elements that a process samples at the same time share the engine's calls. Tokens stay the same;
        log-probabilities may then differ in their last bits from one run to the next.
    """

    recipe: Recipe
    run: str
    decode_together: bool = False

    def expand(self, batches: beam.PCollection[PromptBatch]) -> beam.PCollection[RolloutBatch]:
        do = beam.ParDo(_RolloutFn(self.recipe, self.run, self.decode_together))
        return batches | "Rollout" >> do.with_output_types(RolloutBatch)


class _RolloutFn(beam.DoFn):
    def __init__(self, recipe: Recipe, run: str, decode_together: bool):
        self._recipe = recipe
        self._run = run
        self._decode_together = decode_together

    def setup(self) -> None:
        # Here and not above: whoever only builds the graph must not load the accelerator's library.
        from jax_core.policies import MissingVersionError
        from stages.runtime import runtime

        self._pruned = MissingVersionError
        self._runtime = runtime(self._run, self._recipe)
        self._metrics = MetricsWriter(self._runtime.store, STAGE)

    def process(self, batch: PromptBatch) -> Iterator[RolloutBatch]:
        try:
            rollouts = roll_out(self._runtime, self._recipe, batch, decode_together=self._decode_together)
        except self._pruned:
            # A policy is pruned once no step needs it: another pipeline has sampled this element meanwhile.
            if not self._runtime.store.exists(run_layout.manifest(batch.step, batch.element_index)):
                raise
            count_all(Rollout, {"passed-over": 1})
            return
        measured = measure_rollouts(rollouts)
        self._metrics.write(batch.step, measured, element=batch.element_index)
        # On the bundle's own thread, after the episodes' threads have ended: Beam loses what others count.
        count_all(
            Rollout,
            {
                "in-prompts": len(batch.prompts),
                "out-trajectories": len(rollouts.rollouts),
                "failed-trajectories": int(measured["rollout/failed_trajectories"]),
                "sampled-tokens": int(measured["rollout/sampled_tokens"]),
            },
        )
        yield rollouts
