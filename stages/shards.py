"""Shards: commits packed groups as one Arrow file and one manifest, once, however often it is tried.

    encode -> validate -> data file under its digest's name -> manifest, created only if absent

The manifest is the commit: whoever creates it first has the slot (step, element) for ever. A second attempt that brings
the same content changes nothing; one that brings other content is put in quarantine, because a retry should have
remade the same trajectories. Readers list manifests and never data files, so what a killed writer left is never read.

Left out on purpose: any collecting over elements. Which shards make a step is decided by `freeze_step`, over manifests.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import Literal

import apache_beam as beam
import pyarrow as pa

from jax_core.faults import crash_point
from schemas import run_layout, trajectory
from schemas.errors import DamagedDataError, UserError
from schemas.identity import TrajectoryId
from schemas.manifest import ShardManifest, ShardRef, SkippedShard, StepList
from schemas.metrics import MetricsWriter
from schemas.recipe import Recipe
from schemas.records import Failure, PackedBatch, Prompt, ShardContent
from schemas.store import RunStore
from schemas.text import to_json
from stages.counters import count_all

Outcome = Literal["written", "already_committed", "quarantined"]


@dataclass(frozen=True)
class ShardCommit:
    """What became of an attempt: the manifest that holds the slot now, and whether this attempt put it there."""

    manifest: ShardManifest
    outcome: Outcome


def write_shard(store: RunStore, packed: PackedBatch, run_id: str) -> ShardManifest:
    """Commits a batch and returns the manifest that holds its slot: this attempt's, or an earlier one's.

    Raises:
      schemas.trajectory.InvalidTrajectory: the batch breaks a law of the schema; nothing was written.
      UserError: the batch, or what already holds its slot, belongs to another run.
      DamagedDataError: the manifest that holds the slot cannot be read.
    """
    return commit_shard(store, packed, run_id).manifest


def commit_shard(store: RunStore, packed: PackedBatch, run_id: str) -> ShardCommit:
    """As `write_shard`, and says whether this attempt was the one that counted."""
    return commit_prepared(store, *prepare_shard(packed, run_id))


def prepare_shard(packed: PackedBatch, run_id: str, newest_version: int | None = None) -> tuple[ShardManifest, bytes]:
    """The manifest and the file of a batch, of which nothing is written yet. Raises as `write_shard` does.

    Args:
      newest_version: the newest policy version of now; None if that is not known.
    """
    prompts = packed.prompts
    if prompts.run_id != run_id:
        raise _foreign(f"element {prompts.element_index} of step {prompts.step}", prompts.run_id, run_id)
    table = trajectory.encode(packed)
    trajectory.validate(table)
    data = trajectory.to_bytes(table)
    return _describe(packed, table, data, newest_version), data


def commit_prepared(store: RunStore, manifest: ShardManifest, data: bytes) -> ShardCommit:
    """Commits what `prepare_shard` made. Raises as `write_shard` does."""
    slot = run_layout.manifest(manifest.step, manifest.element_index)
    if not store.exists(slot):
        crash_point("shard-before-data")
        _put_content(store, manifest.key, data)
        crash_point("shard-before-manifest")
    # Asked even where the slot is known to be taken: being told so by `put_new` means that the first is durable.
    if not store.put_new(slot, manifest.to_json()):
        return _give_way(store, manifest, data)
    crash_point("after-manifest")
    return ShardCommit(manifest, "written")


def _describe(packed: PackedBatch, table: pa.Table, data: bytes, newest_version: int | None) -> ShardManifest:
    prompts = packed.prompts
    rollouts = [scored.rollout for group in packed.groups for scored in group.samples]
    versions = [span.policy_version for rollout in rollouts for span in rollout.versions]
    sha256 = hashlib.sha256(data).hexdigest()
    return ShardManifest(
        version=trajectory.SCHEMA_VERSION,
        run_id=prompts.run_id,
        step=prompts.step,
        element_index=prompts.element_index,
        key=run_layout.shard(prompts.step, prompts.element_index, sha256),
        bytes=len(data),
        sha256=sha256,
        content_sha256=trajectory.content_sha256(table),
        groups=len(packed.groups),
        trajectories=len(rollouts),
        tombstones=sum(rollout.status == "failed" for rollout in rollouts),
        tokens=sum(len(rollout.tokens) for rollout in rollouts),
        sampled_tokens=sum(int(rollout.loss_mask.sum()) for rollout in rollouts),
        rows=packed.rows,
        row_tokens=packed.row_tokens,
        policy_version_min=min(versions, default=None),
        policy_version_max=max(versions, default=None),
        newest_version=newest_version,
        created_at=time.time(),
    )


def _put_content(store: RunStore, key: str, data: bytes) -> None:
    """Makes `key`, which names the digest of `data`, hold it. What a killed writer left there may be damaged since."""
    if not store.put_new(key, data) and not _holds(store, key, data):
        store.put(key, data)


def _holds(store: RunStore, key: str, data: bytes) -> bool:
    try:
        return store.get(key) == data
    except FileNotFoundError:  # taken away by an attempt that lost the slot
        return False


def _give_way(store: RunStore, newcomer: ShardManifest, data: bytes) -> ShardCommit:
    """The slot is taken: the first stays. A newcomer with other content is kept for whoever looks for the cause."""
    first = read_manifest(store, run_layout.manifest(newcomer.step, newcomer.element_index))
    if first.run_id != newcomer.run_id:
        raise _foreign(run_layout.manifest(newcomer.step, newcomer.element_index), first.run_id, newcomer.run_id)
    if newcomer.key != first.key:
        # Written before the race was lost. Nobody can commit it any more: manifests are never taken back.
        store.delete(newcomer.key)
    if newcomer.content_sha256 == first.content_sha256:
        return ShardCommit(first, "already_committed")
    store.put_new(run_layout.quarantine(newcomer.step, newcomer.element_index, newcomer.sha256), data)
    return ShardCommit(first, "quarantined")


def _foreign(offender: str, theirs: str, ours: str) -> UserError:
    return UserError(
        offender,
        f"belongs to run {theirs!r}, not to {ours!r}.",
        "Use an empty directory, or resume the run that is there.",
    )


class RecentContents:
    """What this process committed last, by the SHA-256 of the file, so that a trainer beside it need not decode it.

    Each content is given out once, and the oldest goes when there are more than `most`: it is a short cut, never a
    second truth. The file is still read and its digest compared before its content is taken from here.
    """

    def __init__(self, most: int = 8):
        self._most = most
        self._contents: dict[str, ShardContent] = {}
        self._lock = threading.Lock()

    def put(self, sha256: str, packed: PackedBatch) -> None:
        with self._lock:
            self._contents[sha256] = content_of(packed)
            while len(self._contents) > self._most:
                del self._contents[next(iter(self._contents))]

    def take(self, sha256: str) -> ShardContent | None:
        with self._lock:
            return self._contents.pop(sha256, None)


def content_of(packed: PackedBatch) -> ShardContent:
    """What reading the shard of a batch gives back, up to Python's types of lists and tuples in facts."""
    return ShardContent(
        step=packed.prompts.step,
        element_index=packed.prompts.element_index,
        groups=packed.groups,
        placements=packed.placements,
        row_tokens=packed.row_tokens,
        rows=packed.rows,
    )


