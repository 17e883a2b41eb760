"""Every prompt is in the ledger once, with what became of it; whatever does not add up is named."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from runners.ledger import (
    DAMAGED,
    EQUAL,
    IN_FLIGHT,
    NOT_BEGUN,
    TOO_OLD,
    TRAINED,
    WAITS,
    ledger_of,
    render_ledger,
)
from schemas import run_layout
from schemas.errors import UserError
from schemas.manifest import Pin, ShardManifest, ShardRef, SkippedShard, StepList
from schemas.metrics import MetricsWriter
from schemas.records import ScoredBatch
from schemas.store import RunStore
from stages.group import group
from stages.pack import pack
from stages.shards import freeze_step, write_shard
from tests.runners.written_run import ROW_TOKENS, SAMPLES, sampled_by, write_run
from tests.stages.worked_batches import RUN, scored_batch


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    """Steps 0 and 1 of 3 are trained, step 2 waits; in step 0 group 1 has equal rewards."""
    return write_run(tmp_path / "run")


def frozen_list(store: RunStore, step: int, elements: int, skipped: tuple[SkippedShard, ...] = ()) -> None:
    """Puts another list in the place of the step's: its one shard, `elements` times."""
    key = run_layout.manifest(step, 0)
    manifest = ShardManifest.from_json(store.get(key), key)
    shard = ShardRef(key=manifest.key, sha256=manifest.sha256, content_sha256=manifest.content_sha256)
    listed = StepList(step=step, policy_version=step, shards=(shard,) * elements, skipped=skipped)
    store.put(run_layout.step_list(step), listed.to_json())


def test_every_prompt_of_a_run_is_in_it_once_with_what_became_of_it(store: RunStore) -> None:
    ledger = ledger_of(store)
    assert ledger.problems == ()
    assert [(entry.step, entry.group_index, entry.fate) for entry in ledger.entries] == [
        (0, 0, TRAINED),
        (0, 1, EQUAL),
        (1, 0, TRAINED),
        (1, 1, TRAINED),
        (2, 0, WAITS),
        (2, 1, WAITS),
    ]
    assert ledger.totals == {TRAINED: 3, EQUAL: 1, WAITS: 2}
    assert sum(ledger.totals.values()) == ledger.steps * ledger.prompts_per_step
    assert ledger.largest_lag == 0


def test_what_is_not_sampled_is_being_sampled_or_not_begun(store: RunStore) -> None:
    store.delete(run_layout.manifest(2, 0))
    assert ledger_of(store).totals == {TRAINED: 3, EQUAL: 1, NOT_BEGUN: 2}
    store.put_new(run_layout.pin(2, 0), Pin(step=2, element_index=0, policy_version=2).to_json())
    assert ledger_of(store).totals == {TRAINED: 3, EQUAL: 1, IN_FLIGHT: 2}


def test_a_prompt_that_was_trained_twice_does_not_add_up(store: RunStore) -> None:
    frozen_list(store, step=1, elements=2)
    problems = ledger_of(store).problems
    assert "step 1, prompt 0: is there 2 times, of prompts 0 to 1" in problems


def test_a_prompt_that_is_neither_trained_nor_listed_does_not_add_up(store: RunStore) -> None:
    frozen_list(store, step=1, elements=0)
    problems = ledger_of(store).problems
    assert "step 1, prompt 1: is there 0 times, of prompts 0 to 1" in problems


def test_a_damaged_shard_that_its_step_went_without_is_a_reason(store: RunStore) -> None:
    key = run_layout.manifest(1, 0)
    frozen_list(store, step=1, elements=0, skipped=(SkippedShard(key=key, reason="is torn"),))
    MetricsWriter(store, "train").write(1, {"trainer/trained_groups": 0})
    ledger = ledger_of(store)
    assert ledger.problems == ()
    assert ledger.totals == {TRAINED: 1, EQUAL: 1, DAMAGED: 2, WAITS: 2}


def test_a_prompt_whose_policy_was_older_than_the_bound_is_a_reason_and_its_lag_is_known(tmp_path: Path) -> None:
    store = write_run(tmp_path / "run")
    for key in [run_layout.manifest(1, 0), run_layout.step_list(1)]:
        store.delete(key)
    batch = scored_batch(groups=2, step=1)
    samples = [sampled_by(0 if i < SAMPLES else 1, sample) for i, sample in enumerate(batch.rollouts)]
    packed = pack(group(ScoredBatch(batch.prompts, tuple(samples)), samples=SAMPLES), row_tokens=ROW_TOKENS)
    freeze_step(store, 1, 1, [write_shard(store, packed, RUN)])
    MetricsWriter(store, "train").write(1, {"trainer/trained_groups": 1, "trainer/too_old_groups": 1})
    ledger = ledger_of(store)
    assert ledger.problems == ()
    assert [(e.fate, e.lag) for e in ledger.entries if e.step == 1] == [(TOO_OLD, 1), (TRAINED, 0)]


def test_a_trainer_that_counted_otherwise_is_named(store: RunStore) -> None:
    MetricsWriter(store, "train").write(1, {"trainer/trained_groups": 1})
    assert ledger_of(store).problems == ("step 1: 2 prompts are 'trained', and the trainer counted 1",)


def test_a_step_that_is_measured_and_not_yet_published_is_not_trained(store: RunStore) -> None:
    MetricsWriter(store, "train").write(2, {"trainer/trained_groups": 2})
    assert ledger_of(store).problems == ()


def test_a_shard_that_cannot_be_read_is_named(store: RunStore) -> None:
    key = run_layout.manifest(0, 0)
    store.delete(ShardManifest.from_json(store.get(key), key).key)
    (problem,) = [line for line in ledger_of(store).problems if "is gone" in line]
    assert problem.startswith("trajectories/step-00000000/")


def test_a_folder_without_a_run_has_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        ledger_of(RunStore.open(tmp_path))


def test_the_sum_and_what_was_not_trained_are_shown(store: RunStore) -> None:
    output = io.StringIO()
    Console(file=output, width=100).print(render_ledger(ledger_of(store)))
    assert "6 prompts: 3 steps of 2" in output.getvalue()
    assert "step 0 prompt 1" in output.getvalue() and "It adds up." in output.getvalue()
