"""Pack: every trained token in exactly one place, and a plan that depends on nothing else."""

from __future__ import annotations

import random
from dataclasses import replace

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.metrics import MetricsFilter

from schemas.errors import UserError
from schemas.metrics import read_metrics
from schemas.records import Group, GroupedBatch, PackedBatch, Placement, Rollout
from schemas.store import RunStore
from stages.group import group
from stages.pack import NOT_PLACED, Pack, branch_tokens, measure_packing, pack
from tests.stages.worked_batches import failed, failure, prompt_batch, recipe, rollout, scored, scored_batch


def grouped(*groups: list[Rollout], **options: int) -> GroupedBatch:
    prompts = prompt_batch(len(groups), **options)
    made = (Group(g, "lake-1", tuple(map(scored, rollouts))) for g, rollouts in enumerate(groups))
    return GroupedBatch(prompts, tuple(made))


def branches(group_index: int, lengths: list[int]) -> list[Rollout]:
    return [rollout(group_index, i, answer=length) for i, length in enumerate(lengths)]


def placed(batch: PackedBatch) -> list[tuple[int, Rollout, Placement]]:
    return [
        (group.group_index, sample.rollout, placement)
        for group, placements in zip(batch.groups, batch.placements, strict=True)
        for sample, placement in zip(group.samples, placements, strict=True)
    ]


def random_batch(seed: int) -> GroupedBatch:
    """Ragged groups with tombstones, untrained trajectories and environment text at the end."""
    draw = random.Random(seed)
    makers = [
        lambda g, i: rollout(g, i, answer=draw.randint(1, 16), tail=draw.randint(0, 9)),
        lambda g, i: rollout(g, i, answer=draw.randint(1, 16)),
        lambda g, i: rollout(g, i, answer=0),
        lambda g, i: failed(g, i, answer=5),
    ]
    weights = [4, 4, 1, 1]
    return grouped(*[[draw.choices(makers, weights)[0](g, i) for i in range(8)] for g in range(4)])


def test_a_worked_example_fills_rows_first_fit_decreasing():
    #                                          a  b  c  d
    packed = pack(grouped(branches(0, lengths=[5, 4, 2, 4])), row_tokens=8)
    # row 0: a a a a a c c .    row 1: b b b b d d d d
    assert packed.placements == ((Placement(0, 0), Placement(1, 0), Placement(0, 5), Placement(1, 4)),)
    assert (packed.rows, packed.row_tokens) == (2, 8)


def test_a_row_never_holds_two_groups_and_row_numbers_follow_the_groups():
    packed = pack(grouped(branches(0, [2]), branches(1, [2]), branches(2, [8, 8])), row_tokens=8)
    assert packed.placements == ((Placement(0, 0),), (Placement(1, 0),), (Placement(2, 0), Placement(3, 0)))
    assert packed.rows == 4


@pytest.mark.parametrize("seed", range(20))
def test_every_trained_token_lies_in_exactly_one_place_of_a_row_of_its_group(seed):
    packed = pack(random_batch(seed), row_tokens=16)
    owner = np.full((packed.rows, packed.row_tokens), -1)
    group_of_row = np.full(packed.rows, -1)
    trained = 0
    for serial, (group_index, rollout_, placement) in enumerate(placed(packed)):
        offsets = np.flatnonzero(rollout_.loss_mask) - rollout_.prompt_length
        trained += len(offsets)
        if placement == NOT_PLACED:
            assert not len(offsets)
            continue
        start, end = placement.pack_offset, placement.pack_offset + branch_tokens(rollout_)
        assert 0 <= start < end <= packed.row_tokens
        assert set(offsets + start) <= set(range(start, end))
        assert (owner[placement.pack_row, start:end] == -1).all()
        owner[placement.pack_row, start:end] = serial
        assert group_of_row[placement.pack_row] in (-1, group_index)
        group_of_row[placement.pack_row] = group_index
    assert (owner >= 0).any(axis=1).all()
    assert (np.diff(group_of_row) >= 0).all()
    # These branches are one answer each, so the rows hold the trained tokens and nothing else.
    assert (owner >= 0).sum() == trained == measure_packing(packed)["pack/tokens"]


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_samples_does_not_change_where_they_go(seed):
    batch = random_batch(seed)
    shuffled = []
    for group_ in batch.groups:
        samples = list(group_.samples)
        random.Random(seed).shuffle(samples)
        shuffled.append(replace(group_, samples=tuple(samples)))
    first, second = pack(batch, row_tokens=16), pack(replace(batch, groups=tuple(shuffled)), row_tokens=16)
    assert {r.id: p for _, r, p in placed(first)} == {r.id: p for _, r, p in placed(second)}
    assert first.rows == second.rows