def read_shard(store: RunStore, manifest: ShardManifest, recent: RecentContents | None = None) -> ShardContent:
    """The shard that a manifest names, whole and verified, or nothing of it.

    Args:
      recent: where the content of a file that this process wrote may still be; the file's bytes are verified all the
        same.

    Raises:
      DamagedDataError: the file is gone, torn, altered, newer than this reader, or not what the manifest says.
    """
    try:
        data = store.get(manifest.key)
    except FileNotFoundError as error:
        raise _damaged(manifest, "its manifest is there, but the file is not.") from error
    if len(data) != manifest.bytes:
        raise _damaged(manifest, f"has {len(data)} bytes, and its manifest says {manifest.bytes}.")
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise _damaged(manifest, f"its SHA-256 is not {manifest.sha256}, so it was altered.")
    if recent is not None and (content := recent.take(manifest.sha256)) is not None:
        return replace(content, newest_version=manifest.newest_version)
    table = trajectory.from_bytes(data, name=manifest.key)
    try:
        trajectory.validate(table)
    except trajectory.InvalidTrajectory as error:
        raise _damaged(manifest, f"breaks the schema: {error}.") from error
    content = trajectory.decode(table)
    if (content.step, content.element_index) != (manifest.step, manifest.element_index):
        raise _damaged(manifest, f"holds element {content.element_index} of step {content.step}.")
    return replace(content, newest_version=manifest.newest_version)


def _damaged(manifest: ShardManifest, reason: str) -> DamagedDataError:
    slot = run_layout.manifest(manifest.step, manifest.element_index)
    return DamagedDataError(
        manifest.key, reason, f"Restore the file; or remove {slot} and resume: the same trajectories are sampled again."
    )


