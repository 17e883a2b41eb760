"""Prompts: the source of the pipeline, and the one place where the lag bound holds sampling back.

The run is a sequence of positions; position i is element i % elements_per_step of step i // elements_per_step. The
source claims one position after another, each only when the policy that would sample it is at most `max_lag` steps old:

    max_lag = 1, policy 3 is the newest:     step 3  admitted     step 4  admitted     step 5  deferred

The policy version of an element is pinned in the run directory by whoever comes first, so a bundle that is tried again
samples with the same weights, although newer ones may have been published meanwhile.

Several pipelines may divide a run: each claims the positions of its share only (`stages.prompts.shares`).

Left out on purpose: watermarks (no stage has windows or timers).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import apache_beam as beam
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.pvalue import PBegin
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.utils.timestamp import Duration

from schemas import run_layout
from schemas.errors import UserError
from schemas.manifest import Pin
from schemas.metrics import MetricsWriter
from schemas.recipe import Recipe
from schemas.records import PromptBatch
from stages.counters import count
from stages.prompts.datasets import training_prompts
from stages.prompts.shares import WHOLE_RUN, Share
from stages.runtime import Runtime, runtime

Admission = Literal["trained", "committed", "deferred", "admitted"]

# Positions of one bundle at most. At the end of each bundle Beam waits for a sampling thread, for up to 0.2 s; without
# an end, runners that never ask for a checkpoint would keep the whole run in one bundle.
_CLAIMS = 16


@dataclass(frozen=True)
class Deferral:
    """How a source waits for a policy: for `delay_seconds` it gives its place back and asks to be called again.

    `hold_seconds` of those it keeps its place all the same. 0 where a runner keeps to delays; one that ignores them
    calls again at once, and without a short sleep the source would spin.
    """

    delay_seconds: float = 0.02
    hold_seconds: float = 0.02


SHORT_NAPS = Deferral()


def admit(step: int, newest_version: int | None, *, max_lag: int, committed: bool) -> Admission:
    """What becomes of an element of `step` while `newest_version` is the newest policy.

    Args:
      newest_version: None while no policy is published.
      committed: the element's shard is in the run directory.

    Returns:
      "trained": its step has been trained, nothing is left to do; "committed": it is sampled and waits for the trainer;
      "deferred": a policy that may sample it does not exist yet; "admitted": `newest_version` is to sample it. An
      admitted element's policy is never ahead of its step, and never more than `max_lag` behind.

    >>> admit(5, 3, max_lag=1, committed=False), admit(4, 3, max_lag=1, committed=False)
    ('deferred', 'admitted')
    """
    if newest_version is None:
        return "deferred"
    if newest_version > step:
        return "trained"
    if committed:
        return "committed"
    return "deferred" if step - newest_version > max_lag else "admitted"


def open_positions(
    start: int,
    stop: int,
    newest_version: int | None,
    *,
    max_lag: int,
    elements_per_step: int,
    share: Share = WHOLE_RUN,
) -> int:
    """How many of the share's positions [start, stop), counted within it, the lag bound allows to be sampled now.

    This is the source's backlog. A runner that scales by it must not see the whole rest of the run, which no number of
    workers could sample before the trainer gets there.
    """
    if newest_version is None:
        return 0
    open_until = share.below((newest_version + max_lag + 1) * elements_per_step)
    return max(0, min(stop, open_until) - start)


def pin_version(shared: Runtime, step: int, element_index: int, version: int) -> int:
    """The policy version that samples the element: `version`, unless an earlier attempt has pinned another one.

    Raises:
      UserError: the pinned policy is no longer in the run directory.
    """
    key = run_layout.pin(step, element_index)
    if shared.store.put_new(key, Pin(step=step, element_index=element_index, policy_version=version).to_json()):
        return version
    pinned = Pin.from_json(shared.store.get(key), key).policy_version
    if not shared.policies.is_stored(pinned):
        raise UserError(
            run_layout.policy(pinned),
            f"has no weights in {shared.run}, but element {element_index} of step {step} was begun with that policy "
            "and must be sampled by it.",
            "Put that folder back from a copy, or start a new run.",
        )
    return pinned


def prompt_batch(shared: Runtime, step: int, element_index: int, policy_version: int) -> PromptBatch:
    """The element: its share of the step's prompts. A pure function of the recipe, besides the pinned version."""
    recipe = shared.recipe
    first = element_index * recipe.prompts_per_element
    prompts = training_prompts(shared.prompts, recipe.seed, step, recipe.rollout.prompts_per_step)
    return PromptBatch(
        run_id=shared.run_id,
        step=step,
        element_index=element_index,
        policy_version=policy_version,
        first_group_index=first,
        prompts=prompts[first : first + recipe.prompts_per_element],
    )


