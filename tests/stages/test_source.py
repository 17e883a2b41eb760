"""The source admits what the lag bound allows, pins what it admits, and passes over what is there."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apache_beam.internal import pickler
from apache_beam.io.iobase import RestrictionTracker
from apache_beam.io.restriction_trackers import OffsetRange
from apache_beam.utils.timestamp import Duration

from schemas import run_layout
from schemas.errors import UserError
from schemas.manifest import Pin
from schemas.metrics import read_metrics
from schemas.recipe_io import recipe_to_json
from schemas.records import PromptBatch
from schemas.store import RunStore
from stages.prompts import source as source_module
from stages.prompts.shares import Share
from stages.prompts.source import (
    Deferral,
    _AdmitPromptsFn,
    admit,
    open_positions,
    pin_version,
    prompt_batch,
)
from stages.runtime import Runtime, release, run_id_of, runtime
from tests.pipelines.tiny_runs import ELEMENTS, STEPS, share_parts, tiny_recipe


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    share_parts(monkeypatch)


@pytest.fixture
def shared(tmp_path: Path) -> Runtime:
    release(tmp_path)
    return runtime(tmp_path, tiny_recipe(rollout={"max_lag": 1}))


def publish_up_to(shared: Runtime, newest: int) -> None:
    first = shared.policies.latest()
    for version in range(0 if first is None else first + 1, newest + 1):
        shared.policies.publish(version, {"w": np.full(2, version, np.float32)}, source="step")


def commit_shard_of(shared: Runtime, step: int, element: int) -> None:
    shared.store.put_new(run_layout.manifest(step, element), b"{}")


def source_of(shared: Runtime) -> _AdmitPromptsFn:
    return _AdmitPromptsFn(shared.recipe, shared.run)


class Claims:
    """A restriction tracker as a runner hands it to `process`: it can claim, and take back the rest."""

    def __init__(self, tracker: RestrictionTracker):
        self.tracker = tracker
        self.residual: OffsetRange | None = None
        self.delay: object = None

    def current_restriction(self) -> OffsetRange:
        return self.tracker.current_restriction()

    def try_claim(self, position: int) -> bool:
        return self.tracker.try_claim(position)

    def defer_remainder(self, delay: object = None) -> None:
        split = self.tracker.try_split(0)
        self.residual, self.delay = split[1] if split else None, delay


def call_once(source: _AdmitPromptsFn, restriction: OffsetRange) -> tuple[list[PromptBatch], OffsetRange | None]:
    """One call of the source by a runner: what it emits, and the restriction that is left."""
    claims = Claims(source.create_tracker(restriction))
    emitted = list(source.process(None, claims))
    claims.tracker.check_done()
    return emitted, claims.residual


# The bound


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_what_is_admitted_is_never_ahead_of_its_step_and_never_more_than_the_bound_behind(max_lag: int) -> None:
    for step, newest in itertools.product(range(8), range(8)):
        admission = admit(step, newest, max_lag=max_lag, committed=False)
        assert (admission == "admitted") == (0 <= step - newest <= max_lag)
        assert (admission == "trained") == (newest > step)


def test_before_the_first_policy_everything_waits() -> None:
    assert admit(0, None, max_lag=100, committed=False) == "deferred"
    assert open_positions(0, 10, None, max_lag=100, elements_per_step=1) == 0


def test_a_committed_element_is_passed_over_even_where_the_bound_would_defer_it() -> None:
    assert admit(7, 0, max_lag=1, committed=True) == "committed"


def test_the_backlog_is_what_the_bound_lets_in_and_not_the_rest_of_the_run() -> None:
    # Policy 3, lag 1: steps up to 4, which are positions up to 9.
    assert open_positions(6, 1000, 3, max_lag=1, elements_per_step=2) == 4
    assert open_positions(9, 1000, 3, max_lag=1, elements_per_step=2) == 1
    assert open_positions(10, 1000, 3, max_lag=1, elements_per_step=2) == 0
    assert open_positions(6, 7, 3, max_lag=1, elements_per_step=2) == 1


# The restriction


def test_a_new_run_begins_at_the_first_position_and_a_resumed_one_at_its_first_untrained_step(shared: Runtime) -> None:
    everything = OffsetRange(0, STEPS * ELEMENTS)
    assert source_of(shared).initial_restriction(None) == everything
    publish_up_to(shared, 3)
    assert source_of(shared).initial_restriction(None) == OffsetRange(3 * ELEMENTS, STEPS * ELEMENTS)


def test_a_finished_run_leaves_nothing_to_claim(shared: Runtime) -> None:
    publish_up_to(shared, STEPS)
    source = source_of(shared)
    restriction = source.initial_restriction(None)
    assert restriction.size() == 0
    assert source.restriction_size(None, restriction) == 0
    assert call_once(source, restriction) == ([], None)


def test_a_drained_source_claims_nothing_more(shared: Runtime) -> None:
    assert source_of(shared).truncate(None, OffsetRange(0, 100)) is None


def test_the_source_travels_to_a_worker_without_what_it_shares_there(shared: Runtime) -> None:
    publish_up_to(shared, 0)
    there = pickler.loads(pickler.dumps(source_of(shared)))
    assert [batch.element_index for batch in call_once(there, OffsetRange(0, 8))[0]] == [0, 1, 0, 1]


# Claims


def test_one_call_claims_what_the_lag_bound_allows_and_gives_the_rest_back(shared: Runtime) -> None:
    publish_up_to(shared, 0)
    emitted, rest = call_once(source_of(shared), OffsetRange(0, 8))
    claimed = [(batch.step, batch.element_index, batch.policy_version) for batch in emitted]
    assert claimed == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert rest == OffsetRange(4, 8)


def test_one_call_ends_after_a_few_claims(shared: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.prompts.source._CLAIMS", 3)
    publish_up_to(shared, 0)
    emitted, rest = call_once(source_of(shared), OffsetRange(0, 8))
    assert len(emitted) == 3
    assert rest == OffsetRange(3, 8)


def test_a_deferred_position_is_not_claimed_and_the_wait_is_told_with_the_element_it_was_for(shared: Runtime) -> None:
    publish_up_to(shared, 0)
    source = source_of(shared)
    waiting = OffsetRange(2 * ELEMENTS, STEPS * ELEMENTS)  # step 2, policy 0, lag 1
    assert call_once(source, waiting) == ([], waiting)
    assert call_once(source, waiting) == ([], waiting)
    publish_up_to(shared, 1)
    first, rest = call_once(source, waiting)
    assert rest is not None
    second, _ = call_once(source, rest)
    assert [batch.policy_version for batch in first + second] == [1, 1]
    events = [event.values for event in read_metrics(shared.store, "prompts")]
    assert [event["prompts/deferrals"] for event in events] == [2, 0]
    assert events[0]["prompts/deferred_seconds"] > 0 == events[1]["prompts/deferred_seconds"]
    assert [event["prompts/lag_steps"] for event in events] == [1, 1]


def test_a_position_that_waits_holds_no_worker(shared: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the runner keeps to delays the call returns at once, with all the rest and when to ask again."""
    publish_up_to(shared, 0)
    slept: list[float] = []
    monkeypatch.setattr(source_module.time, "sleep", slept.append)
    patient = _AdmitPromptsFn(shared.recipe, shared.run, deferral=Deferral(delay_seconds=7.0, hold_seconds=0.0))
    waiting = OffsetRange(2 * ELEMENTS, STEPS * ELEMENTS)  # step 2, policy 0, lag 1
    claims = Claims(patient.create_tracker(waiting))
    assert list(patient.process(None, claims)) == []
    claims.tracker.check_done()
    assert (claims.residual, claims.delay, sum(slept)) == (waiting, Duration(seconds=7.0), 0.0)