def list_manifests(store: RunStore, step: int | None = None) -> list[ShardManifest]:
    """The committed shards of a step (of the whole run if None), in order of step and element.

    Raises:
      DamagedDataError: a manifest cannot be read, or lies in another's place.
    """
    return [read_manifest(store, key) for key in _manifest_keys(store, step)]


def committed_elements(store: RunStore, step: int) -> set[int]:
    """Element indices of a step that are committed. Reads names only."""
    return {int(PurePosixPath(key).stem) for key in _manifest_keys(store, step)}


def orphans(store: RunStore) -> list[str]:
    """Data files that no manifest names: of writers that were killed, or that have not committed yet."""
    committed = {manifest.key for manifest in list_manifests(store)}
    data = [key for key in store.list("trajectories/") if key.endswith(".arrow")]
    return [key for key in data if key not in committed and not _is_committed(store, key)]


def _is_committed(store: RunStore, key: str) -> bool:
    """Asks the manifest of a data file's slot itself, which the list of manifests may be too late to name."""
    step, element_index = run_layout.slot_of_shard(key)
    slot = run_layout.manifest(step, element_index)
    return store.exists(slot) and read_manifest(store, slot).key == key


def sweep_orphans(store: RunStore) -> None:
    """Removes the orphans. Only for who knows that nobody else is writing: another's may be about to be committed."""
    with suppress(DamagedDataError):  # a manifest that cannot be read may name any of them: all stay
        for key in orphans(store):
            store.delete(key)


def _manifest_keys(store: RunStore, step: int | None) -> list[str]:
    return [key for key in store.list(run_layout.manifest_prefix(step)) if key.endswith(".json")]


def read_manifest(store: RunStore, key: str) -> ShardManifest:
    """The manifest at `key`. Raises DamagedDataError if it cannot be read, or lies in another's place."""
    manifest = ShardManifest.from_json(store.get(key), key)
    if run_layout.manifest(manifest.step, manifest.element_index) != key:
        raise DamagedDataError(
            key, f"says that it is element {manifest.element_index} of step {manifest.step}.", "Restore the file."
        )
    return manifest


def frozen_step(store: RunStore, step: int) -> StepList | None:
    """The list that a step trains on, if it is decided. Raises DamagedDataError if it cannot be read."""
    key = run_layout.step_list(step)
    return StepList.from_json(store.get(key), key) if store.exists(key) else None


def read_listed(store: RunStore, frozen: StepList) -> list[ShardContent]:
    """The shards of a frozen list, in its order: what the step trains on, each time that it is trained or replayed.

    Raises:
      DamagedDataError: a shard is gone, torn, altered or newer than this reader. Nothing is skipped here, whatever the
        recipe says: a step is to be the same each time.
    """
    return [_read_listed(store, frozen.step, shard) for shard in frozen.shards]


def _read_listed(store: RunStore, step: int, shard: ShardRef) -> ShardContent:
    try:
        data = store.get(shard.key)
    except FileNotFoundError as error:
        raise DamagedDataError(
            shard.key, f"is gone, and step {step} is trained on it.", "Restore the file from a copy."
        ) from error
    content = trajectory.decode(trajectory.from_bytes(data, name=shard.key, sha256=shard.sha256))
    return replace(content, newest_version=_newest_version_at_commit(store, shard))


def _newest_version_at_commit(store: RunStore, shard: ShardRef) -> int | None:
    """What the shard's manifest says; None if that is gone or damaged, which must not stop a step that is decided."""
    try:
        manifest = read_manifest(store, run_layout.manifest(*run_layout.slot_of_shard(shard.key)))
    except (FileNotFoundError, DamagedDataError):
        return None
    return manifest.newest_version if manifest.key == shard.key else None


def freeze_step(
    store: RunStore,
    step: int,
    policy_version: int,
    manifests: Iterable[ShardManifest],
    skipped: Iterable[SkippedShard] = (),
) -> StepList:
    """Decides, once and for ever, which shards step `step` trains on; the first writer's list stays.

    Args:
      store: the run.
      step: the step.
      policy_version: the version that the step starts from.
      manifests: the step's shards, in any order.
      skipped: what the step goes without, with reasons.

    Returns:
      The list that holds: this one, or the one that an earlier attempt wrote.

    Raises:
      ValueError: a manifest is of another step, or an element is there twice.
      DamagedDataError: the list that is there cannot be read.
    """
    key = run_layout.step_list(step)
    ordered = sorted(manifests, key=lambda manifest: manifest.element_index)
    _refuse_mixed_steps(step, ordered)
    shards = tuple(ShardRef(key=m.key, sha256=m.sha256, content_sha256=m.content_sha256) for m in ordered)
    frozen = StepList(step=step, policy_version=policy_version, shards=shards, skipped=tuple(skipped))
    crash_point("before-step-list")
    if not store.put_new(key, frozen.to_json()):
        return StepList.from_json(store.get(key), key)
    crash_point("after-step-list")
    return frozen


