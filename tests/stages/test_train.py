"""A step is trained once, on a list that is frozen, and can be repeated exactly by whoever comes later."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jax_core.committed_trees import StalePublisherError
from jax_core.policies import tree_digest
from runners import colocated
from schemas import run_layout
from schemas.errors import DamagedDataError, UserError
from schemas.manifest import Pin, PolicyCommit, ShardManifest
from schemas.metrics import read_metrics
from schemas.recipe import Recipe
from schemas.records import ScoredRollout, ShardContent
from schemas.store import RunStore
from stages.runtime import Runtime, release
from stages.shards import freeze_step, frozen_step, list_manifests, read_shard
from stages.train import (
    drop_too_old,
    freeze_and_load,
    is_checkpoint,
    policies_to_keep,
    ready_step,
    settle,
    state_at,
    train_ready_steps,
    trainer_states_to_keep,
)
from tests.pipelines.tiny_runs import (
    ELEMENTS,
    STEPS,
    Killed,
    Outcome,
    begin,
    copied,
    kill_at,
    outcome,
    sample_everything,
    share_parts,
    tiny_recipe,
)

# All steps may be sampled by version 0, so a run can be sampled whole before anything is trained.
RECIPE = tiny_recipe(rollout={"max_lag": STEPS - 1})
SKIPPING = tiny_recipe(rollout={"max_lag": STEPS - 1}, trainer={"damaged_shards": "skip"})


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    share_parts(monkeypatch)


@pytest.fixture(scope="module")
def sampled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        share_parts(patch)
        run = tmp_path_factory.mktemp("sampled") / "run"
        begin(run, RECIPE)
        sample_everything(run, RECIPE)
        release(run)
        return run


@pytest.fixture(scope="module")
def trained(sampled_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What a trainer that nothing disturbs makes of the sampled run."""
    with pytest.MonkeyPatch.context() as patch:
        share_parts(patch)
        run = copied(sampled_once, tmp_path_factory.mktemp("trained") / "run")
        train_ready_steps(Runtime(run, RECIPE))
        return outcome(run)


@pytest.fixture
def run(sampled_once: Path, tmp_path: Path) -> Iterator[Path]:
    """A run of 4 steps that is sampled whole, by version 0, and not trained."""
    yield copied(sampled_once, tmp_path / "run")


def manifest_of(run: Path, step: int, element: int) -> ShardManifest:
    return list_manifests(RunStore.open(run), step)[element]


def flip_a_bit(run: Path, step: int, element: int) -> str:
    """Damages a shard; returns its key."""
    key = manifest_of(run, step, element).key
    path = run / key
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    return key


def with_run_id_of(run: Path, recipe: Recipe) -> Runtime:
    """The run's Runtime under another recipe, whose shards it takes for its own."""
    shared = Runtime(run, recipe)
    shared.run_id = Runtime(run, RECIPE).run_id
    return shared


# Which steps are ready


def test_a_step_is_ready_only_when_all_its_elements_are_there(run: Path) -> None:
    (run / run_layout.manifest(0, 1)).rename(run / "aside")
    shared = Runtime(run, RECIPE)
    assert ready_step(shared) is None
    assert train_ready_steps(shared) == []
    (run / "aside").rename(run / run_layout.manifest(0, 1))
    assert ready_step(shared) == 0


def test_nothing_is_ready_before_the_first_policy(tmp_path: Path) -> None:
    assert train_ready_steps(Runtime(tmp_path, RECIPE)) == []


def test_a_gap_in_the_steps_stops_training_before_it(run: Path) -> None:
    shutil.rmtree(run / run_layout.manifest_prefix(2))
    assert [report.step for report in train_ready_steps(Runtime(run, RECIPE))] == [0, 1]


