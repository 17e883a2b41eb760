"""Train: the shards of a step become the next policy version, exactly once, however often it is tried.

Step s is ready when each of its elements has a manifest. It then goes

    freeze the list of shards -> read -> drop what is too old -> update -> publish version s + 1 -> checkpoint

and each arrow may be where a killed run stops. What is done is found in the run directory by whoever comes next: the
frozen list is never changed, an update is a pure function of the state and of that list, and a version is published
once. So the optimizer state need not be saved at every step. A resumed run restores the newest checkpoint and repeats
the steps since then, from their frozen lists; the digest of the published policy says whether it came out the same.

Left out on purpose: Beam in everything but the last part (a trainer process of its own calls `train_ready_steps` in a
loop), several epochs over a step, and training on part of a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import apache_beam as beam
import jax

from jax_core.faults import crash_point
from jax_core.policies import tree_digest
from jax_core.trainer import TrainState
from schemas import run_layout
from schemas.errors import DamagedDataError, UserError
from schemas.manifest import PolicyCommit, ShardManifest, SkippedShard, StepList
from schemas.metrics import MetricsWriter
from schemas.recipe import Recipe
from schemas.records import Group, ShardContent
from schemas.store import RunStore
from stages.counters import count, count_all
from stages.runtime import Runtime, runtime
from stages.shards import freeze_step, frozen_step, read_listed, read_manifest, read_shard

_TRAINER_STATES_KEPT = 2  # the newest, and one to repeat from if the newest is damaged

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReport:
    """What became of training step `step`: it made policy version `policy_version` = step + 1, with this digest."""

    step: int
    policy_version: int
    digest: str
    shards: int  # trained on
    skipped_shards: int  # damaged, left out as the recipe says
    metrics: Mapping[str, float]  # by their names in `schemas.metrics`


@dataclass(frozen=True, eq=False)
class FreshGroups:
    """A step's data without the groups that are too old for it."""

    contents: tuple[ShardContent, ...]
    too_old_groups: int


def train_ready_steps(shared: Runtime) -> list[StepReport]:
    """Trains every step whose data is complete, in order, and publishes a policy version for each.

    Returns:
      One report a step that was trained by this call: empty where nothing is ready, or no policy is published yet.

    Raises:
      DamagedDataError: a shard is damaged and the recipe refuses such, or the step had already been trained on it.
      UserError: data of another run, a policy that training does not reproduce, or another trainer in this run.
    """
    reports = []
    with shared.train_lock:
        while (step := ready_step(shared)) is not None:
            reports.append(_train_step(shared, step))
    return reports


def ready_step(shared: Runtime) -> int | None:
    """The next step to train, if its data is complete and the run is not over."""
    step = shared.policies.latest()
    if step is None or step >= shared.recipe.trainer.steps:
        return None
    # Listing names costs the same whatever the number of elements. Only a list that is late leaves some to ask for.
    listed = set(shared.store.list(run_layout.manifest_prefix(step)))
    missing = [key for key in _manifest_keys(shared.recipe, step) if key not in listed]
    return step if all(shared.store.exists(key) for key in missing) else None


def _manifest_keys(recipe: Recipe, step: int) -> list[str]:
    return [run_layout.manifest(step, element) for element in range(recipe.rollout.elements_per_step)]


def _train_step(shared: Runtime, step: int) -> StepReport:
    started = time.monotonic()
    idle_seconds = started - shared.idle_since
    frozen, contents = freeze_and_load(shared, step)
    fresh = drop_too_old(contents, step, shared.recipe.rollout.max_lag)
    before = state_at(shared, step)
    state, measured, update_seconds = _timed_update(shared, before, fresh.contents)
    measured |= {
        "trainer/too_old_groups": fresh.too_old_groups,
        "trainer/skipped_shards": len(frozen.skipped),
        "trainer/idle_seconds": idle_seconds,
        "trainer/update_seconds": update_seconds,
        "trainer/trained_tokens_per_second": measured["trainer/trained_tokens"] / max(update_seconds, 1e-9),
    }
    metrics = MetricsWriter(shared.store, "train")
    # Also before the commit: a run that is killed right after it never comes back to this step.
    metrics.write(step, measured | {"trainer/seconds": time.monotonic() - started})
    publishing = time.monotonic()
    commit = _save_and_publish(shared, state)
    shared.idle_since = time.monotonic()
    measured |= {
        "trainer/publish_seconds": shared.idle_since - publishing,
        "trainer/seconds": shared.idle_since - started,
    }
    metrics.write(step, measured)
    report = StepReport(step, commit.version, commit.digest, len(frozen.shards), len(frozen.skipped), measured)
    _call_hooks(shared, report)
    return report


def _timed_update(
    shared: Runtime, state: TrainState, contents: Sequence[ShardContent]
) -> tuple[TrainState, dict[str, float], float]:
    started = time.monotonic()
    state, measured = shared.trainer.update(state, contents)
    jax.block_until_ready(state.params)  # JAX returns before it has computed
    return state, measured, time.monotonic() - started


