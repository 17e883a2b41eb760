"""Shards: committed once, whatever is killed, repeated, raced or damaged."""

from __future__ import annotations

import hashlib
import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from threading import Barrier

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.metrics import MetricsFilter
from apache_beam.options.pipeline_options import PipelineOptions

from schemas import run_layout, trajectory
from schemas.errors import DamagedDataError, UserError
from schemas.manifest import ShardManifest, SkippedShard
from schemas.metrics import read_metrics
from schemas.records import PackedBatch, Rollout, ScoredBatch, ShardContent
from schemas.store import RunStore
from stages.group import GroupByPrompt, group
from stages.pack import Pack, pack
from stages.shards import (
    RecentContents,
    WriteShards,
    commit_shard,
    committed_elements,
    freeze_step,
    frozen_step,
    list_manifests,
    orphans,
    read_dead_letters,
    read_shard,
    sweep_orphans,
    write_dead_letters,
    write_shard,
)
from tests.stages.worked_batches import (
    RUN,
    failed,
    failure,
    freeze_until_killed,
    prompt_batch,
    recipe,
    rollout,
    scored,
    scored_batch,
    write_until_killed,
)

# Each child is a fork of a process that has imported the stages and has no threads: a kill costs milliseconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.stages.worked_batches", "stages.shards"])


def packed(batch: ScoredBatch | None = None, **options: float) -> PackedBatch:
    return pack(group(batch or scored_batch(**options), samples=4), row_tokens=8)


def changed(batch: PackedBatch, reward: float) -> PackedBatch:
    """The same identities with another reward: what a retry must never bring."""
    first, *others = batch.groups[0].samples
    other = replace(batch.groups[0], samples=(replace(first, reward=reward), *others))
    return replace(batch, groups=(other, *batch.groups[1:]))


def files(store: RunStore) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list("")}


def assert_same_content(content: ShardContent, batch: PackedBatch) -> None:
    """Everything that the trainer reads came back as it went in."""
    assert (content.step, content.element_index) == (batch.prompts.step, batch.prompts.element_index)
    assert (content.row_tokens, content.rows, content.placements) == (batch.row_tokens, batch.rows, batch.placements)
    for ours, theirs in zip(content.groups, batch.groups, strict=True):
        assert (ours.group_index, ours.prompt_id) == (theirs.group_index, theirs.prompt_id)
        for read, written in zip(ours.samples, theirs.samples, strict=True):
            assert (read.reward, dict(read.components)) == (written.reward, dict(written.components))
            assert_same_rollout(read.rollout, written.rollout)


def assert_same_rollout(read: Rollout, written: Rollout) -> None:
    for name in ("tokens", "loss_mask", "sampler_logprobs"):
        np.testing.assert_array_equal(getattr(read, name), getattr(written, name))
    for name in ("id", "prompt_length", "versions", "status", "error", "stop_reason", "sampling"):
        assert getattr(read, name) == getattr(written, name)


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore.open(tmp_path / "run")


# --- a shard, written and read ---


def test_a_shard_comes_back_as_it_was_packed(store):
    batch = packed()
    manifest = write_shard(store, batch, RUN)
    assert_same_content(read_shard(store, manifest), batch)
    assert list_manifests(store, 7) == [manifest]


def test_tombstones_and_samples_that_never_came_are_in_the_shard(store):
    arrived = scored_batch(groups=2)
    rollouts = (*arrived.rollouts[:2], scored(failed(0, 2)), *arrived.rollouts[5:])
    batch = packed(replace(arrived, rollouts=rollouts))
    manifest = write_shard(store, batch, RUN)
    assert (manifest.groups, manifest.trajectories, manifest.tombstones) == (2, 8, 3)
    assert_same_content(read_shard(store, manifest), batch)


def test_environment_text_after_the_last_sampled_token_is_in_the_shard_and_in_no_row(store):
    # Two branches of 4 sampled tokens share a row of 8; what the environment wrote after them would not fit.
    samples = [scored(rollout(0, i, answer=4, tail=6)) for i in range(4)]
    batch = packed(ScoredBatch(prompt_batch(1), tuple(samples)))
    assert batch.rows == 2
    assert_same_content(read_shard(store, write_shard(store, batch, RUN)), batch)