def test_every_ready_step_is_trained_in_order_and_reported_with_what_it_published(run: Path) -> None:
    shared = Runtime(run, RECIPE)
    reports = train_ready_steps(shared)
    assert [report.step for report in reports] == list(range(STEPS))
    assert [report.digest for report in reports] == [shared.policies.commit(v + 1).digest for v in range(STEPS)]
    assert [report.shards for report in reports] == [ELEMENTS] * STEPS
    assert train_ready_steps(shared) == []
    events = read_metrics(shared.store, "train")
    assert [event.step for event in events] == list(range(STEPS))
    assert all(event.values["trainer/publish_seconds"] > 0 for event in events)
    assert [report.metrics["trainer/loss"] for report in reports] == [e.values["trainer/loss"] for e in events]


# Frozen lists


def test_a_step_trains_on_the_list_that_was_frozen_first(run: Path, trained: Outcome) -> None:
    shared = Runtime(run, RECIPE)
    only = manifest_of(run, 0, 1)
    freeze_step(shared.store, 0, 0, [only])
    report = train_ready_steps(shared)[0]
    assert report.shards == 1
    assert outcome(run).steps[0] == (only.content_sha256,)
    assert outcome(run).policies[1] != trained.policies[1]


def test_a_shard_that_is_lost_after_its_step_was_frozen_is_never_left_out(run: Path) -> None:
    shared = with_run_id_of(run, SKIPPING)
    with pytest.MonkeyPatch.context() as patch:
        disarm = kill_at(patch, "after-step-list", 1)
        with pytest.raises(Killed):
            train_ready_steps(shared)
        disarm()
    lost = manifest_of(run, 0, 0).key
    (run / lost).unlink()
    with pytest.raises(DamagedDataError) as error:
        train_ready_steps(with_run_id_of(run, SKIPPING))
    assert error.value.offender == lost


# Damaged and foreign data


def test_a_damaged_shard_is_refused_by_name_and_nothing_is_frozen(run: Path) -> None:
    key = flip_a_bit(run, 1, 0)
    shared = Runtime(run, RECIPE)
    with pytest.raises(DamagedDataError) as error:
        train_ready_steps(shared)
    assert error.value.offender == key
    assert shared.policies.latest() == 1
    assert frozen_step(shared.store, 1) is None


def test_a_missing_shard_is_refused_by_name(run: Path) -> None:
    key = manifest_of(run, 0, 1).key
    (run / key).unlink()
    with pytest.raises(DamagedDataError) as error:
        train_ready_steps(Runtime(run, RECIPE))
    assert error.value.offender == key


def test_where_the_recipe_says_so_a_damaged_shard_is_left_out_counted_and_named(run: Path, trained: Outcome) -> None:
    key = flip_a_bit(run, 1, 0)
    shared = with_run_id_of(run, SKIPPING)
    reports = train_ready_steps(shared)
    assert [report.skipped_shards for report in reports] == [0, 1, 0, 0]
    frozen = frozen_step(shared.store, 1)
    assert frozen is not None
    assert [skipped.key for skipped in frozen.skipped] == [key]
    assert read_metrics(shared.store, "train")[1].values["trainer/skipped_shards"] == 1
    assert outcome(run).policies[1] == trained.policies[1] and outcome(run).policies[2] != trained.policies[2]


def test_a_torn_manifest_is_damage_too(run: Path) -> None:
    key = run_layout.manifest(0, 0)
    (run / key).write_bytes((run / key).read_bytes()[:40])
    with pytest.raises(DamagedDataError) as error:
        train_ready_steps(Runtime(run, RECIPE))
    assert error.value.offender == key
    assert train_ready_steps(with_run_id_of(run, SKIPPING))[0].skipped_shards == 1


def test_a_step_with_nothing_to_train_still_publishes_the_next_version(run: Path) -> None:
    for element in range(ELEMENTS):
        flip_a_bit(run, 1, element)
    shared = with_run_id_of(run, SKIPPING)
    reports = train_ready_steps(shared)
    assert [report.step for report in reports] == list(range(STEPS))
    assert reports[1].shards == 0
    assert reports[1].metrics["trainer/trained_tokens"] == 0
    assert reports[1].digest == reports[0].digest != reports[2].digest


