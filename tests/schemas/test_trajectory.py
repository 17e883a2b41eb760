"""Trajectory tables: what goes in comes out, what is damaged is refused by name, what is old is read for ever."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from schemas import trajectory
from schemas.errors import DamagedDataError
from schemas.records import Group, PackedBatch, ScoredRollout, Turn
from schemas.trajectory import InvalidTrajectory, content_sha256, decode, encode, from_bytes, to_bytes, validate

GOLDEN = Path(__file__).parent / "golden" / "trajectory_v1.arrow"
GOLDEN_CONTENT = "83e72edfa68c03a798c0f93dcdebea5dfedc0eb4840cdefee4af33bbad87a044"
DOCS = Path(__file__).parents[2] / "docs"


def assert_same_record(actual: object, expected: object) -> None:
    """Field by field; arrays by dtype and bytes."""
    assert type(actual) is type(expected)
    for field in fields(expected):  # type: ignore[arg-type]
        mine, theirs = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(theirs, np.ndarray):
            assert mine.dtype == theirs.dtype, field.name
            np.testing.assert_array_equal(mine, theirs, err_msg=field.name)
        else:
            assert mine == theirs, field.name


def assert_same_groups(actual: tuple[Group, ...], expected: tuple[Group, ...]) -> None:
    assert [(g.group_index, g.prompt_id, len(g.samples)) for g in actual] == [
        (g.group_index, g.prompt_id, len(g.samples)) for g in expected
    ]
    for mine, theirs in zip(actual, expected, strict=True):
        for got, want in zip(mine.samples, theirs.samples, strict=True):
            assert (got.reward, got.components) == (want.reward, want.components)
            assert_same_record(got.rollout, want.rollout)


# What goes in comes out ---------------------------------------------------------------------------------------------


def test_decode_returns_exactly_what_was_encoded(packed: PackedBatch) -> None:
    content = decode(from_bytes(to_bytes(encode(packed)), name="shard"))
    assert (content.step, content.element_index, content.row_tokens, content.rows) == (7, 1, 12, 2)
    assert content.placements == packed.placements
    assert_same_groups(content.groups, packed.groups)


def test_a_table_has_the_columns_of_the_schema_and_says_its_name_and_version(packed: PackedBatch) -> None:
    table = encode(packed)
    assert table.schema.equals(trajectory.SCHEMA)
    assert trajectory.metadata_of(table)["schema"] == "rollstream.trajectory"
    assert trajectory.metadata_of(table)["version"] == "1"


def test_rows_are_in_order_of_group_and_sample_however_they_came(packed: PackedBatch) -> None:
    shuffled = replace(
        packed,
        groups=tuple(replace(group, samples=group.samples[::-1]) for group in packed.groups[::-1]),
        placements=tuple(places[::-1] for places in packed.placements[::-1]),
    )
    assert encode(shuffled).equals(encode(packed))


def test_an_element_without_groups_is_an_empty_table_that_is_valid_and_comes_back(packed: PackedBatch) -> None:
    table = encode(replace(packed, groups=(), placements=(), rows=0))
    validate(table)
    content = decode(from_bytes(to_bytes(table), name="shard"))
    assert (content.step, content.groups, content.placements, content.rows) == (7, (), (), 0)


def test_lone_surrogates_do_not_stop_a_shard_and_facts_give_them_back(packed_of) -> None:
    half = "half \ud83d"
    packed = packed_of(environment={"text": half, half: 1}, generator=half)
    failed = replace(packed.groups[1].samples[1].rollout, error=half)
    samples = (packed.groups[1].samples[0], ScoredRollout(failed, 0.0, {}))
    packed = replace(packed, groups=(packed.groups[0], replace(packed.groups[1], samples=samples)))
    table = encode(packed)
    validate(table)
    content = decode(from_bytes(to_bytes(table), name="shard"))
    assert content.groups[0].samples[0].rollout.environment == {"text": half, half: 1}
    assert content.groups[0].samples[0].rollout.generator == "half \\ud83d"
    assert content.groups[1].samples[1].rollout.error == "half \\ud83d"


def test_facts_may_hold_numpy_numbers_and_other_alphabets_and_what_is_not_finite_becomes_null(packed_of) -> None:
    facts = {
        "reward": np.float32(0.5),
        "done": np.bool_(True),
        "board": np.arange(2),
        "結果": "成功",
        "gap": float("nan"),
    }
    content = decode(encode(packed_of(environment=facts)))
    assert content.groups[0].samples[0].rollout.environment == {
        "reward": 0.5,
        "done": True,
        "board": [0, 1],
        "結果": "成功",
        "gap": None,
    }


def test_a_fact_that_is_no_json_value_is_refused_with_its_place(packed_of) -> None:
    with pytest.raises(InvalidTrajectory, match=r"group 3, row 0, column environment.*not a JSON value"):
        encode(packed_of(environment={"when": object()}))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tokens", np.array([0.5] * 7)),
        ("tokens", np.array([2**31] * 7)),
        ("tokens", np.zeros((7, 1), np.int32)),
        ("loss_mask", np.ones(7, np.float32)),
        ("prompt_length", "two"),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused_with_its_row_and_column(packed_of, column: str, value: object) -> None:
    with pytest.raises(InvalidTrajectory, match=f"row 0, column {column}"):
        encode(packed_of(**{column: value}))


def test_groups_samples_and_placements_that_disagree_are_refused(packed: PackedBatch) -> None:
    with pytest.raises(InvalidTrajectory, match="2 groups need as many"):
        encode(replace(packed, placements=packed.placements[:1]))
    with pytest.raises(InvalidTrajectory, match=r"group 3.*2 samples need as many placements"):
        encode(replace(packed, placements=(packed.placements[0][:1], packed.placements[1])))
    with pytest.raises(InvalidTrajectory, match=r"group 3.*a group has samples"):
        encode(replace(packed, groups=(Group(3, "prompt-3", ()), packed.groups[1])))
    with pytest.raises(InvalidTrajectory, match="group 9, column group_index, value 3"):
        encode(replace(packed, groups=(replace(packed.groups[0], group_index=9), packed.groups[1])))


# The digest of the content ----------------------------------------------------------------------------------------


def test_two_runs_that_differ_in_clocks_machines_and_names_have_one_content_digest(
    packed: PackedBatch, packed_of
) -> None:
    turns = tuple(replace(turn, seconds=turn.seconds + 9) for turn in packed.groups[0].samples[0].rollout.turns)
    other = packed_of(started_at=5.0, seconds=6.0, generator="host-1", turns=turns)
    other = replace(other, prompts=replace(other.prompts, run_id="run-b"))
    assert content_sha256(encode(other)) == content_sha256(encode(packed))
    assert to_bytes(encode(other)) != to_bytes(encode(packed))


@pytest.mark.parametrize(
    "change",
    [
        {"reward": 0.75},
        {"components": {"success": 1.0}},
        {"tokens": np.array([13, 11, 20, 21, 30, 22, 2], np.int32)},
        {"sampler_logprobs": np.array([0, 0, -0.5, -1.25, 0, -0.125, -1e-7], np.float32)},
        {"stop_reason": "truncated"},
        {"environment": {}},
        {"turns": (Turn("prompt", 0, 2, 0.0), Turn("policy", 2, 7, 0.25))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_change_of_what_was_sampled_or_scored_changes_the_content_digest(
    packed: PackedBatch, packed_of, change
) -> None:
    assert content_sha256(encode(packed_of(**change))) != content_sha256(encode(packed))


def test_the_packing_plan_is_part_of_the_content_digest(packed: PackedBatch) -> None:
    assert content_sha256(encode(replace(packed, row_tokens=13))) != content_sha256(encode(packed))


def test_chunks_and_slices_change_neither_digest_nor_bytes_nor_content(packed: PackedBatch) -> None:
    table = encode(packed)
    chunked = pa.concat_tables([table.slice(0, 1), table.slice(1, 2), table.slice(3)])
    assert content_sha256(chunked) == content_sha256(table)
    assert to_bytes(chunked) == to_bytes(table)
    validate(chunked)
    assert_same_groups(decode(chunked).groups, packed.groups)


def test_a_damaged_column_boundary_cannot_hide_behind_equal_bytes(packed_of) -> None:
    """`ab` + `c` and `a` + `bc` are different content."""
    one = packed_of(components={"ab": 1.0, "c": 2.0})
    other = packed_of(components={"a": 1.0, "bc": 2.0})
    assert content_sha256(encode(one)) != content_sha256(encode(other))


# Damage -----------------------------------------------------------------------------------------------------------


def test_a_file_cut_at_any_length_is_refused_by_name(packed: PackedBatch) -> None:
    data = to_bytes(encode(packed))
    for length in [*range(0, 64), *range(64, len(data), 37), *range(len(data) - 64, len(data))]:
        with pytest.raises(DamagedDataError, match="step-7/shard"):
            from_bytes(data[:length], name="step-7/shard")


def test_a_flipped_bit_anywhere_is_refused_or_lay_in_padding(packed: PackedBatch) -> None:
    """Without the manifest's digest: the file's own seal finds it."""
    table = encode(packed)
    data = to_bytes(table)
    refused = 0
    for position in range(0, len(data), 11):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        try:
            read = from_bytes(bytes(damaged), name="step-7/shard")
        except DamagedDataError as error:
            assert error.offender == "step-7/shard"
            refused += 1
        else:
            assert read.equals(table)
            assert trajectory.metadata_of(read) == trajectory.metadata_of(table)
    assert refused > 100


def test_a_flipped_bit_anywhere_at_all_is_refused_where_the_digest_is_known(packed: PackedBatch) -> None:
    data = to_bytes(encode(packed))
    digest = hashlib.sha256(data).hexdigest()
    from_bytes(data, name="shard", sha256=digest)
    for position in range(0, len(data), 5):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(DamagedDataError, match="shard: its SHA-256 is not"):
            from_bytes(bytes(damaged), name="shard", sha256=digest)


def test_a_wrong_digest_is_refused_even_where_the_file_is_whole(packed: PackedBatch) -> None:
    with pytest.raises(DamagedDataError, match="shard: its SHA-256"):
        from_bytes(to_bytes(encode(packed)), name="shard", sha256="0" * 64)


@pytest.mark.parametrize("data", [b"", b"ARROW1", b"not arrow at all" * 100, b"\0" * 4096])
def test_what_is_no_arrow_file_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(DamagedDataError, match="junk: is not a whole Arrow file"):
        from_bytes(data, name="junk")


def sealed(table: pa.Table, **metadata: str) -> bytes:
    """A whole file, honestly sealed, of a table with other metadata."""
    return to_bytes(table.replace_schema_metadata({**trajectory.metadata_of(table), **metadata}))


def test_a_table_of_a_newer_version_is_refused_by_its_version(packed: PackedBatch) -> None:
    with pytest.raises(DamagedDataError, match=r"shard: is rollstream.trajectory version 2, and .* up to version 1"):
        from_bytes(sealed(encode(packed), version="2"), name="shard")


@pytest.mark.parametrize("version", ["0", "-1", "one", ""])
def test_a_version_that_never_was_is_refused(packed: PackedBatch, version: str) -> None:
    with pytest.raises(DamagedDataError, match="which never was"):
        from_bytes(sealed(encode(packed), version=version), name="shard")


def test_a_table_of_another_schema_is_refused(packed: PackedBatch) -> None:
    with pytest.raises(DamagedDataError, match=r"says schema 'rollstream\.other'"):
        from_bytes(sealed(encode(packed), schema="rollstream.other"), name="shard")


def test_a_table_that_lacks_a_column_is_refused_with_the_columns_name(packed: PackedBatch) -> None:
    with pytest.raises(DamagedDataError, match="reward is missing"):
        from_bytes(to_bytes(encode(packed).drop_columns(["reward"])), name="shard")


# Old versions -----------------------------------------------------------------------------------------------------


def test_there_is_an_upgrade_from_every_older_version() -> None:
    assert set(trajectory.UPGRADES) == set(range(1, trajectory.SCHEMA_VERSION))


def test_upgrades_run_one_after_another_from_the_version_of_the_table(packed: PackedBatch) -> None:
    upgrades = {
        1: lambda table: table.rename_columns({"reward": "score"}),
        2: lambda table: table.append_column("bonus", pa.array([0.0] * table.num_rows)),
    }
    from_one = trajectory.upgrade(encode(packed), 1, upgrades=upgrades, target=3)
    assert {"score", "bonus"} < set(from_one.column_names)
    assert trajectory.metadata_of(from_one)["version"] == "3"
    assert trajectory.metadata_of(from_one)["run_id"] == "run-a"
    from_two = trajectory.upgrade(encode(packed), 2, upgrades=upgrades, target=3)
    assert "reward" in from_two.column_names and "bonus" in from_two.column_names


def test_reading_an_older_file_upgrades_it(packed: PackedBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A future in which version 2 renamed a column, read by that future's reader."""
    current = encode(packed)
    old = current.rename_columns({"generator": "sampled_by"}).replace_schema_metadata(current.schema.metadata)
    data = to_bytes(old)
    monkeypatch.setattr(trajectory, "SCHEMA_VERSION", 2)
    monkeypatch.setitem(trajectory.UPGRADES, 1, lambda table: table.rename_columns({"sampled_by": "generator"}))
    read = from_bytes(data, name="shard")
    assert "generator" in read.column_names
    assert trajectory.metadata_of(read)["version"] == "2"


def test_the_golden_file_of_version_1_is_read_for_ever(packed: PackedBatch) -> None:
    table = from_bytes(GOLDEN.read_bytes(), name=str(GOLDEN))
    validate(table)
    assert content_sha256(table) == GOLDEN_CONTENT
    content = decode(table)
    assert (content.step, content.element_index, content.row_tokens, content.rows) == (7, 1, 12, 2)
    assert content.placements == packed.placements
    assert_same_groups(content.groups, packed.groups)


# Documentation ----------------------------------------------------------------------------------------------------


def test_docs_schema_md_holds_the_columns_and_the_metadata_of_the_schema() -> None:
    text = (DOCS / "schema.md").read_text()
    assert trajectory.markdown_table() in text
    assert trajectory.metadata_markdown_table() in text