def test_an_element_that_lost_everything_is_a_shard_too(store):
    manifest = write_shard(store, packed(ScoredBatch(prompt_batch(2), ())), RUN)
    assert (manifest.trajectories, manifest.tombstones, manifest.rows, manifest.sampled_tokens) == (8, 8, 0, 0)
    assert (manifest.policy_version_min, manifest.policy_version_max) == (None, None)
    assert read_shard(store, manifest).rows == 0


def test_a_manifest_counts_what_a_recount_by_hand_finds(store):
    manifest = write_shard(store, packed(groups=2), RUN)
    data = store.get(manifest.key)
    assert manifest.bytes == len(data)
    # Samples of a group have 1, 2, 3 and 4 sampled tokens after a prompt of 3; rows of 8 hold 4 + 3 + 1 and 2.
    assert (manifest.tokens, manifest.sampled_tokens, manifest.rows) == (2 * (3 * 4 + 10), 2 * 10, 2 * 2)
    assert (manifest.policy_version_min, manifest.policy_version_max) == (5, 5)
    assert manifest.key == run_layout.shard(7, 0, manifest.sha256)


def test_two_runs_whose_clocks_and_names_differ_have_one_content_digest():
    ours, theirs = packed(started_at=1000.0), packed(started_at=2000.0)
    theirs = replace(theirs, prompts=replace(theirs.prompts, run_id="run-b"))
    first = write_shard(RunStore.in_memory(), ours, RUN)
    second = write_shard(RunStore.in_memory(), theirs, "run-b")
    assert first.content_sha256 == second.content_sha256
    assert first.sha256 != second.sha256


def test_an_invalid_batch_is_refused_and_writes_nothing(store):
    batch = packed()
    first = batch.groups[0].samples[0]
    wrong = replace(first, rollout=replace(first.rollout, sampler_logprobs=np.full(4, np.nan, np.float32)))
    groups = (replace(batch.groups[0], samples=(wrong, *batch.groups[0].samples[1:])), batch.groups[1])
    with pytest.raises(trajectory.InvalidTrajectory):
        write_shard(store, replace(batch, groups=groups), RUN)
    assert store.list("") == []


# --- tried again ---


def test_a_second_attempt_with_the_same_content_writes_nothing(store):
    first = write_shard(store, packed(started_at=1000.0), RUN)
    before = files(store)
    again = commit_shard(store, packed(started_at=2000.0), RUN)
    assert (again.manifest, again.outcome) == (first, "already_committed")
    assert files(store) == before


def test_of_two_contents_the_first_stays_and_the_second_is_in_quarantine(store):
    batch = packed()
    first = write_shard(store, batch, RUN)
    before = files(store)
    newcomer = changed(batch, reward=3.5)
    second = commit_shard(store, newcomer, RUN)
    assert (second.manifest, second.outcome) == (first, "quarantined")
    added = {key: data for key, data in files(store).items() if key not in before}
    assert {key: files(store)[key] for key in before} == before
    (key,) = added
    assert key.startswith("quarantine/step-00000007/0000-")
    assert_same_content(trajectory.decode(trajectory.from_bytes(added[key], name=key)), newcomer)
    assert_same_content(read_shard(store, first), batch)


def test_a_slot_of_another_run_is_refused_by_name(store):
    write_shard(store, packed(), RUN)
    before = files(store)
    batch = packed()
    other = replace(batch, prompts=replace(batch.prompts, run_id="run-b"))
    with pytest.raises(UserError, match=r"manifests/step-00000007/0000\.json.*'run-a'.*'run-b'"):
        write_shard(store, other, "run-b")
    with pytest.raises(UserError, match="'run-a'"):
        write_shard(store, batch, "run-b")
    assert files(store) == before