@dataclass
class AdmitPrompts(beam.PTransform):
    """Start signal -> PromptBatch: one for each element of the run that is not yet sampled, as the lag bound allows.

    Applied to a pipeline, or to a collection of one element of any kind that comes when sampling may begin.
    Elements whose shard is already there are passed over, so whatever trains must look at those shards by itself when
    it starts.

    Args:
      recipe: the run's recipe.
      run: location of the run directory.
      share: which of the run's positions this pipeline claims.
      deferral: how it waits.
    """

    recipe: Recipe
    run: str
    share: Share = WHOLE_RUN
    deferral: Deferral = SHORT_NAPS

    def expand(self, start: PBegin | beam.PCollection) -> beam.PCollection[PromptBatch]:
        if isinstance(start, PBegin):
            start = start | "Start" >> beam.Impulse()
        admit = _AdmitPromptsFn(self.recipe, self.run, self.share, self.deferral)
        return start | "Admit" >> beam.ParDo(admit).with_output_types(PromptBatch)


class _AdmitPromptsFn(beam.DoFn, RestrictionProvider):
    """Claims a few positions, checkpoints itself, returns: the runner interleaves it with the rest of the loop.

    Its restriction counts the positions of its share.
    """

    def __init__(self, recipe: Recipe, run: str, share: Share = WHOLE_RUN, deferral: Deferral = SHORT_NAPS):
        self._recipe = recipe
        self._run = run
        self._share = share
        self._deferral = deferral
        self._deferrals = 0  # since the last admitted element
        self._deferred_since: float | None = None

    def _runtime(self) -> Runtime:
        # Not in `setup`: runners ask for restrictions and their sizes without setting the DoFn up.
        return runtime(self._run, self._recipe)

    def initial_restriction(self, element: object) -> OffsetRange:
        """From the share's first position whose step is not trained, to the end of the run."""
        trained_steps = self._runtime().policies.latest() or 0
        stop = self._share.below(self._recipe.positions)
        trained = self._share.below(trained_steps * self._recipe.rollout.elements_per_step)
        return OffsetRange(min(trained, stop), stop)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: object, restriction: OffsetRange) -> int:
        return open_positions(
            restriction.start,
            restriction.stop,
            self._runtime().policies.latest(),
            max_lag=self._recipe.rollout.max_lag,
            elements_per_step=self._recipe.rollout.elements_per_step,
            share=self._share,
        )

    def truncate(self, element: object, restriction: OffsetRange) -> None:
        """A drained pipeline claims nothing more. The default would finish the whole run first."""
        return None

    @beam.DoFn.unbounded_per_element()
    def process(self, element: object, tracker=beam.DoFn.RestrictionParam()) -> Iterator[PromptBatch]:  # noqa: B008
        start, stop = tracker.current_restriction().start, tracker.current_restriction().stop
        if start == stop:
            return
        for claim in range(start, min(stop, start + _CLAIMS)):
            shared = self._runtime()
            position = self._share.position(claim)
            step, element_index = divmod(position, self._recipe.rollout.elements_per_step)
            version = shared.policies.latest()
            committed = shared.store.exists(run_layout.manifest(step, element_index))
            admission = admit(step, version, max_lag=self._recipe.rollout.max_lag, committed=committed)
            if admission == "deferred":
                if claim == start:
                    self._defer()
                tracker.defer_remainder(Duration(seconds=self._deferral.delay_seconds))
                return
            if not tracker.try_claim(claim):
                return
            count(AdmitPrompts, f"out-{admission}")
            if admission == "admitted":
                assert version is not None
                # Where the loop is one fused stage, its other stages run here, before the next position is looked at.
                yield from self._begin(shared, step, element_index, version)
        tracker.defer_remainder()

    def _defer(self) -> None:
        count(AdmitPrompts, "deferrals")
        self._deferrals += 1
        if self._deferred_since is None:
            self._deferred_since = time.monotonic()
        time.sleep(self._deferral.hold_seconds)

    def _begin(self, shared: Runtime, step: int, element_index: int, version: int) -> Iterator[PromptBatch]:
        try:
            pinned = pin_version(shared, step, element_index, version)
        except UserError:
            # Another pipeline has this share too, and was faster: its shard is trained and the policy pruned.
            if shared.store.exists(run_layout.manifest(step, element_index)):
                return
            raise
        batch = prompt_batch(shared, step, element_index, pinned)
        since = self._deferred_since
        values = {
            "prompts/groups": len(batch.prompts),
            "prompts/deferrals": self._deferrals,
            "prompts/deferred_seconds": 0.0 if since is None else time.monotonic() - since,
            "prompts/lag_steps": step - batch.policy_version,
        }
        MetricsWriter(shared.store, "prompts").write(step, values, element=element_index)
        self._deferrals, self._deferred_since = 0, None
        yield batch
