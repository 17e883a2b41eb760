"""Every rule of a trajectory table: what breaks it is refused with group, row, column and value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from schemas.records import PackedBatch, Placement, Turn, VersionSpan
from schemas.trajectory import COLUMNS, SCHEMA, InvalidTrajectory, encode, metadata_of, validate


def with_value(table: pa.Table, column: str, row: int, value: Any) -> pa.Table:
    """`table` with one value replaced, nulls not excepted."""
    values = table.column(column).to_pylist()
    values[row] = value
    index = table.column_names.index(column)
    return table.set_column(index, SCHEMA.field(column), pa.array(values, SCHEMA.field(column).type))


def refusal(table: pa.Table) -> InvalidTrajectory:
    with pytest.raises(InvalidTrajectory) as caught:
        validate(table)
    return caught.value


def test_a_table_that_keeps_the_rules_passes(packed: PackedBatch) -> None:
    validate(encode(packed))


def test_the_refusal_says_group_row_column_value_and_reason(packed: PackedBatch) -> None:
    error = refusal(with_value(encode(packed), "reward", 2, float("inf")))
    assert (error.group, error.row, error.column, error.value) == (4, 2, "reward", float("inf"))
    assert str(error) == "group 4, row 2, column reward, value inf: rewards are finite"


# Nulls ------------------------------------------------------------------------------------------------------------


def test_pyarrow_itself_accepts_a_null_where_none_may_be(packed: PackedBatch) -> None:
    """Why `validate` looks for nulls itself; if this ever fails, it need not."""
    with_value(encode(packed), "task", 1, None).validate(full=True)


@pytest.mark.parametrize("column", [column.name for column in COLUMNS if not column.nullable])
def test_a_null_is_refused_in_every_column_but_error(packed: PackedBatch, column: str) -> None:
    error = refusal(with_value(encode(packed), column, 3, None))
    assert (error.column, error.value, error.row) == (column, None, 3)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tokens", [13, None, 20, 21, 30, 22, 1]),
        ("loss_mask", [False, None, True, True, False, True, True]),
        ("sampler_logprobs", [0.0, None, -0.5, -1.25, 0.0, -0.125, 0.0]),
        ("turns", [None]),
        ("turns", [{"role": "prompt", "start": 0, "end": None, "seconds": 0.0}]),
        ("version_spans", [{"start": 2, "end": 4, "policy_version": None}]),
        ("reward_components", [{"name": None, "value": 1.0}]),
        ("sampling", {"temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0}),
    ],
)
def test_a_null_inside_a_list_or_struct_is_refused(packed: PackedBatch, column: str, value: Any) -> None:
    error = refusal(with_value(encode(packed), column, 1, value))
    assert (error.column, error.row) == (column, 1)
    assert "may not be null" in error.reason


# Rules of one trajectory ------------------------------------------------------------------------------------------

MASK = [False, False, True, True, False, True, True]
SPANS = [
    {"start": 2, "end": 4, "policy_version": 6},
    {"start": 5, "end": 7, "policy_version": 6},
]

BROKEN: list[tuple[str, str, Any, str, str]] = [
    # the law, the column changed in row 0, its value, the column blamed, words of the reason
    ("columns have one length", "loss_mask", MASK[:-1], "loss_mask", "6 entries for 7 tokens"),
    ("columns have one length", "sampler_logprobs", [0.0] * 8, "sampler_logprobs", "8 entries for 7 tokens"),
    ("ids are not negative", "tokens", [13, 11, 20, -1, 30, 22, 1], "tokens", "position 3"),
    ("the prompt is not sampled", "loss_mask", [True, *MASK[1:]], "loss_mask", "position 0: the policy did not"),
    ("the prompt is inside", "prompt_length", 8, "prompt_length", "within the tokens"),
    ("there is a prompt", "prompt_length", 0, "prompt_length", "has a prompt"),
    ("logprobs are finite", "sampler_logprobs", [0, 0, float("nan"), 0, 0, 0, 0], "sampler_logprobs", "finite"),
    ("logprobs are finite off the mask", "sampler_logprobs", [float("inf")] + [0] * 6, "sampler_logprobs", "finite"),
    ("logprobs are at most 0", "sampler_logprobs", [0, 0, 0.5, 0, 0, 0, 0], "sampler_logprobs", "at most 0"),
    ("logprobs are 0 off the mask", "sampler_logprobs", [0, -1, 0, 0, 0, 0, 0], "sampler_logprobs", "position 1"),
    ("spans cover the mask", "version_spans", SPANS[:1], "loss_mask", "position 5: .*no version span covers it"),
    ("spans cover nothing else", "version_spans", [{**SPANS[0], "end": 7}], "loss_mask", "position 4: a version span"),
    ("spans are not empty", "version_spans", [{**SPANS[0], "end": 2}, *SPANS], "version_spans", "ends after"),
    ("spans are in order", "version_spans", SPANS[::-1], "version_spans", "begins before"),
    ("spans do not overlap", "version_spans", [SPANS[0], SPANS[0], SPANS[1]], "version_spans", "begins before"),
    ("spans are inside", "version_spans", [SPANS[0], {**SPANS[1], "end": 8}], "version_spans", "within the tokens"),
    ("versions are not negative", "version_spans", [{**SPANS[0], "policy_version": -1}], "version_spans", "negative"),
    ("roles are known", "turns", [{"role": "tool", "start": 0, "end": 7, "seconds": 0.0}], "turns", "roles are"),
    ("turns are inside", "turns", [{"role": "policy", "start": -1, "end": 7, "seconds": 0.0}], "turns", "within"),
    ("policy tokens are in policy turns", "turns", [], "loss_mask", "position 2: .* turn of the policy"),
    ("status is known", "status", "meh", "status", "ok or failed"),
    ("stop reasons are known", "stop_reason", "bored", "stop_reason", "one of terminated"),
    ("failed stops are failed", "stop_reason", "failed", "stop_reason", "exactly where status is failed"),
    ("errors are of tombstones", "error", "boom", "error", "exactly where status is failed"),
    ("rewards are finite", "reward", float("nan"), "reward", "finite"),
    (
        "components are finite",
        "reward_components",
        [{"name": "a", "value": float("nan")}],
        "reward_components",
        "finite",
    ),
    ("facts are JSON", "environment", "{", "environment", "JSON object"),
    ("facts are an object", "environment", "[1]", "environment", "JSON object"),
    (
        "temperatures are above 0",
        "sampling",
        {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        "sampling",
        "above 0",
    ),
    ("clocks are finite", "started_at", float("inf"), "started_at", "finite"),
    ("the step is the table's", "step", 8, "step", "of step 7"),
    ("the run is the table's", "run_id", "run-b", "run_id", "of run 'run-a'"),
]


@pytest.mark.parametrize(("law", "column", "value", "blamed", "words"), BROKEN, ids=[f"{b[0]}-{b[1]}" for b in BROKEN])
def test_a_trajectory_that_breaks_a_law_is_refused(
    packed: PackedBatch, law: str, column: str, value: Any, blamed: str, words: str
) -> None:
    error = refusal(with_value(encode(packed), column, 0, value))
    assert (error.column, error.row, error.group) == (blamed, 0, 3)
    assert error.value is not None or blamed == "error"
    with pytest.raises(InvalidTrajectory, match=words):
        raise error


def test_a_span_may_touch_the_next_so_that_weights_change_in_mid_answer(packed_of: Callable[..., PackedBatch]) -> None:
    validate(encode(packed_of(versions=(VersionSpan(2, 3, 5), VersionSpan(3, 4, 6), VersionSpan(5, 7, 6)))))


def test_a_turn_may_be_empty(packed_of: Callable[..., PackedBatch]) -> None:
    turns = (
        Turn("prompt", 0, 2, 0.0),
        Turn("policy", 2, 4, 0.1),
        Turn("environment", 4, 4, 0.1),
        Turn("policy", 5, 7, 0),
    )
    validate(encode(packed_of(turns=turns)))


def test_a_certain_token_has_logprob_zero_and_an_absent_one_in_a_failed_sample_is_fine(packed: PackedBatch) -> None:
    """Row 0 ends with a token of log-probability exactly 0 on the mask; zero is a value, not a gap."""
    assert packed.groups[0].samples[0].rollout.sampler_logprobs[-1] == 0.0
    validate(encode(packed))


# Tombstones -------------------------------------------------------------------------------------------------------

TOMBSTONE = 3


def test_a_tombstone_may_lack_its_prompt_because_the_environment_that_writes_it_failed(packed: PackedBatch) -> None:
    table = encode(packed)
    for column, empty in [
        ("tokens", []),
        ("loss_mask", []),
        ("sampler_logprobs", []),
        ("turns", []),
        ("prompt_length", 0),
    ]:
        table = with_value(table, column, TOMBSTONE, empty)
    validate(table)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("error", None, "exactly where status is failed"),
        ("reward", 0.5, "reward 0.0"),
        ("reward_components", [{"name": "success", "value": 0.0}], "tombstone has none"),
        ("pack_row", 1, "lies in no pack row"),
        ("stop_reason", "terminated", "exactly where status is failed"),
    ],
)
def test_a_tombstone_says_why_and_has_no_reward_and_no_place(
    packed: PackedBatch, column: str, value: Any, words: str
) -> None:
    error = refusal(with_value(encode(packed), column, TOMBSTONE, value))
    assert (error.column, error.row, error.group) == (column, TOMBSTONE, 4)
    assert words in error.reason


def test_a_tombstone_trains_nothing(packed: PackedBatch) -> None:
    table = with_value(encode(packed), "loss_mask", TOMBSTONE, MASK)
    error = refusal(with_value(table, "version_spans", TOMBSTONE, SPANS))
    assert (error.column, error.row, error.reason) == ("loss_mask", TOMBSTONE, "a tombstone trains nothing")


# Rules of a group -------------------------------------------------------------------------------------------------


def test_one_identity_occurs_once(packed: PackedBatch) -> None:
    error = refusal(with_value(encode(packed), "sample_index", 1, 0))
    assert (error.group, error.row, error.column, error.value) == (3, 1, "sample_index", 0)
    assert "twice" in error.reason


def test_rows_are_in_order(packed: PackedBatch) -> None:
    table = encode(packed)
    assert "order" in refusal(pa.concat_tables([table.slice(2), table.slice(0, 2)])).reason


@pytest.mark.parametrize("missing", range(4))
def test_a_group_that_lacks_a_sample_is_refused(packed: PackedBatch, missing: int) -> None:
    table = encode(packed)
    error = refusal(pa.concat_tables([table.slice(0, missing), table.slice(missing + 1)]))
    assert (error.column, error.group) == ("sample_index", 3 if missing < 2 else 4)
    assert "the group lacks" in error.reason


@pytest.mark.parametrize(
    ("column", "value"),
    [("prompt_id", "other"), ("task", "other"), ("prompt_length", 1), ("tokens", [14, 11, 21, 21, 30, 22, 1])],
)
def test_the_samples_of_a_group_share_one_prompt(packed: PackedBatch, column: str, value: Any) -> None:
    error = refusal(with_value(encode(packed), column, 1, value))
    assert (error.group, error.row, error.column) == (3, 1, column)


def test_two_groups_may_have_the_same_prompt(packed: PackedBatch) -> None:
    """Groups are told apart by their index, never by their prompt."""
    table = encode(packed)
    for row in (2, 3):
        table = with_value(table, "prompt_id", row, "prompt-3")
        table = with_value(table, "tokens", row, table.column("tokens").to_pylist()[row - 2])
    validate(table)


# Rules of the packing plan ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "column", "words"),
    [
        (((2, 0), (0, 5), (1, 0)), "pack_row", "2 pack rows"),
        (((-2, 0), (0, 5), (1, 0)), "pack_row", "2 pack rows"),
        (((0, 0), (0, 8), (1, 0)), "pack_offset", "12 tokens"),
        (((0, -1), (0, 5), (1, 0)), "pack_offset", "12 tokens"),
        (((0, 0), (0, 4), (1, 0)), "pack_offset", "overlap"),
        (((0, 0), (0, 0), (1, 0)), "pack_offset", "overlap"),
        (((0, 0), (1, 0), (1, 5)), "pack_row", "one group only"),
    ],
)
def test_a_plan_that_breaks_a_law_is_refused(packed: PackedBatch, places: Any, column: str, words: str) -> None:
    a, b, c = (Placement(*place) for place in places)
    error = refusal(encode(replace(packed, placements=((a, b), (c, Placement(-1, -1))))))
    assert error.column == column
    assert words in error.reason


NOWHERE = Placement(-1, -1)


def test_a_trajectory_with_sampled_tokens_is_placed_or_its_training_data_would_be_lost(packed: PackedBatch) -> None:
    placements = ((packed.placements[0][0], NOWHERE), packed.placements[1])
    error = refusal(encode(replace(packed, placements=placements)))
    assert (error.group, error.row, error.column, error.value) == (3, 1, "pack_row", -1)
    assert "with sampled tokens lies in a pack row" in error.reason


def test_a_trajectory_without_sampled_tokens_need_not_be_placed(packed_of: Callable[..., PackedBatch]) -> None:
    silent = packed_of(
        loss_mask=np.zeros(7, bool),
        sampler_logprobs=np.zeros(7, np.float32),
        versions=(),
        turns=(Turn("prompt", 0, 2, 0.0), Turn("environment", 2, 7, 0.5)),
    )
    validate(encode(replace(silent, placements=((NOWHERE, Placement(0, 0)), silent.placements[1]))))


def test_a_branch_ends_with_its_last_sampled_token(packed_of: Callable[..., PackedBatch]) -> None:
    """What the environment wrote after it takes no room: branches of 2 and 5 tokens fit a row of 7."""
    mask = np.array([False, False, True, True, False, False, False])
    short = packed_of(
        loss_mask=mask,
        sampler_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=(VersionSpan(2, 4, 6),),
        turns=(Turn("prompt", 0, 2, 0.0), Turn("policy", 2, 4, 0.25), Turn("environment", 4, 7, 0.5)),
    )
    placements = ((Placement(0, 0), Placement(0, 2)), short.placements[1])
    validate(encode(replace(short, placements=placements, row_tokens=7)))


# Rules of the table -----------------------------------------------------------------------------------------------


def test_a_column_of_another_type_is_refused_by_name(packed: PackedBatch) -> None:
    table = encode(packed)
    index = table.column_names.index("reward")
    error = refusal(table.set_column(index, "reward", table.column("reward").cast(pa.float32())))
    assert (error.column, error.reason) == ("reward", "reward is float, not double")


def test_a_table_without_its_metadata_is_refused(packed: PackedBatch) -> None:
    table = encode(packed)
    metadata = {key: text for key, text in metadata_of(table).items() if key != "row_tokens"}
    assert "row_tokens" in refusal(table.replace_schema_metadata(metadata)).reason


def test_metadata_that_is_no_number_is_refused(packed: PackedBatch) -> None:
    table = encode(packed)
    error = refusal(table.replace_schema_metadata({**metadata_of(table), "rows": "many"}))
    assert (error.column, error.value) == ("rows", "many")