def test_a_shard_of_another_run_is_refused_even_where_damaged_ones_are_skipped(run: Path) -> None:
    with pytest.raises(UserError, match="belongs to run") as error:
        train_ready_steps(Runtime(run, SKIPPING))
    assert error.value.offender == run_layout.manifest(0, 0)


# Lag at consumption


def contents_of(run: Path, step: int) -> list[ShardContent]:
    store = RunStore.open(run)
    return [read_shard(store, manifest) for manifest in list_manifests(store, step)]


def aged(sample: ScoredRollout, version: int) -> ScoredRollout:
    spans = tuple(replace(span, policy_version=version) for span in sample.rollout.versions)
    return replace(sample, rollout=replace(sample.rollout, versions=spans))


def test_a_group_is_dropped_whole_when_one_token_of_it_is_too_old(run: Path) -> None:
    content = contents_of(run, 3)[0]
    fresh = replace(
        content, groups=tuple(replace(g, samples=tuple(aged(s, 2) for s in g.samples)) for g in content.groups)
    )
    first, second = fresh.groups
    mixed = replace(fresh, groups=(first, replace(second, samples=(*second.samples[:-1], aged(second.samples[-1], 1)))))
    assert drop_too_old([fresh], step=3, max_lag=1).too_old_groups == 0
    dropped = drop_too_old([mixed], step=3, max_lag=1)
    assert dropped.too_old_groups == 1
    assert dropped.contents[0].groups == (first,)
    assert dropped.contents[0].placements == content.placements[:1]
    assert dropped.contents[0].rows == content.rows
    assert drop_too_old([mixed], step=3, max_lag=2).too_old_groups == 0


def test_a_group_of_tombstones_has_no_age(run: Path) -> None:
    content = contents_of(run, 3)[0]
    group = content.groups[0]
    dead = replace(
        group,
        samples=tuple(replace(s, rollout=replace(s.rollout, versions=(), status="failed")) for s in group.samples),
    )
    assert drop_too_old([replace(content, groups=(dead,))], step=9, max_lag=0).too_old_groups == 0


def test_what_is_too_old_when_it_is_consumed_is_dropped_and_counted(run: Path, trained: Outcome) -> None:
    # The shards were sampled by version 0 throughout; under this recipe step 2 may not use them, nor step 3.
    shared = with_run_id_of(run, tiny_recipe(rollout={"max_lag": 1}))
    reports = train_ready_steps(shared)
    assert [report.metrics["trainer/too_old_groups"] for report in reports] == [0, 0, 4, 4]
    assert [report.metrics["trainer/lag_steps/max"] for report in reports] == [0, 1, 0, 0]
    assert reports[1].digest == trained.policies[2] == reports[2].digest == reports[3].digest


def test_a_pin_that_breaks_the_bound_does_not_get_past_the_trainer(tmp_path: Path) -> None:
    pin = Pin(step=1, element_index=0, policy_version=0)  # under max_lag 0

    def pin_too_old(commit: PolicyCommit) -> None:
        RunStore.open(tmp_path).put_new(run_layout.pin(1, 0), pin.to_json())

    colocated.run(tiny_recipe(), tmp_path, after_warm_start=[pin_too_old])
    events = read_metrics(RunStore.open(tmp_path), "train")
    assert [event.values["trainer/too_old_groups"] for event in events] == [0, 2, 0, 0]
    assert max(event.values["trainer/lag_steps/max"] for event in events) == 0


# Where lag arose


def commit_as_of(run: Path, step: int, element: int, newest_version: int | None) -> None:
    """Makes a shard one that was committed when `newest_version` was the newest policy."""
    manifest = manifest_of(run, step, element).model_copy(update={"newest_version": newest_version})
    RunStore.open(run).put(run_layout.manifest(step, element), manifest.to_json())


