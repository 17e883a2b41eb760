"""The JSON records that commit things: exact round trips, and refusals by name."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from schemas.errors import DamagedDataError
from schemas.manifest import (
    Pin,
    PolicyCommit,
    ShardManifest,
    ShardRef,
    SkippedShard,
    StepList,
    StoredRecord,
    TrainerCommit,
)

SHARD = ShardManifest(
    run_id="run-a",
    step=42,
    element_index=1,
    key=f"trajectories/step-00000042/0001-{'a' * 64}.arrow",
    bytes=1000,
    sha256="a" * 64,
    content_sha256="b" * 64,
    groups=2,
    trajectories=8,
    tombstones=1,
    tokens=500,
    sampled_tokens=300,
    rows=3,
    row_tokens=128,
    policy_version_min=41,
    policy_version_max=42,
    newest_version=42,
    created_at=1_700_000_000.25,
)
RECORDS: list[StoredRecord] = [
    Pin(step=42, element_index=1, policy_version=41),
    SHARD,
    SHARD.model_copy(update={"policy_version_min": None, "policy_version_max": None}),
    StepList(
        step=42,
        policy_version=42,
        shards=(ShardRef(key=SHARD.key, sha256="a" * 64, content_sha256="b" * 64),),
        skipped=(SkippedShard(key="trajectories/x.arrow", reason="its SHA-256 is not ..."),),
    ),
    PolicyCommit(
        version=0,
        parent=None,
        digest="c" * 64,
        bytes=4,
        parameters=1,
        source="random",
        fencing_token="host-1",
        created_at=0.0,
    ),
    TrainerCommit(version=25, digest="d" * 64, created_at=1.5),
]
each_record = pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)


@each_record
def test_a_record_comes_back_exactly(record: StoredRecord) -> None:
    assert type(record).from_json(record.to_json(), "name") == record


@each_record
def test_equal_records_have_equal_bytes_that_say_their_schema(record: StoredRecord) -> None:
    data = record.to_json()
    assert data == type(record).from_json(data, "name").to_json()
    said = json.loads(data)
    assert said["schema"].startswith("rollstream.") and said["schema_version"] == record.SCHEMA_VERSION


def test_a_manifest_of_the_first_version_is_read_and_says_nothing_of_the_newest_policy() -> None:
    fields = json.loads(SHARD.to_json()) | {"schema_version": 1}
    del fields["newest_version"]
    read = ShardManifest.from_json(json.dumps(fields).encode(), "x")
    assert read == SHARD.model_copy(update={"newest_version": None})


@each_record
def test_a_record_cut_at_any_length_is_refused_by_name(record: StoredRecord) -> None:
    data = record.to_json().rstrip()
    for length in range(len(data)):
        with pytest.raises(DamagedDataError, match=r"^pins/0\.json: "):
            type(record).from_json(data[:length], "pins/0.json")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff\xfe", b"{}", b'{"schema": "rollstream.pin"}'])
def test_what_is_no_record_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(DamagedDataError, match=r"^pins/0\.json: "):
        Pin.from_json(data, "pins/0.json")


def test_a_record_of_another_kind_is_refused() -> None:
    with pytest.raises(DamagedDataError, match=r"says schema 'rollstream\.trainer_commit', and rollstream\.pin"):
        Pin.from_json(RECORDS[-1].to_json(), "x")


def test_a_record_of_a_newer_version_is_refused_by_its_version_whatever_it_holds() -> None:
    newer = {"schema": "rollstream.pin", "schema_version": 2, "fields": "unheard of"}
    with pytest.raises(DamagedDataError, match=r"x: is rollstream\.pin version 2, and .* up to version 1"):
        Pin.from_json(json.dumps(newer).encode(), "x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": -1}, "step"),
        ({"sha256": "A" * 64}, "sha256"),
        ({"sha256": "a" * 63}, "sha256"),
        ({"created_at": None}, "created_at"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_field_that_cannot_be_is_refused_by_name(change: dict[str, object], words: str) -> None:
    altered = {**json.loads(SHARD.to_json()), **change}
    with pytest.raises(DamagedDataError, match=f"x: {words}: "):
        ShardManifest.from_json(json.dumps(altered).encode(), "x")


def test_a_record_is_never_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        SHARD.step = 43  # type: ignore[misc]


def test_lone_surrogates_in_a_reason_do_not_stop_a_step() -> None:
    skipped = SkippedShard(key="k", reason="half \ud83d")
    frozen = StepList(step=1, policy_version=1, shards=(), skipped=(skipped,))
    assert StepList.from_json(frozen.to_json(), "x").skipped[0].reason == "half \\ud83d"
