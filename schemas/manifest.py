"""The small JSON records that commit things: pins, shard manifests, step lists, policies and trainer states.

Each is written once, after what it speaks of is complete and durable, and is never changed. In its file a record says
which schema it has and of which version; a reader refuses newer ones by name.

Left out on purpose: where the files lie (`schemas.run_layout`) and how they are written (`schemas.store`).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from schemas.errors import DamagedDataError
from schemas.text import storable_text, to_json

Text = Annotated[str, BeforeValidator(lambda text: storable_text(text) if isinstance(text, str) else text)]
Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Seconds = Annotated[float, Field(ge=0.0)]


class StoredRecord(BaseModel):
    """A frozen record with a schema name and version of its own. Subclasses set `SCHEMA`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    SCHEMA: ClassVar[str]
    SCHEMA_VERSION: ClassVar[int] = 1

    def to_json(self) -> bytes:
        record = {"schema": self.SCHEMA, "schema_version": self.SCHEMA_VERSION, **self.model_dump()}
        return to_json(record, indent=2).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, name: str) -> Self:
        """The record in `data`.

        Raises:
          DamagedDataError: naming `name`, if `data` is torn, is no such record, or is of a newer version.
        """
        fields = _object(data, name)
        schema, version = fields.pop("schema", None), fields.pop("schema_version", None)
        if schema != cls.SCHEMA or type(version) is not int:
            raise DamagedDataError(name, f"says schema {schema!r}, and {cls.SCHEMA} was expected.", "Restore the file.")
        if version > cls.SCHEMA_VERSION:
            raise DamagedDataError(
                name,
                f"is {schema} version {version}, and this program reads up to version {cls.SCHEMA_VERSION}.",
                "Use the program that wrote it, or a newer one.",
            )
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise DamagedDataError(name, _first_problem(error), "Restore the file from a copy.") from error


def _object(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:  # torn JSON and broken UTF-8 alike
        raise DamagedDataError(name, f"is not whole JSON ({error}).", "Restore the file from a copy.") from error
    if not isinstance(value, dict):
        raise DamagedDataError(name, "is not a JSON object.", "Restore the file from a copy.")
    return value


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "the record"
    return f"{where}: {first['msg']}."


class Pin(StoredRecord):
    """Which policy version samples an element. The first writer decides, and every retry obeys."""

    SCHEMA = "rollstream.pin"

    step: Count
    element_index: Count
    policy_version: Count


class ShardManifest(StoredRecord):
    """The commit of one shard: the file exists, is complete, and has this digest.

    `sha256` is that of the file's bytes; `content_sha256` leaves out clocks and the run's name, so two runs of one
    recipe agree in it. Policy versions are None where no token was sampled (all tombstones).

    Version 2 has `newest_version`, which divides the lag of what the shard holds: what was published before its commit
    came while it was being sampled, the rest while it waited for its step. It is here because whatever holds the slot
    says it of itself, however many attempts there were.
    """

    SCHEMA = "rollstream.shard_manifest"
    SCHEMA_VERSION = 2

    version: Count = 1  # of the trajectory schema in the file
    run_id: Text
    step: Count
    element_index: Count
    key: Text
    bytes: Count
    sha256: Sha256
    content_sha256: Sha256
    groups: Count
    trajectories: Count
    tombstones: Count
    tokens: Count = Field(description="tokens of all trajectories, prompts included, each sample's prompt counted")
    sampled_tokens: Count = Field(description="tokens where the loss mask is true")
    rows: Count = Field(description="pack rows")
    row_tokens: Count = Field(description="L, tokens of a pack row")
    policy_version_min: Count | None
    policy_version_max: Count | None
    newest_version: Count | None = Field(
        default=None, description="newest policy version that its writer knew of at the commit; None: not recorded"
    )
    created_at: Seconds = Field(description="seconds since the epoch")


class ShardRef(StoredRecord):
    """A shard that a step trains on."""

    SCHEMA = "rollstream.shard_ref"

    key: Text
    sha256: Sha256
    content_sha256: Sha256


class SkippedShard(StoredRecord):
    """A shard that a step leaves out, and why."""

    SCHEMA = "rollstream.skipped_shard"

    key: Text
    reason: Text


class StepList(StoredRecord):
    """The frozen list of what step `step` trains version `policy_version` on. The first writer decides."""

    SCHEMA = "rollstream.step_list"

    step: Count
    policy_version: Count
    shards: tuple[ShardRef, ...]
    skipped: tuple[SkippedShard, ...] = ()


class PolicyCommit(StoredRecord):
    """Version `version` of the weights is complete. `digest` is that of the parameters, `parent` what it grew from."""

    SCHEMA = "rollstream.policy_commit"

    version: Count
    parent: Count | None
    digest: Text
    bytes: Count
    parameters: Count = Field(description="numbers in all arrays together")
    source: Literal["random", "checkpoint", "warm_start", "step"]
    fencing_token: Text
    created_at: Seconds = Field(description="seconds since the epoch")


class TrainerCommit(StoredRecord):
    """The trainer's state at version `version` (optimizer state and the like) is complete."""

    SCHEMA = "rollstream.trainer_commit"

    version: Count
    digest: Text
    created_at: Seconds = Field(description="seconds since the epoch")