def test_lag_is_divided_at_the_commit_of_the_shard(run: Path) -> None:
    # Version 0 sampled everything. Of step 3 one shard was committed under version 1, the other under version 3.
    commit_as_of(run, 3, 0, newest_version=1)
    commit_as_of(run, 3, 1, newest_version=3)
    train_ready_steps(Runtime(run, RECIPE))
    values = [event.values for event in read_metrics(RunStore.open(run), "train")]
    assert [v["trainer/lag_steps/max"] for v in values] == [0, 1, 2, 3]
    assert [v["trainer/lag_in_flight_steps/max"] for v in values] == [0, 0, 0, 3]
    assert [v["trainer/lag_in_queue_steps/max"] for v in values] == [0, 1, 2, 2]
    # Each element has as many trajectories as the other.
    assert (values[3]["trainer/lag_in_flight_steps/mean"], values[3]["trainer/lag_in_queue_steps/mean"]) == (2, 1)


def test_where_one_shard_does_not_say_when_it_was_committed_the_division_is_unknown(run: Path) -> None:
    commit_as_of(run, 2, 1, newest_version=None)
    train_ready_steps(Runtime(run, RECIPE))
    values = [event.values for event in read_metrics(RunStore.open(run), "train")]
    for name in ("lag_in_flight_steps/mean", "lag_in_flight_steps/max", "lag_in_queue_steps/mean"):
        assert [math.isnan(v[f"trainer/{name}"]) for v in values] == [False, False, True, False]
    assert [v["trainer/lag_steps/mean"] for v in values] == [0, 1, 2, 3]


def test_a_step_that_is_tried_again_knows_when_its_shards_were_committed(run: Path) -> None:
    commit_as_of(run, 3, 0, newest_version=1)
    shared = Runtime(run, RECIPE)
    _, first = freeze_and_load(shared, 3)
    _, again = freeze_and_load(shared, 3)
    assert [content.newest_version for content in first] == [content.newest_version for content in again] == [1, 0]
    (run / run_layout.manifest(3, 0)).unlink()
    _, without = freeze_and_load(shared, 3)
    assert [content.newest_version for content in without] == [None, 0]


# Resuming


@pytest.mark.parametrize("stop_after", range(1, STEPS))
def test_a_trainer_that_starts_anew_goes_on_exactly_from_its_newest_checkpoint(
    stop_after: int, run: Path, trained: Outcome
) -> None:
    shutil.move(run / run_layout.manifest_prefix(stop_after), run / "aside")
    train_ready_steps(Runtime(run, RECIPE))
    shutil.move(run / "aside", run / run_layout.manifest_prefix(stop_after))
    assert [report.step for report in train_ready_steps(Runtime(run, RECIPE))] == list(range(stop_after, STEPS))
    assert outcome(run) == trained


def test_without_any_checkpoint_the_whole_run_is_repeated(run: Path, trained: Outcome) -> None:
    train_ready_steps(Runtime(run, RECIPE))
    shutil.rmtree(run / "trainer")
    shared = Runtime(run, RECIPE)
    state = state_at(shared, STEPS)
    assert tree_digest(state.params) == trained.policies[STEPS]
    # And what was missing is there again.
    assert shared.trainer_states.newest_at_most(STEPS) == STEPS