def test_sixteen_threads_on_one_slot_make_one_manifest(store):
    barrier = Barrier(16)
    batches = [packed(started_at=float(1000 + attempt % 4)) for attempt in range(16)]

    def attempt(batch: PackedBatch) -> ShardManifest:
        barrier.wait()
        return write_shard(store, batch, RUN)

    with ThreadPoolExecutor(16) as pool:
        manifests = list(pool.map(attempt, batches))
    assert list_manifests(store) == [manifests[0]]
    assert all(manifest == manifests[0] for manifest in manifests)
    assert orphans(store) == []
    assert store.list("quarantine/") == []
    assert_same_content(read_shard(store, manifests[0]), batches[0])


def test_sixteen_threads_with_different_contents_leave_one_and_quarantine_the_others():
    store = RunStore.in_memory()
    barrier = Barrier(16)

    def attempt(number: int) -> ShardManifest:
        barrier.wait()
        return write_shard(store, changed(packed(), reward=float(number)), RUN)

    with ThreadPoolExecutor(16) as pool:
        manifests = list(pool.map(attempt, range(16)))
    (manifest,) = list_manifests(store)
    assert all(theirs == manifest for theirs in manifests)
    assert orphans(store) == []
    assert len(store.list("quarantine/")) == 15
    winner = read_shard(store, manifest).groups[0].samples[0].reward
    assert_same_content(read_shard(store, manifest), changed(packed(), reward=winner))


# --- killed ---


def kill_at(point: str, action: Callable[..., None], *arguments: object) -> None:
    """Runs `action` in a process of its own, which dies at a crash point."""
    process = PROCESSES.Process(target=action, args=(f"{point}:1", *arguments))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    "point, left_behind, outcome",
    [
        ("shard-before-data", (0, 0), "written"),
        ("shard-before-manifest", (1, 0), "written"),
        ("after-manifest", (1, 1), "already_committed"),
    ],
)
def test_a_writer_killed_at_any_point_and_tried_again_commits_once(store, point, left_behind, outcome):
    batch = packed()
    kill_at(point, write_until_killed, store.location, batch)
    committed = list_manifests(store, 7)
    assert (len(orphans(store)) + len(committed), len(committed)) == left_behind

    retried = commit_shard(store, batch, RUN)
    assert retried.outcome == outcome
    assert list_manifests(store, 7) == [retried.manifest]
    assert_same_content(read_shard(store, retried.manifest), batch)
    assert orphans(store) == []
    assert len(store.list("trajectories/")) == 2


def test_what_a_killed_writer_left_is_listed_and_never_read(store):
    kill_at("shard-before-manifest", write_until_killed, store.location, packed(started_at=1.0))
    (left,) = orphans(store)
    assert list_manifests(store) == []
    manifest = write_shard(store, packed(started_at=2.0), RUN)
    assert orphans(store) == [left]
    assert manifest.key != left


def test_what_a_killed_writer_left_is_swept_and_what_may_be_committed_is_not(store):
    kill_at("shard-before-manifest", write_until_killed, store.location, packed(started_at=1.0))
    (left,) = orphans(store)
    manifest = write_shard(store, packed(started_at=2.0), RUN)
    slot = run_layout.manifest(7, 0)
    record = store.get(slot)
    store.put(slot, record[:-20])
    sweep_orphans(store)
    assert {left, manifest.key} <= set(store.list("trajectories/")), "a damaged manifest may name either"
    store.put(slot, record)
    sweep_orphans(store)
    assert store.list("trajectories/") == sorted([slot, manifest.key])


def test_data_that_was_damaged_before_it_was_committed_is_written_again(store):
    kill_at("shard-before-manifest", write_until_killed, store.location, packed())
    (left,) = orphans(store)
    store.put(left, store.get(left)[:100])
    manifest = write_shard(store, packed(), RUN)
    assert manifest.key == left
    assert_same_content(read_shard(store, manifest), packed())


