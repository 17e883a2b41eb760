"""Group: by index, complete, without duplicates, and closed to strangers."""

from __future__ import annotations

import random
from dataclasses import replace

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.metrics import MetricsFilter

from schemas.metrics import read_metrics
from schemas.records import GroupedBatch, ScoredBatch
from schemas.store import RunStore
from stages.group import GroupByPrompt, group, measure_groups
from tests.stages.worked_batches import (
    PROMPT_TOKENS,
    failed,
    failure,
    prompt_batch,
    recipe,
    rollout,
    scored,
    scored_batch,
)


def identities(batch: GroupedBatch) -> list[list[str]]:
    return [[sample.rollout.id.path for sample in group.samples] for group in batch.groups]


def test_the_same_prompt_twice_in_a_step_is_two_groups():
    grouped = group(scored_batch(groups=2, samples=2), samples=2)
    assert [g.prompt_id for g in grouped.groups] == ["lake-1", "lake-1"]
    assert [g.group_index for g in grouped.groups] == [0, 1]
    assert identities(grouped) == [["7/0/0", "7/0/1"], ["7/1/0", "7/1/1"]]


def test_the_order_of_arrival_changes_nothing():
    batch = scored_batch(groups=3, samples=4)
    shuffled = list(batch.rollouts)
    random.Random(0).shuffle(shuffled)
    first, second = group(batch, samples=4), group(replace(batch, rollouts=tuple(shuffled)), samples=4)
    assert identities(first) == identities(second)
    for ours, theirs in zip(first.groups, second.groups, strict=True):
        assert [id(sample) for sample in ours.samples] == [id(sample) for sample in theirs.samples]


def test_group_indices_count_from_the_elements_first():
    grouped = group(scored_batch(groups=2, samples=1, first_group_index=6, element_index=3), samples=1)
    assert identities(grouped) == [["7/6/0"], ["7/7/0"]]


def test_of_duplicates_the_first_stays_and_the_others_are_counted():
    batch = scored_batch(groups=1, samples=2)
    again = scored(rollout(0, 1, answer=4), reward=9.0)
    grouped = group(replace(batch, rollouts=(*batch.rollouts, again, batch.rollouts[0])), samples=2)
    assert grouped.duplicates == 2
    assert grouped.groups[0].samples[0] is batch.rollouts[0]
    assert grouped.groups[0].samples[1] is batch.rollouts[1]


def test_a_missing_sample_becomes_a_tombstone_with_its_siblings_prompt():
    batch = scored_batch(groups=1, samples=3)
    missing = group(replace(batch, rollouts=batch.rollouts[1:]), samples=3).groups[0].samples[0]
    assert missing.rollout.id.path == "7/0/0"
    assert (missing.rollout.status, missing.rollout.stop_reason, missing.rollout.error) == (
        "failed",
        "failed",
        "missing",
    )
    assert missing.rollout.tokens.tolist() == list(PROMPT_TOKENS)
    assert missing.rollout.prompt_length == len(PROMPT_TOKENS)
    assert not missing.rollout.loss_mask.any()
    assert missing.rollout.sampler_logprobs.tolist() == [0.0, 0.0, 0.0]
    assert (missing.reward, dict(missing.components)) == (0.0, {})


def test_the_prompt_of_a_missing_sample_can_come_from_a_failed_sibling():
    batch = ScoredBatch(prompt_batch(1), (scored(failed(0, 1)),))
    assert group(batch, samples=2).groups[0].samples[0].rollout.tokens.tolist() == list(PROMPT_TOKENS)


def test_a_group_of_which_nothing_came_is_all_tombstones_without_tokens():
    batch = scored_batch(groups=2, samples=2)
    grouped = group(replace(batch, rollouts=batch.rollouts[:2]), samples=2)
    lost = [sample.rollout for sample in grouped.groups[1].samples]
    assert [r.id.path for r in lost] == ["7/1/0", "7/1/1"]
    assert [(r.status, len(r.tokens), r.prompt_length) for r in lost] == [("failed", 0, 0)] * 2
    assert [r.tokens.dtype for r in lost] == [np.int32] * 2
    assert [r.prompt_id for r in lost] == ["lake-1"] * 2