def test_environment_text_after_the_last_sampled_token_takes_no_room():
    packed = pack(grouped([rollout(0, 0, answer=4, tail=100), rollout(0, 1, answer=4, tail=100)]), row_tokens=8)
    assert packed.placements == ((Placement(0, 0), Placement(0, 4)),)


def test_environment_text_between_answers_stays_in_its_branch():
    # P P P A E E A: the branch is A E E A
    two_turns = replace(rollout(0, 0, answer=4), loss_mask=np.array([False, False, False, True, False, False, True]))
    assert branch_tokens(two_turns) == 4


def test_tombstones_and_untrained_trajectories_are_not_placed():
    packed = pack(grouped([failed(0, 0, answer=4), rollout(0, 1, answer=0, tail=3), rollout(0, 2)]), row_tokens=8)
    assert packed.placements == ((Placement(-1, -1), Placement(-1, -1), Placement(0, 0)),)
    assert measure_packing(packed)["pack/unplaced_trajectories"] == 2


def test_a_group_that_trains_nothing_takes_no_row():
    packed = pack(grouped([failed(0, 0)], branches(1, [3])), row_tokens=8)
    assert packed.placements == ((Placement(-1, -1),), (Placement(0, 0),))
    assert packed.rows == 1


def test_an_empty_batch_has_no_rows():
    packed = pack(grouped(), row_tokens=8)
    assert (packed.rows, packed.placements) == (0, ())
    assert measure_packing(packed)["pack/filled/fraction"] == 0.0


def test_a_branch_as_long_as_a_row_fits_and_one_token_more_is_refused_by_name():
    assert pack(grouped(branches(0, [8])), row_tokens=8).rows == 1
    with pytest.raises(UserError, match=r"7/1/2.*9 tokens.*holds 8.*trainer\.row_tokens"):
        pack(grouped(branches(0, [1]), branches(1, [1, 1, 9])), row_tokens=8)


def test_a_sampled_token_inside_the_prompt_is_refused_by_name():
    wrong = replace(rollout(0, 0), loss_mask=np.array([False, False, True, True, True]))
    with pytest.raises(ValueError, match=r"7/0/0.*token 2"):
        pack(grouped([wrong]), row_tokens=8)


def test_trajectories_groups_failures_and_duplicates_pass_through_untouched():
    batch = replace(group(scored_batch(2, 4), samples=4), failures=(failure(0, 1),), duplicates=3)
    packed = pack(batch, row_tokens=8)
    assert packed.groups is batch.groups
    assert (packed.prompts, packed.failures, packed.duplicates) == (batch.prompts, batch.failures, 3)


def test_metrics_equal_a_recount_by_hand():
    packed = pack(grouped(branches(0, [5, 4, 2, 4]), [failed(1, 0), rollout(1, 1, answer=1)]), row_tokens=8)
    assert measure_packing(packed) == {
        "pack/trajectories": 6,
        "pack/rows": 3,
        "pack/tokens": 16,
        "pack/filled/fraction": pytest.approx(16 / 24),
        "pack/unplaced_trajectories": 1,
    }


def test_the_transform_packs_each_element_counts_and_measures_it(tmp_path):
    pipeline = beam.Pipeline(runner="FnApiRunner")
    batch = grouped(branches(0, [5, 4, 2, 4]), [failed(1, 0)], element_index=0)
    seen = pipeline | beam.Create([batch]) | Pack(recipe(row_tokens=8), str(tmp_path))
    seen | beam.Map(_assert_rows, 2)
    result = pipeline.run()
    result.wait_until_finish()

    (event,) = read_metrics(RunStore.open(tmp_path), "pack")
    assert (event.step, event.values["pack/rows"], event.values["pack/tokens"]) == (7, 2, 15)
    counters = {c.key.metric.name: c.committed for c in result.metrics().query(MetricsFilter())["counters"]}
    assert (counters["in-groups"], counters["out-rows"], counters["unplaced-trajectories"]) == (2, 2, 1)


def _assert_rows(packed: PackedBatch, rows: int) -> None:
    assert packed.rows == rows