@pytest.mark.parametrize("point, decided", [("before-step-list", False), ("after-step-list", True)])
def test_a_step_list_is_there_whole_or_not_at_all_when_its_writer_is_killed(store, point, decided):
    manifest = write_shard(store, packed(), RUN)
    kill_at(point, freeze_until_killed, store.location, 7)
    assert (frozen_step(store, 7) is not None) == decided
    frozen = freeze_step(store, 7, 7, [manifest])
    assert frozen == frozen_step(store, 7)
    assert [shard.key for shard in frozen.shards] == [manifest.key]


# --- damaged ---


def bit_flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[: len(data) // 2], id="torn in the middle"),
        pytest.param(lambda data: data[:-1], id="one byte short"),
        pytest.param(lambda data: data + b"\0", id="one byte long"),
        pytest.param(lambda data: bit_flipped(data, len(data) // 2), id="one bit in the middle"),
        pytest.param(lambda data: bit_flipped(data, 0), id="first bit"),
        pytest.param(lambda data: bit_flipped(data, len(data) - 1), id="last byte"),
    ],
)
def test_a_damaged_shard_is_named_and_nothing_of_it_is_read(store, damage: Callable[[bytes], bytes]):
    manifest = write_shard(store, packed(), RUN)
    store.put(manifest.key, damage(store.get(manifest.key)))
    with pytest.raises(DamagedDataError) as error:
        read_shard(store, manifest)
    assert error.value.offender == manifest.key


def test_what_a_process_still_holds_of_its_own_shard_is_what_reading_gives(store):
    manifest, recent = write_shard(store, packed(), RUN), RecentContents()
    recent.put(manifest.sha256, packed())
    at_hand = read_shard(store, manifest, recent)
    read = read_shard(store, manifest, recent)  # given out once, so this one is decoded
    assert at_hand.groups[0].samples[0].rollout.tokens.base is not read.groups[0].samples[0].rollout.tokens.base
    assert_same_content(at_hand, packed())
    assert_same_content(read, packed())


def test_a_damaged_shard_is_named_though_its_content_is_still_held(store):
    manifest, recent = write_shard(store, packed(), RUN), RecentContents()
    recent.put(manifest.sha256, packed())
    store.put(manifest.key, bytes([store.get(manifest.key)[0] ^ 1]) + store.get(manifest.key)[1:])
    with pytest.raises(DamagedDataError):
        read_shard(store, manifest, recent)


def test_of_contents_still_held_the_oldest_goes_first(store):
    recent = RecentContents(most=2)
    for sha256 in ("a", "b", "c"):
        recent.put(sha256, packed())
    assert [recent.take(sha256) is not None for sha256 in ("a", "b", "c", "c")] == [False, True, True, False]


def test_a_truncated_shard_says_how_long_it_is_and_should_be(store):
    manifest = write_shard(store, packed(), RUN)
    store.put(manifest.key, store.get(manifest.key)[:100])
    with pytest.raises(DamagedDataError, match=f"100 bytes, and its manifest says {manifest.bytes}"):
        read_shard(store, manifest)


def test_a_shard_that_is_gone_is_named(store):
    manifest = write_shard(store, packed(), RUN)
    store.delete(manifest.key)
    with pytest.raises(DamagedDataError) as error:
        read_shard(store, manifest)
    assert error.value.offender == manifest.key


def committed_with(store: RunStore, manifest: ShardManifest, table: pa.Table) -> ShardManifest:
    """The manifest of a writer that committed `table` in good order, digest and all."""
    data = trajectory.to_bytes(table)
    store.put(manifest.key, data)
    return manifest.model_copy(update={"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})


def test_a_shard_of_a_newer_version_is_refused_by_name_and_version(store):
    manifest = write_shard(store, packed(), RUN)
    table = trajectory.encode(packed())
    newer = table.replace_schema_metadata({**table.schema.metadata, b"version": b"99"})
    with pytest.raises(DamagedDataError, match="99") as error:
        read_shard(store, committed_with(store, manifest, newer))
    assert error.value.offender == manifest.key


def test_a_shard_whose_digest_is_right_and_content_is_not_is_named(store):
    manifest = write_shard(store, packed(), RUN)
    incomplete = trajectory.encode(packed()).slice(1)
    with pytest.raises(DamagedDataError) as error:
        read_shard(store, committed_with(store, manifest, incomplete))
    assert error.value.offender == manifest.key


def test_a_shard_in_another_elements_place_is_named(store):
    manifest = write_shard(store, packed(), RUN)
    other = trajectory.encode(packed(element_index=1, first_group_index=2))
    with pytest.raises(DamagedDataError, match="element 1 of step 7"):
        read_shard(store, committed_with(store, manifest, other))


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: b"", lambda data: b"\xff" + data])
def test_a_damaged_manifest_is_named_by_readers_and_writers(store, damage):
    write_shard(store, packed(), RUN)
    key = run_layout.manifest(7, 0)
    store.put(key, damage(store.get(key)))
    for attempt in (lambda: list_manifests(store, 7), lambda: write_shard(store, packed(), RUN)):
        with pytest.raises(DamagedDataError) as error:
            attempt()
        assert error.value.offender == key


def test_a_manifest_in_anothers_place_is_named(store):
    manifest = write_shard(store, packed(), RUN)
    store.put(run_layout.manifest(7, 3), manifest.to_json())
    with pytest.raises(DamagedDataError, match=r"0003\.json.*element 0 of step 7"):
        list_manifests(store)


# --- steps ---


def write_elements(store: RunStore, step: int, elements: list[int]) -> list[ShardManifest]:
    return [
        write_shard(store, packed(groups=1, step=step, element_index=e, first_group_index=e), RUN) for e in elements
    ]


def test_manifests_are_listed_in_order_of_step_and_element(store):
    late = write_elements(store, 8, [1, 0])
    early = write_elements(store, 7, [2, 0])
    assert list_manifests(store) == [early[1], early[0], late[1], late[0]]
    assert list_manifests(store, 8) == [late[1], late[0]]
    assert list_manifests(store, 9) == []
    assert (committed_elements(store, 7), committed_elements(store, 9)) == ({0, 2}, set())


def test_a_step_list_is_in_order_of_elements_and_the_first_writers_stays(store):
    manifests = write_elements(store, 7, [2, 0, 1])
    assert frozen_step(store, 7) is None
    frozen = freeze_step(store, 7, 7, manifests[:2])
    assert [shard.key for shard in frozen.shards] == [manifests[1].key, manifests[0].key]
    assert (frozen.step, frozen.policy_version, frozen.skipped) == (7, 7, ())
    assert freeze_step(store, 7, 7, manifests) == frozen == frozen_step(store, 7)


def test_a_step_list_says_what_was_skipped_and_why(store):
    damaged, whole = write_elements(store, 7, [0, 1])
    skipped = SkippedShard(key=damaged.key, reason="one bit differs")
    freeze_step(store, 7, 7, [whole], [skipped])
    assert frozen_step(store, 7).skipped == (skipped,)


def test_a_step_list_of_another_steps_shard_or_of_one_twice_is_refused(store):
    (manifest,) = write_elements(store, 7, [0])
    with pytest.raises(ValueError, match="step 7, not of step 8"):
        freeze_step(store, 8, 8, [manifest])
    with pytest.raises(ValueError, match="more than once"):
        freeze_step(store, 7, 7, [manifest, manifest])
    assert store.list("steps/") == []


# --- dead letters ---


def test_a_dead_letter_holds_what_is_needed_to_try_again(store):
    letters = [failure(0, 1), replace(failure(0, 1), stage="reward"), failure(1, 0)]
    assert write_dead_letters(store, letters) == 3
    read = read_dead_letters(store)
    assert [(letter.id.path, letter.stage) for letter in read] == [
        ("7/0/1", "reward"),
        ("7/0/1", "rollout"),
        ("7/1/0", "rollout"),
    ]
    assert asdict(read[2]) == asdict(letters[2])


def test_a_dead_letter_written_again_changes_nothing(store):
    write_dead_letters(store, [failure(0, 1)])
    before = files(store)
    assert write_dead_letters(store, [failure(0, 1, error="another attempt's words")]) == 0
    assert files(store) == before


def test_half_an_emoji_in_an_error_is_no_error(store):
    write_dead_letters(store, [failure(0, 1, error="answered \ud83d")])
    (letter,) = read_dead_letters(store)
    assert letter.error == "answered \ud83d"


def test_a_torn_dead_letter_is_named(store):
    write_dead_letters(store, [failure(0, 1)])
    (key,) = store.list("dead_letters/")
    store.put(key, store.get(key)[:-10])
    with pytest.raises(DamagedDataError) as error:
        read_dead_letters(store)
    assert error.value.offender == key


# --- the transforms ---


def run_stages(location: Path, batches: list[ScoredBatch], *options: str) -> dict[str, int]:
    """Runs group, pack and shards over `batches`; returns the counters."""
    pipeline = beam.Pipeline(runner="FnApiRunner", options=PipelineOptions(list(options)))
    elements = pipeline | beam.Create(batches)
    for stage in (GroupByPrompt, Pack, WriteShards):
        elements = elements | stage(recipe(samples=4, row_tokens=8), str(location))
    elements | beam.Map(lambda manifest: [][0] if manifest.step != 7 else None)
    result = pipeline.run()
    result.wait_until_finish()
    return {c.key.metric.name: c.committed for c in result.metrics().query(MetricsFilter())["counters"]}


def two_elements() -> list[ScoredBatch]:
    lost = scored_batch(groups=2, element_index=1, first_group_index=2)
    lost = replace(lost, rollouts=lost.rollouts[1:], failures=(failure(2, 0),))
    return [scored_batch(groups=2), lost]


def test_bundles_that_are_run_twice_change_no_shard(tmp_path):
    once, twice = RunStore.open(tmp_path / "once"), RunStore.open(tmp_path / "twice")
    run_stages(tmp_path / "once", two_elements())
    run_stages(tmp_path / "twice", two_elements(), "--direct_runner_bundle_repeat=1")
    assert committed_elements(twice, 7) == {0, 1}
    assert [m.sha256 for m in list_manifests(twice)] == [m.sha256 for m in list_manifests(once)]
    assert orphans(twice) == twice.list("quarantine/") == []
    shards = [key for key in files(twice) if key.endswith(".arrow") or key.startswith("dead_letters/")]
    assert {key: twice.get(key) for key in shards} == {key: once.get(key) for key in shards}
    assert len(shards) == 3
    # The repetition really happened: its attempts found the slots taken.
    assert [e.values["shards/already_committed"] for e in read_metrics(twice, "shards")] == [1, 1]


def test_the_stages_count_and_measure_every_element(tmp_path):
    counters = run_stages(tmp_path, two_elements())
    store = RunStore.open(tmp_path)
    manifests = list_manifests(store)
    assert counters["written"] == 2
    assert counters["dead-letters"] == 1
    assert counters["out-bytes"] == sum(manifest.bytes for manifest in manifests)
    events = sorted(read_metrics(store, "shards"), key=lambda event: event.values["shards/dead_letters"])
    assert [event.values["shards/bytes"] for event in events] == [manifest.bytes for manifest in manifests]
    assert [event.values["shards/dead_letters"] for event in events] == [0, 1]
    assert [event.values["shards/trajectories"] for event in events] == [8, 8]
    assert [letter.id.path for letter in read_dead_letters(store)] == ["7/2/0"]


def test_dead_letters_are_written_even_if_the_shard_was_committed_by_an_attempt_that_died(tmp_path):
    store = RunStore.open(tmp_path)
    lost = two_elements()[1]
    write_shard(store, packed(lost), RUN)
    run_stages(tmp_path, [lost])
    assert [letter.id.path for letter in read_dead_letters(store)] == ["7/2/0"]
    assert [event.values["shards/already_committed"] for event in read_metrics(store, "shards")] == [1]