def _save_and_publish(shared: Runtime, state: TrainState) -> PolicyCommit:
    version = state.step
    # Published before the checkpoint: generators wait for weights, and nobody waits for the optimizer state.
    commit = shared.policies.publish(version, state.params, source="step")
    shared.train_state = state
    shared.policy_cache.put(version, state.params)
    _save_checkpoint(shared, state)
    _prune(shared, version)
    return commit


def settle(shared: Runtime) -> None:
    """Does what a killed trainer still owed to the version that it published last: the checkpoint and the pruning.

    Raises what `train_ready_steps` raises.
    """
    with shared.train_lock:
        version = shared.policies.latest()
        if version is None:
            return
        if _owes_checkpoint(shared, version):
            _save_checkpoint(shared, state_at(shared, version))
        _prune(shared, version)


def _prune(shared: Runtime, newest: int) -> None:
    shared.policies.prune(policies_to_keep(newest, shared.recipe))
    shared.trainer_states.prune(trainer_states_to_keep(newest, shared.recipe))


def _owes_checkpoint(shared: Runtime, version: int) -> bool:
    """Whether the trainer's state is due at this version and not there."""
    due = version > 0 and is_checkpoint(version, shared.recipe)
    return due and shared.trainer_states.newest_at_most(version) != version


def _save_checkpoint(shared: Runtime, state: TrainState) -> None:
    if _owes_checkpoint(shared, state.step):
        crash_point("before-checkpoint")
        shared.trainer_states.save(state.step, shared.trainer.state_tree(state))
        crash_point("after-checkpoint")


def _call_hooks(shared: Runtime, report: StepReport) -> None:
    for hook in shared.after_step:
        hook(report)
    shared.idle_since = time.monotonic()  # hooks are neither training nor waiting for data


def is_checkpoint(version: int, recipe: Recipe) -> bool:
    """Whether the trainer's state is saved at this version: every so many steps, and at the end of the run."""
    return version % recipe.trainer.checkpoint_every == 0 or version == recipe.trainer.steps


def policies_to_keep(newest: int, recipe: Recipe) -> set[int]:
    """Policy versions that stay in the run directory: the first, each checkpoint's, and the newest ones.

    Never fewer of the newest than the lag bound needs: an element that was begun with one must still find it.
    """
    newest_kept = max(recipe.trainer.keep_policies, recipe.rollout.max_lag + 2)
    recent = range(max(0, newest - newest_kept + 1), newest + 1)
    return {0, *recent, *(v for v in range(newest + 1) if is_checkpoint(v, recipe))}


def trainer_states_to_keep(newest: int, recipe: Recipe) -> set[int]:
    """Versions of the trainer's state that stay: the newest few of those that are saved."""
    saved = [v for v in range(1, newest + 1) if is_checkpoint(v, recipe)]
    return set(saved[-_TRAINER_STATES_KEPT:])


def freeze_and_load(shared: Runtime, step: int) -> tuple[StepList, list[ShardContent]]:
    """The step's frozen list, which this call freezes if nobody has yet, and the shards on it, in order of element.

    Raises:
      DamagedDataError: see `train_ready_steps`.
    """
    if frozen_step(shared.store, step) is None:
        found = [_examine(shared, step, key) for key in _manifest_keys(shared.recipe, step)]
        whole = [shard for shard in found if not isinstance(shard, SkippedShard)]
        skipped = [shard for shard in found if isinstance(shard, SkippedShard)]
        frozen = freeze_step(shared.store, step, step, [manifest for manifest, _ in whole], skipped)
        if [shard.key for shard in frozen.shards] == [manifest.key for manifest, _ in whole]:
            return frozen, [content for _, content in whole]
    return load_frozen(shared.store, step)


def load_frozen(store: RunStore, step: int) -> tuple[StepList, list[ShardContent]]:
    """What step `step` trains or trained on.

    Raises:
      DamagedDataError: its list is gone, or as `read_listed` says.
    """
    frozen = frozen_step(store, step)
    if frozen is None:
        raise DamagedDataError(
            run_layout.step_list(step), f"is gone, and step {step} must be repeated.", "Restore the file from a copy."
        )
    return frozen, read_listed(store, frozen)


def _examine(shared: Runtime, step: int, manifest_key: str) -> tuple[ShardManifest, ShardContent] | SkippedShard:
    """A committed shard, read whole; or why the step goes without it, where the recipe allows that."""
    key = manifest_key
    try:
        manifest = read_manifest(shared.store, manifest_key)
        _refuse_foreign(shared, manifest_key, manifest)
        key = manifest.key
        return manifest, read_shard(shared.store, manifest, shared.recent_shards)
    except DamagedDataError as error:
        if shared.recipe.trainer.damaged_shards == "refuse":
            raise
        _LOGGER.warning("step %d is trained without a damaged shard: %s", step, error)
        return SkippedShard(key=key, reason=str(error))