def _refuse_mixed_steps(step: int, manifests: list[ShardManifest]) -> None:
    for manifest in manifests:
        if manifest.step != step:
            raise ValueError(f"{manifest.key} is a shard of step {manifest.step}, not of step {step}")
    elements = [manifest.element_index for manifest in manifests]
    if len(set(elements)) != len(elements):
        raise ValueError(f"step {step} has an element more than once: {elements}")


def write_dead_letters(store: RunStore, failures: Iterable[Failure]) -> int:
    """Writes one JSON file a failure and returns how many are new. What is there already stays: the first attempt's."""
    return sum(store.put_new(_dead_letter_key(failure), _dead_letter(failure)) for failure in failures)


def read_dead_letters(store: RunStore) -> list[Failure]:
    """Every failure of the run, in order of step, group, sample and stage.

    Raises:
      DamagedDataError: a file is not a dead letter.
    """
    return [_failure(store.get(key), key) for key in store.list("dead_letters/") if key.endswith(".json")]


def _dead_letter_key(failure: Failure) -> str:
    return run_layout.dead_letter(failure.id.step, failure.id.group_index, failure.id.sample_index, failure.stage)


def _dead_letter(failure: Failure) -> bytes:
    return to_json(asdict(failure), indent=1).encode("ascii")


def _failure(data: bytes, name: str) -> Failure:
    try:
        fields = json.loads(data)
        return Failure(
            **fields
            | {
                "id": TrajectoryId(**fields["id"]),
                "prompt": Prompt(**fields["prompt"]),
                "seed": tuple(fields["seed"]),
                "attempt_tokens": tuple(fields["attempt_tokens"]),
            }
        )
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedDataError(name, f"is not a dead letter: {error}.", "Remove the file.") from error


@dataclass
class WriteShards(beam.PTransform):
    """PackedBatch -> ShardManifest, one to one: what holds the batch's slot once it is committed; see `write_shard`.

    Args:
      recipe: the run's recipe.
      run: location of the run directory.
    """

    recipe: Recipe
    run: str

    def expand(self, batches: beam.PCollection[PackedBatch]) -> beam.PCollection[ShardManifest]:
        do = beam.ParDo(_WriteShardFn(self.recipe, self.run))
        return batches | "WriteShard" >> do.with_output_types(ShardManifest)


class _WriteShardFn(beam.DoFn):
    def __init__(self, recipe: Recipe, run: str):
        self._recipe = recipe
        self._run = run

    def setup(self) -> None:
        # Here and not above: whoever only builds the graph must not load the accelerator's library.
        from stages.runtime import runtime

        shared = runtime(self._run, self._recipe)
        self._store = shared.store
        self._policies = shared.policies
        self._recent = shared.recent_shards
        self._metrics = MetricsWriter(self._store, "shards")

    def process(self, packed: PackedBatch) -> Iterator[ShardManifest]:
        started = time.perf_counter()
        # Before the commit: a run that is killed right after it never comes back to this element.
        dead_letters = write_dead_letters(self._store, packed.failures)
        manifest, data = prepare_shard(packed, packed.prompts.run_id, self._policies.latest())
        self._measure(packed, ShardCommit(manifest, "written"), time.perf_counter() - started)
        commit = commit_prepared(self._store, manifest, data)
        if commit.outcome == "written":
            self._recent.put(manifest.sha256, packed)
        self._measure(packed, commit, time.perf_counter() - started)
        written = commit.outcome == "written"
        count_all(
            WriteShards,
            {
                "in-trajectories": manifest.trajectories,
                "in-tokens": manifest.tokens,
                commit.outcome.replace("_", "-"): 1,
                "out-bytes": manifest.bytes if written else 0,
                "dead-letters": dead_letters,
            },
        )
        yield commit.manifest

    def _measure(self, packed: PackedBatch, commit: ShardCommit, seconds: float) -> None:
        manifest = commit.manifest
        values = {
            "shards/bytes": manifest.bytes,
            "shards/trajectories": manifest.trajectories,
            "shards/tokens": manifest.tokens,
            "shards/already_committed": int(commit.outcome == "already_committed"),
            "shards/quarantined": int(commit.outcome == "quarantined"),
            "shards/dead_letters": len(packed.failures),  # whichever attempt wrote them
            "shards/seconds": seconds,
        }
        self._metrics.write(manifest.step, values, element=manifest.element_index)