def test_elements_that_are_sampled_are_passed_over_on_the_way_to_those_that_are_not(shared: Runtime) -> None:
    publish_up_to(shared, 0)
    commit_shard_of(shared, 0, 0)
    commit_shard_of(shared, 1, 0)
    source, rest, emitted = source_of(shared), OffsetRange(0, 2 * ELEMENTS), []
    while rest is not None:
        batches, rest = call_once(source, rest)
        emitted += [(batch.step, batch.element_index) for batch in batches]
    assert emitted == [(0, 1), (1, 1)]


def test_a_replayed_bundle_samples_with_the_version_that_it_had_pinned(shared: Runtime) -> None:
    publish_up_to(shared, 0)
    position = OffsetRange(ELEMENTS, ELEMENTS + 1)  # step 1, sampled one step ahead
    (first,), _ = call_once(source_of(shared), position)
    publish_up_to(shared, 1)
    (replayed,), _ = call_once(source_of(shared), position)
    assert first.policy_version == replayed.policy_version == 0
    assert first == replayed


# Pins


def test_of_many_who_pin_at_once_all_get_the_first_ones_version(shared: Runtime) -> None:
    publish_up_to(shared, 7)
    got: list[int] = []
    start = threading.Barrier(8)

    def pin(version: int) -> None:
        start.wait()
        got.append(pin_version(shared, 9, 0, version))

    threads = [threading.Thread(target=pin, args=(version,)) for version in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8 and len(set(got)) == 1


def test_a_pin_whose_policy_is_gone_is_an_error_that_names_both(shared: Runtime) -> None:
    publish_up_to(shared, 3)
    shared.store.put_new(run_layout.pin(3, 1), Pin(step=3, element_index=1, policy_version=2).to_json())
    shared.policies.prune({0, 3})
    with pytest.raises(UserError) as error:
        pin_version(shared, 3, 1, 3)
    assert error.value.offender == "policies/00000002"
    assert "element 1 of step 3" in error.value.reason


# Elements


def test_elements_share_a_steps_prompts_without_overlap_and_number_them_through(shared: Runtime) -> None:
    batches = [prompt_batch(shared, 2, element, 0) for element in range(ELEMENTS)]
    groups = [batch.first_group_index + i for batch in batches for i in range(len(batch.prompts))]
    assert groups == [0, 1, 2, 3]
    whole = prompt_batch(Runtime(shared.run, tiny_recipe(rollout={"elements_per_step": 1})), 2, 0, 0)
    assert whole.prompts == batches[0].prompts + batches[1].prompts


def test_a_run_is_known_by_its_recipe_and_not_by_where_it_lies(shared: Runtime, tmp_path: Path) -> None:
    moved = Runtime(tmp_path / "elsewhere", shared.recipe)
    other = Runtime(tmp_path, tiny_recipe(rollout={"max_lag": 2}))
    assert moved.run_id == shared.run_id != other.run_id


def test_a_run_stays_itself_when_a_later_release_knows_one_more_setting(tmp_path: Path) -> None:
    recipe = tiny_recipe()
    then = recipe_to_json(recipe).replace(b'"cohorts": 1,', b"")
    assert then != recipe_to_json(recipe)
    RunStore.open(tmp_path).put_new(run_layout.CONFIG, then)
    assert Runtime(tmp_path, recipe).run_id == run_id_of("tiny", then)


# Shares


def test_shares_divide_the_run_and_each_counts_its_own_positions() -> None:
    shares = [Share(index, 3) for index in range(3)]
    owned = [[share.position(count) for count in range(share.below(8))] for share in shares]
    assert owned == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_a_share_claims_only_its_positions_as_far_as_the_bound_allows(shared: Runtime) -> None:
    publish_up_to(shared, 0)
    source = _AdmitPromptsFn(shared.recipe, shared.run, Share(1, 3))
    everything = source.initial_restriction(None)
    assert everything == OffsetRange(0, 3)  # positions 1, 4, 7 of 8
    # Policy 0, lag 1: steps 0 and 1, which are positions 0 to 3.
    assert source.restriction_size(None, everything) == 1
    emitted, rest = call_once(source, everything)
    assert [(batch.step, batch.element_index) for batch in emitted] == [(0, 1)]
    assert rest == OffsetRange(1, 3)


def test_a_share_of_a_resumed_run_begins_at_its_first_position_that_is_not_trained(shared: Runtime) -> None:
    publish_up_to(shared, 2)  # positions 0 to 3 are trained
    starts = [_AdmitPromptsFn(shared.recipe, shared.run, Share(index, 3)).initial_restriction(None) for index in (0, 1)]
    assert starts == [OffsetRange(2, 3), OffsetRange(1, 3)]  # positions 6, and 4


def test_an_element_whose_pinned_policy_is_pruned_is_passed_over_if_another_pipeline_sampled_it(
    shared: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_up_to(shared, 3)
    shared.store.put_new(run_layout.pin(3, 1), Pin(step=3, element_index=1, policy_version=2).to_json())
    shared.policies.prune({0, 3})
    pin = source_module.pin_version

    def lose_the_race(*arguments: Any) -> int:
        commit_shard_of(shared, 3, 1)  # after the source looked, and before it pins
        return pin(*arguments)

    monkeypatch.setattr(source_module, "pin_version", lose_the_race)
    assert call_once(source_of(shared), OffsetRange(7, 8)) == ([], None)