def _refuse_foreign(shared: Runtime, key: str, manifest: ShardManifest) -> None:
    if manifest.run_id != shared.run_id:
        raise UserError(
            key,
            f"belongs to run {manifest.run_id!r}, not to {shared.run_id!r}.",
            "Take it out of the directory, or start a run in an empty one.",
        )


def drop_too_old(contents: Sequence[ShardContent], step: int, max_lag: int) -> FreshGroups:
    """A step's data without groups of which any token was sampled by a policy more than `max_lag` steps old.

    A group goes whole: its samples are each other's baseline. Rows keep their numbers; those of a dropped group stay
    empty. The source admits nothing too old, but a bound that is checked at one end only has failed others.
    """
    kept = tuple(_without_old_groups(content, step, max_lag) for content in contents)
    dropped = sum(len(content.groups) for content in contents) - sum(len(content.groups) for content in kept)
    return FreshGroups(kept, dropped)


def _without_old_groups(content: ShardContent, step: int, max_lag: int) -> ShardContent:
    fresh = [i for i, group in enumerate(content.groups) if step - _oldest_version(group, step) <= max_lag]
    return replace(
        content,
        groups=tuple(content.groups[i] for i in fresh),
        placements=tuple(content.placements[i] for i in fresh),
    )


def _oldest_version(group: Group, step: int) -> int:
    versions = [span.policy_version for sample in group.samples for span in sample.rollout.versions]
    return min(versions, default=step)  # all tombstones: no policy wrote anything


def state_at(shared: Runtime, step: int) -> TrainState:
    """The trainer's state before training step `step`: in memory, or restored and brought forward by repeating steps.

    Raises:
      UserError: the result is not the policy that was published as version `step`.
    """
    state = shared.train_state
    if state is None or state.step != step:
        state = _restore(shared, step)
        _verify(shared, state)
        _save_checkpoint(shared, state)  # lost if the run was killed between publishing and saving
        shared.train_state = state
    return state


def _restore(shared: Runtime, step: int) -> TrainState:
    state = _newest_checkpoint(shared, step)
    for repeated in range(state.step, step):
        _, contents = load_frozen(shared.store, repeated)
        fresh = drop_too_old(contents, repeated, shared.recipe.rollout.max_lag)
        state, _ = shared.trainer.update(state, fresh.contents)
    return state


def _newest_checkpoint(shared: Runtime, step: int) -> TrainState:
    """The newest whole state saved at or before `step`. Version 0 needs none: its optimizer has seen nothing."""
    initial = shared.trainer.init(shared.policies.load(0))
    version = shared.trainer_states.newest_at_most(step)
    while version:
        try:
            tree = shared.trainer_states.load(version, like=shared.trainer.state_tree(initial))
            return shared.trainer.restore(tree, version)
        except DamagedDataError as error:
            _LOGGER.warning("an older checkpoint is taken, and more steps are repeated: %s", error)
            version = shared.trainer_states.newest_at_most(version - 1)
    return initial


def _verify(shared: Runtime, state: TrainState) -> None:
    published, found = shared.policies.commit(state.step).digest, tree_digest(state.params)
    if found != published:
        raise UserError(
            run_layout.policy(state.step),
            f"has digest {published}, but repeating the steps up to it gives {found}: this machine or its libraries "
            "compute other bits than those that trained the run.",
            f"Resume with the machine and library versions that wrote {shared.run}, or start a new run.",
        )


@dataclass
class Train(beam.PTransform):
    """ShardManifest -> StepReport: each step, once its last shard has come; see `train_ready_steps`.

    For a pipeline that trains in its own process. A pipeline that only samples leaves it out.

    Args:
      recipe: the run's recipe.
      run: location of the run directory.
    """

    recipe: Recipe
    run: str

    def expand(self, manifests: beam.PCollection[ShardManifest]) -> beam.PCollection[StepReport]:
        return manifests | "TrainReadySteps" >> beam.ParDo(_TrainFn(self.recipe, self.run)).with_output_types(
            StepReport
        )


_COUNTED = {
    "trained-tokens": "trainer/trained_tokens",
    "trained-groups": "trainer/trained_groups",
    "dropped-too-old-groups": "trainer/too_old_groups",
}


class _TrainFn(beam.DoFn):
    def __init__(self, recipe: Recipe, run: str):
        self._recipe = recipe
        self._run = run

    def process(self, manifest: ShardManifest) -> Iterator[StepReport]:
        count(Train, "in-shards")
        for report in train_ready_steps(runtime(self._run, self._recipe)):
            counts = {name: int(report.metrics[metric]) for name, metric in _COUNTED.items()}
            count_all(Train, {"out-steps": 1, **counts})
            yield report
