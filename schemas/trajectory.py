"""Trajectories as Arrow tables: what a shard holds, version 1. One row a trajectory, one table an element.

`encode` writes, `decode` reads, `validate` says what is wrong and where. A stored table carries a digest of itself, so
a damaged file is found even where no manifest is at hand. A reader of version n reads every version <= n, by one
function of `UPGRADES` for each version, and refuses newer ones by name.

The columns and their meaning are in `schemas.trajectory_columns`, the rules in `schemas.trajectory_rules`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import DamagedDataError
from schemas.identity import TrajectoryId
from schemas.records import (
    Group,
    PackedBatch,
    Placement,
    Rollout,
    SamplingRecord,
    ScoredRollout,
    ShardContent,
    Turn,
    VersionSpan,
)
from schemas.text import storable_text, to_json
from schemas.trajectory_columns import (
    COLUMN_BY_NAME,
    COLUMNS,
    COMPONENTS,
    SCHEMA,
    SCHEMA_NAME,
    SCHEMA_VERSION,
    SEAL,
    SPANS,
    TURNS,
    Column,
    InvalidTrajectory,
    lengths_of,
    markdown_table,
    metadata_markdown_table,
    metadata_of,
    schema_difference,
    split_lists,
    whole,
)
from schemas.trajectory_rules import validate

__all__ = [
    "COLUMNS",
    "SCHEMA",
    "SCHEMA_NAME",
    "SCHEMA_VERSION",
    "UPGRADES",
    "InvalidTrajectory",
    "content_sha256",
    "decode",
    "encode",
    "from_bytes",
    "markdown_table",
    "metadata_markdown_table",
    "metadata_of",
    "to_bytes",
    "upgrade",
    "validate",
]

_RESTORE = "Restore it from a copy, or let the run make it again."

# UPGRADES[n] makes a table of version n + 1 from one of version n.
UPGRADES: dict[int, Callable[[pa.Table], pa.Table]] = {}


# Writing ----------------------------------------------------------------------------------------------------------


def encode(packed: PackedBatch) -> pa.Table:
    """The table of `packed`, one row a trajectory, in order of group index and sample index.

    Lone surrogates in text are written out (`\\ud83d`); in the facts JSON escapes them and `decode` gives them back.

    Raises:
      InvalidTrajectory: `packed` cannot be a table: a fact that is no JSON value, a field of the wrong kind, or
        groups, samples and placements that disagree in number.
    """
    rows = _ordered_rows(packed)
    rollouts = [scored.rollout for scored, _ in rows]
    scores = [scored for scored, _ in rows]
    places = [placement for _, placement in rows]
    values: dict[str, Iterable[Any]] = {
        "run_id": [storable_text(packed.prompts.run_id)] * len(rows),
        "step": [r.id.step for r in rollouts],
        "group_index": [r.id.group_index for r in rollouts],
        "sample_index": [r.id.sample_index for r in rollouts],
        "prompt_id": [storable_text(r.prompt_id) for r in rollouts],
        "task": [storable_text(r.task) for r in rollouts],
        "prompt_length": [r.prompt_length for r in rollouts],
        "reward": [s.reward for s in scores],
        "stop_reason": [r.stop_reason for r in rollouts],
        "status": [r.status for r in rollouts],
        "error": [None if r.error is None else storable_text(r.error) for r in rollouts],
        "environment": [_facts_json(row, r) for row, r in enumerate(rollouts)],
        "generator": [storable_text(r.generator) for r in rollouts],
        "started_at": [r.started_at for r in rollouts],
        "seconds": [r.seconds for r in rollouts],
        "pack_row": [p.pack_row for p in places],
        "pack_offset": [p.pack_offset for p in places],
        "sampling": [vars(r.sampling) for r in rollouts],
    }
    lists: dict[str, pa.Array] = {
        "tokens": _number_lists("tokens", [r.tokens for r in rollouts], np.int32),
        "loss_mask": _number_lists("loss_mask", [r.loss_mask for r in rollouts], np.bool_),
        "sampler_logprobs": _number_lists("sampler_logprobs", [r.sampler_logprobs for r in rollouts], np.float32),
        "version_spans": _struct_lists(SPANS, [[vars(s) for s in r.versions] for r in rollouts]),
        "turns": _struct_lists(TURNS, [[vars(t) for t in r.turns] for r in rollouts]),
        "reward_components": _struct_lists(COMPONENTS, [_components(s) for s in scores]),
    }
    arrays = [lists.get(c.name) if c.name in lists else _array(c, values[c.name]) for c in COLUMNS]
    return pa.Table.from_arrays(arrays, schema=SCHEMA.with_metadata(_metadata_of(packed)))


def _ordered_rows(packed: PackedBatch) -> list[tuple[ScoredRollout, Placement]]:
    if len(packed.groups) != len(packed.placements):
        raise InvalidTrajectory(
            f"{len(packed.groups)} groups need as many lists of placements",
            column="pack_row",
            value=len(packed.placements),
        )
    rows: list[tuple[ScoredRollout, Placement]] = []
    for group, placements in zip(packed.groups, packed.placements, strict=True):
        _check_group(group, placements)
        rows += zip(group.samples, placements, strict=True)
    return sorted(rows, key=lambda row: (row[0].rollout.id.group_index, row[0].rollout.id.sample_index))


def _check_group(group: Group, placements: Sequence[Placement]) -> None:
    index = group.group_index
    if not group.samples:
        raise InvalidTrajectory("a group has samples", column="sample_index", value=0, group=index)
    if len(group.samples) != len(placements):
        raise InvalidTrajectory(
            f"{len(group.samples)} samples need as many placements",
            column="pack_row",
            value=len(placements),
            group=index,
        )
    for scored in group.samples:
        if scored.rollout.id.group_index != index:
            raise InvalidTrajectory(
                "a sample belongs to the group that it is in",
                column="group_index",
                value=scored.rollout.id.group_index,
                group=index,
            )
        if scored.rollout.prompt_id != group.prompt_id:
            raise InvalidTrajectory(
                f"the group's prompt is {group.prompt_id!r}",
                column="prompt_id",
                value=scored.rollout.prompt_id,
                group=index,
            )


def _metadata_of(packed: PackedBatch) -> dict[str, str]:
    return {
        "schema": SCHEMA_NAME,
        "version": str(SCHEMA_VERSION),
        "run_id": storable_text(packed.prompts.run_id),
        "step": str(packed.prompts.step),
        "element_index": str(packed.prompts.element_index),
        "row_tokens": str(packed.row_tokens),
        "rows": str(packed.rows),
    }


def _facts_json(row: int, rollout: Rollout) -> str:
    try:
        return to_json(dict(rollout.environment))
    except TypeError as error:
        raise InvalidTrajectory(
            str(error), column="environment", value=rollout.environment, row=row, group=rollout.id.group_index
        ) from error


def _components(scored: ScoredRollout) -> list[dict[str, Any]]:
    return [{"name": storable_text(name), "value": float(value)} for name, value in sorted(scored.components.items())]


def _array(column: Column, values: Iterable[Any]) -> pa.Array:
    listed = list(values)
    try:
        return pa.array(listed, type=column.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError) as error:
        for row, value in enumerate(listed):
            _raise_if_unfit(column, row, value)
        raise InvalidTrajectory(str(error), column=column.name, value=listed[:3]) from error


def _raise_if_unfit(column: Column, row: int, value: Any) -> None:
    try:
        pa.scalar(value, type=column.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError) as error:
        raise InvalidTrajectory(str(error), column=column.name, value=value, row=row) from error


def _number_lists(column: str, rows: Sequence[np.ndarray], dtype: type[np.generic]) -> pa.Array:
    """`rows` as a list column. A cast that changes the kind of a number, or a token id, is refused."""
    flat = [np.zeros(0, dtype)]
    for row, given in enumerate(rows):
        values = np.asarray(given)
        if values.ndim != 1 or not np.can_cast(values.dtype, dtype, casting="same_kind"):
            described = f"{values.dtype} with shape {values.shape}"
            raise InvalidTrajectory(f"must be {dtype.__name__} [T]", column=column, value=described, row=row)
        flat.append(values.astype(dtype))
        if dtype is np.int32 and not np.array_equal(flat[-1], values):
            raise InvalidTrajectory("does not fit int32", column=column, value=values.max(), row=row)
    items = pa.array(np.concatenate(flat), COLUMN_BY_NAME[column].type.value_type)
    return pa.ListArray.from_arrays(_offsets(rows), items)


def _struct_lists(type_: pa.ListType, rows: Sequence[Sequence[Mapping[str, Any]]]) -> pa.Array:
    fields = list(type_.value_type)
    items = [item for row in rows for item in row]
    children = [pa.array([item[field.name] for item in items], field.type) for field in fields]
    return pa.ListArray.from_arrays(_offsets(rows), pa.StructArray.from_arrays(children, fields=fields), type=type_)


def _offsets(rows: Sequence[Any]) -> pa.Array:
    return pa.array(np.cumsum([0, *(len(row) for row in rows)]).astype(np.int32))


# Reading ----------------------------------------------------------------------------------------------------------


def decode(table: pa.Table) -> ShardContent:
    """What was encoded: groups in order of group index, samples in order of sample index.

    Arrays are read-only views of the table where Arrow's layout allows. Lists stand where facts held tuples.
    """
    metadata = metadata_of(table)
    columns = {name: whole(table.column(name)) for name in table.column_names}
    plain = {name: columns[name].to_pylist() for name in columns if not pa.types.is_list(columns[name].type)}
    tokens = split_lists(columns["tokens"], np.int32)
    masks = split_lists(columns["loss_mask"], np.bool_)
    logprobs = split_lists(columns["sampler_logprobs"], np.float32)
    spans = _split_structs(columns["version_spans"], VersionSpan)
    turns = _split_structs(columns["turns"], Turn)
    components = _split_structs(columns["reward_components"], lambda name, value: (name, value))

    def sample(row: int) -> ScoredRollout:
        get = {name: values[row] for name, values in plain.items()}
        rollout = Rollout(
            id=TrajectoryId(get["step"], get["group_index"], get["sample_index"]),
            prompt_id=get["prompt_id"],
            task=get["task"],
            tokens=tokens[row],
            loss_mask=masks[row],
            sampler_logprobs=logprobs[row],
            prompt_length=get["prompt_length"],
            versions=tuple(spans[row]),
            turns=tuple(turns[row]),
            stop_reason=get["stop_reason"],
            status=get["status"],
            error=get["error"],
            environment=json.loads(get["environment"]),
            sampling=SamplingRecord(**get["sampling"]),
            generator=get["generator"],
            started_at=get["started_at"],
            seconds=get["seconds"],
        )
        return ScoredRollout(rollout, get["reward"], dict(components[row]))

    members: dict[int, list[int]] = {}
    for row, group_index in enumerate(plain["group_index"]):
        members.setdefault(group_index, []).append(row)
    groups = []
    for group_index, rows in members.items():
        groups.append(Group(group_index, plain["prompt_id"][rows[0]], tuple(sample(row) for row in rows)))
    return ShardContent(
        step=int(metadata["step"]),
        element_index=int(metadata["element_index"]),
        groups=tuple(groups),
        placements=tuple(
            tuple(Placement(plain["pack_row"][row], plain["pack_offset"][row]) for row in rows)
            for rows in members.values()
        ),
        row_tokens=int(metadata["row_tokens"]),
        rows=int(metadata["rows"]),
    )


def _split_structs(lists: pa.Array, make: Callable[..., Any]) -> list[list[Any]]:
    items = [make(*fields) for fields in zip(*(f.to_pylist() for f in lists.flatten().flatten()), strict=True)]
    ends = np.cumsum(lengths_of(lists)).tolist()
    return [items[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []


# Files ------------------------------------------------------------------------------------------------------------


def to_bytes(table: pa.Table) -> bytes:
    """The table as an Arrow IPC file, sealed with its own digest. Equal tables give equal bytes, however chunked."""
    sealed = table.combine_chunks().replace_schema_metadata({**metadata_of(table), SEAL: _table_sha256(table)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, sealed.schema) as writer:
        writer.write_table(sealed)
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes, *, name: str, sha256: str | None = None) -> pa.Table:
    """The table in `data`, upgraded to this version. `sha256`, if known, is that of the file's bytes.

    Raises:
      DamagedDataError: naming `name`, if `data` is torn, truncated, altered, no trajectory table, or of a newer
        version. Nothing of it is returned.
    """
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise DamagedDataError(name, f"its SHA-256 is not {sha256}, so it was altered.", _RESTORE)
    with _unverified(name):
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        table.validate(full=True)
        metadata = metadata_of(table)
        version = _version(metadata, name)
        unsealed = table.replace_schema_metadata({key: text for key, text in metadata.items() if key != SEAL})
        intact = metadata.get(SEAL) == _table_sha256(unsealed)
    if not intact:
        raise DamagedDataError(name, "its content does not have the digest that it was sealed with.", _RESTORE)
    upgraded = upgrade(unsealed, version, upgrades=UPGRADES, target=SCHEMA_VERSION)
    wrong = schema_difference(upgraded)
    if wrong:
        raise DamagedDataError(name, f"its columns are not those of version {SCHEMA_VERSION}: {wrong}.", _RESTORE)
    return upgraded


def upgrade(
    table: pa.Table, version: int, *, upgrades: Mapping[int, Callable[[pa.Table], pa.Table]], target: int
) -> pa.Table:
    """`table` of `version`, made one of version `target` by one upgrade after another.

    An upgrade need not care for metadata that it does not change.
    """
    for step in range(version, target):
        upgraded = upgrades[step](table)
        metadata = {**metadata_of(table), **metadata_of(upgraded), "version": str(step + 1)}
        table = upgraded.replace_schema_metadata(metadata)
    return table


def content_sha256(table: pa.Table) -> str:
    """Digest of what was sampled and scored: two runs of one recipe give equal ones.

    Left out are clocks (`started_at`, `seconds`, and the seconds of turns), `generator` and `run_id`; everything else
    counts, the packing plan too. Arrow's chunking does not.
    """
    kept = {key: text for key, text in metadata_of(table).items() if key not in ("run_id", "schema", "version", SEAL)}
    digest = hashlib.sha256(to_json(kept).encode())
    for column in (column for column in COLUMNS if column.in_content):
        array = whole(table.column(column.name))
        _feed(digest, column.name, _without_seconds(array) if column.name == "turns" else array)
    return digest.hexdigest()


def _table_sha256(table: pa.Table) -> str:
    digest = hashlib.sha256(to_json(metadata_of(table)).encode())
    for field in table.schema:
        _feed(digest, field.name, whole(table.column(field.name)))
    return digest.hexdigest()


def _without_seconds(turns: pa.Array) -> pa.Array:
    items = turns.flatten()
    names = [field.name for field in items.type if field.name != "seconds"]
    kept = pa.StructArray.from_arrays([pc.struct_field(items, name) for name in names], names=names)
    offsets = pa.array(np.cumsum([0, *lengths_of(turns)]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, kept)


def _feed(digest: Any, name: str, array: pa.Array) -> None:
    """Feeds values to `digest`, independent of Arrow's offsets and of what lies under nulls.

    Types are named in our own words: pyarrow's may change, and old files must keep their digests.
    """
    digest.update(f"{name} {len(array)} {array.null_count};".encode())
    if array.null_count:
        digest.update(array.is_null().to_numpy(zero_copy_only=False).tobytes())
        array = array.drop_null()
    if pa.types.is_struct(array.type):
        for field, child in zip(array.type, array.flatten(), strict=True):
            _feed(digest, field.name, child)
    elif pa.types.is_list(array.type):
        digest.update(b"list;" + lengths_of(array).astype("<i8").tobytes())
        _feed(digest, "item", array.flatten())
    elif pa.types.is_string(array.type):
        texts = [text.encode() for text in array.to_pylist()]
        digest.update(b"text;" + np.array([len(text) for text in texts], "<i8").tobytes())
        digest.update(b"".join(texts))
    else:
        values = array.to_numpy(zero_copy_only=False)
        values = values.astype(values.dtype.newbyteorder("<"), copy=False)
        digest.update(values.dtype.str.encode() + b";" + values.tobytes())


@contextmanager
def _unverified(name: str) -> Iterator[None]:
    """Work on bytes that nothing has vouched for yet: pyarrow fails on damage with errors of any kind."""
    try:
        yield
    except DamagedDataError:
        raise
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DamagedDataError(name, f"is not a whole Arrow file ({said}).", _RESTORE) from error


def _version(metadata: Mapping[str, str], name: str) -> int:
    if metadata.get("schema") != SCHEMA_NAME:
        raise DamagedDataError(name, f"says schema {metadata.get('schema')!r}, not {SCHEMA_NAME}.", _RESTORE)
    text = metadata.get("version", "")
    version = int(text) if text.isdecimal() else 0
    if version < 1:
        raise DamagedDataError(name, f"says version {text!r}, which never was.", _RESTORE)
    if version > SCHEMA_VERSION:
        raise DamagedDataError(
            name,
            f"is {SCHEMA_NAME} version {version}, and this program reads up to version {SCHEMA_VERSION}.",
            "Use the program that wrote it, or a newer one.",
        )
    return version