def test_what_a_killed_trainer_owed_is_settled_by_the_next(
    run: Path, trained: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disarm = kill_at(monkeypatch, "after-commit", STEPS)
    with pytest.raises(Killed):
        train_ready_steps(Runtime(run, RECIPE))
    disarm()
    shared = Runtime(run, RECIPE)
    assert (shared.policies.latest(), shared.trainer_states.newest_at_most(STEPS)) == (STEPS, STEPS - 2)
    settle(shared)
    assert shared.trainer_states.newest_at_most(STEPS) == STEPS
    assert set(shared.policies.versions()) <= policies_to_keep(STEPS, RECIPE)
    assert outcome(run) == trained
    settle(Runtime(tmp_path / "new", RECIPE))  # owes nothing
    assert not (tmp_path / "new").exists()


def test_a_step_whose_list_is_gone_cannot_be_repeated_and_is_named(run: Path) -> None:
    train_ready_steps(Runtime(run, RECIPE))
    shutil.rmtree(run / "trainer")
    (run / run_layout.step_list(1)).unlink()
    with pytest.raises(DamagedDataError) as error:
        state_at(Runtime(run, RECIPE), STEPS)
    assert error.value.offender == run_layout.step_list(1)


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(run: Path, trained: Outcome) -> None:
    train_ready_steps(Runtime(run, RECIPE))
    for path in (run / run_layout.trainer_state(STEPS)).rglob("*"):
        if path.is_file() and path.name != "COMMIT.json":
            path.write_bytes(b"")
    state = state_at(Runtime(run, RECIPE), STEPS)
    assert tree_digest(state.params) == trained.policies[STEPS]


def test_a_run_that_does_not_repeat_exactly_is_refused_with_both_digests(run: Path) -> None:
    shared = Runtime(run, RECIPE)
    shutil.move(run / run_layout.manifest_prefix(1), run / "aside")
    train_ready_steps(shared)
    shutil.rmtree(run / run_layout.policy(1))
    Runtime(run, RECIPE).policies.publish(1, shared.policies.load(0), source="step")  # of a machine with other bits
    with pytest.raises(UserError, match="other bits") as error:
        state_at(Runtime(run, RECIPE), 1)
    assert error.value.offender == "policies/00000001"


def test_a_second_trainer_with_other_results_loses_and_stops(run: Path) -> None:
    shared = Runtime(run, RECIPE)
    shared.policies.latest()
    theirs = shared.policies.load(0)
    update = shared.trainer.update

    class MeanwhileAnother:
        """The shared trainer, while somebody else publishes other weights for the same step."""

        def __getattr__(self, name: str) -> object:
            return getattr(type(shared).trainer, name)

        def update(self, state: object, contents: object) -> object:
            Runtime(run, RECIPE).policies.publish(1, theirs, source="step")
            return update(state, contents)

    shared.trainer = MeanwhileAnother()  # type: ignore[assignment]
    with pytest.raises(StalePublisherError):
        train_ready_steps(shared)


def test_many_threads_that_find_a_step_ready_train_it_once(run: Path, trained: Outcome) -> None:
    shared = Runtime(run, RECIPE)
    reports: list[int] = []
    threads = [
        threading.Thread(target=lambda: reports.extend(r.step for r in train_ready_steps(shared))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(reports) == list(range(STEPS))
    assert outcome(run) == trained


# Retention


def test_the_first_policy_every_checkpoints_and_the_newest_are_kept(run: Path) -> None:
    recipe = tiny_recipe(trainer={"steps": 100, "checkpoint_every": 10, "keep_policies": 3})
    assert policies_to_keep(25, recipe) == {0, 10, 20, 23, 24, 25}
    assert trainer_states_to_keep(25, recipe) == {10, 20}
    assert trainer_states_to_keep(5, recipe) == set()
    shared = Runtime(run, RECIPE)
    train_ready_steps(shared)
    assert shared.policies.versions() == [0, 1, 2, 3, 4]  # max_lag 3 outweighs keep_policies 2


def test_no_policy_that_the_lag_bound_may_still_ask_for_is_pruned() -> None:
    for max_lag in range(5):
        recipe = tiny_recipe(rollout={"max_lag": max_lag}, trainer={"steps": 100, "keep_policies": 1})
        for newest in range(50):
            needed = range(max(0, newest - max_lag), newest + 1)
            assert policies_to_keep(newest, recipe).issuperset(needed)


def test_the_trainers_state_is_saved_at_the_last_step_whatever_the_interval() -> None:
    recipe = tiny_recipe(trainer={"steps": 7, "checkpoint_every": 3})
    assert [version for version in range(1, 8) if is_checkpoint(version, recipe)] == [3, 6, 7]