def test_an_element_that_lost_everything_still_makes_whole_groups():
    grouped = group(ScoredBatch(prompt_batch(2), ()), samples=3)
    assert [len(g.samples) for g in grouped.groups] == [3, 3]


def test_samples_in_are_samples_out_less_duplicates_plus_missing():
    batch = scored_batch(groups=2, samples=4)
    arrived = (*batch.rollouts[2:], batch.rollouts[5])
    grouped = group(replace(batch, rollouts=arrived), samples=4)
    measured = measure_groups(grouped)
    missing = sum(s.rollout.error == "missing" for g in grouped.groups for s in g.samples)
    assert missing == 2
    assert sum(len(g.samples) for g in grouped.groups) == len(arrived) - measured["group/duplicates"] + missing


@pytest.mark.parametrize(
    "stranger, reason",
    [
        (rollout(0, 0, step=8), "step 7"),
        (rollout(2, 0), "groups 0 to 1"),
        (rollout(-1, 0), "groups 0 to 1"),
        (rollout(0, 4), "samples 0 to 3"),
        (rollout(0, -1), "samples 0 to 3"),
        (replace(rollout(0, 0), prompt_id="lake-2"), "lake-2"),
    ],
)
def test_a_trajectory_of_another_element_is_refused_by_name(stranger, reason):
    batch = scored_batch(groups=2, samples=4)
    with pytest.raises(ValueError, match=reason) as error:
        group(replace(batch, rollouts=(*batch.rollouts, scored(stranger))), samples=4)
    assert stranger.id.path in str(error.value)


def test_failures_travel_with_their_batch():
    batch = replace(scored_batch(1, 2), failures=(failure(0, 1),))
    assert group(batch, samples=2).failures == batch.failures


def test_mixed_counts_groups_whose_rewards_differ_among_the_samples_that_did_not_fail():
    #            group 0: 1 1   group 1: 0 1   group 2: 1 and a tombstone
    rewards = [(0, 0, 1.0), (0, 1, 1.0), (1, 0, 0.0), (1, 1, 1.0), (2, 0, 1.0)]
    samples = [scored(rollout(g, i), reward) for g, i, reward in rewards] + [scored(failed(2, 1))]
    measured = measure_groups(group(ScoredBatch(prompt_batch(3), tuple(samples)), samples=2))
    assert measured == {
        "group/groups": 3,
        "group/duplicates": 0,
        "group/tombstones": 1,
        "group/mixed/fraction": pytest.approx(1 / 3),
    }


def test_the_transform_groups_each_element_counts_and_measures_it(tmp_path):
    batch = scored_batch(groups=2, samples=4)
    batch = replace(batch, rollouts=(*batch.rollouts[1:], batch.rollouts[3]))
    pipeline = beam.Pipeline(runner="FnApiRunner")
    seen = pipeline | beam.Create([batch]) | GroupByPrompt(recipe(samples=4), str(tmp_path))
    seen | beam.Map(lambda grouped: [len(g.samples) for g in grouped.groups]) | beam.Map(_assert_equals, [4, 4])
    result = pipeline.run()
    result.wait_until_finish()

    (event,) = read_metrics(RunStore.open(tmp_path), "group")
    assert event.step == 7
    assert event.values["group/groups"] == 2
    assert event.values["group/duplicates"] == 1
    assert event.values["group/tombstones"] == 1
    counters = {c.key.metric.name: c.committed for c in result.metrics().query(MetricsFilter())["counters"]}
    assert (counters["in-rollouts"], counters["dropped-duplicates"], counters["out-groups"]) == (8, 1, 2)


def _assert_equals(value: object, expected: object) -> None:
    assert value == expected
