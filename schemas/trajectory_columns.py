"""The columns of a trajectory table, version 1, in types and in words. `docs/schema.md` is made from them.

Axes: T tokens of one trajectory, G samples of a group, L tokens of a pack row. All [T] columns of a row have one
length.

Left out on purpose: advantages. They are a pure function of a step's rewards, and leaving them out lets the same shards
train another algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

SCHEMA_NAME = "rollstream.trajectory"
SCHEMA_VERSION = 1

SPANS = pa.list_(
    pa.struct([pa.field("start", pa.int32()), pa.field("end", pa.int32()), pa.field("policy_version", pa.int64())])
)
TURNS = pa.list_(
    pa.struct(
        [
            pa.field("role", pa.string()),
            pa.field("start", pa.int32()),
            pa.field("end", pa.int32()),
            pa.field("seconds", pa.float64()),
        ]
    )
)
COMPONENTS = pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.float64())]))
SAMPLING = pa.struct(
    [
        pa.field("temperature", pa.float64()),
        pa.field("top_k", pa.int32()),
        pa.field("top_p", pa.float64()),
        pa.field("min_p", pa.float64()),
    ]
)


@dataclass(frozen=True)
class Column:
    """A column of the table. `in_content`: two runs of one recipe agree in it, so it enters `content_sha256`."""

    name: str
    type: pa.DataType
    meaning: str
    unit: str = ""
    off_mask: str = ""
    nullable: bool = False
    in_content: bool = True

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, self.type, nullable=self.nullable)


COLUMNS: tuple[Column, ...] = (
    Column("run_id", pa.string(), "the run that sampled it", in_content=False),
    Column("step", pa.int64(), "training step that consumes it", "steps"),
    Column("group_index", pa.int32(), "the prompt's place in the step; all samples of a prompt share it"),
    Column("sample_index", pa.int32(), "the sample's place in its group, 0 to G-1"),
    Column("prompt_id", pa.string(), "content id of the prompt; equal within a group"),
    Column("task", pa.string(), "name of the task; equal within a group"),
    Column("prompt_length", pa.int32(), "tokens [0, prompt_length) are the prompt; equal within a group", "tokens"),
    Column(
        "tokens",
        pa.list_(pa.int32()),
        "[T] ids exactly as sampled, and as the environment's text was encoded; never encoded again",
        "token id",
        "the token itself",
    ),
    Column("loss_mask", pa.list_(pa.bool_()), "[T] true exactly where the policy sampled", "", "false"),
    Column(
        "sampler_logprobs",
        pa.list_(pa.float32()),
        "[T] log-probability under the distribution the token was really drawn from",
        "nats",
        "0.0",
    ),
    Column(
        "version_spans",
        SPANS,
        "tokens [start, end) were sampled by policy_version; the spans cover exactly the mask, in order",
        "tokens, versions",
        "no span",
    ),
    Column(
        "turns", TURNS, "tokens [start, end) were written by role: prompt, policy or environment", "tokens, seconds"
    ),
    Column("reward", pa.float64(), "total reward; 0.0 for a tombstone", "reward"),
    Column(
        "reward_components", COMPONENTS, "named parts of the reward, in order of name; none for a tombstone", "reward"
    ),
    Column("stop_reason", pa.string(), "why it ended: terminated, truncated, max_turns, max_tokens or failed"),
    Column("status", pa.string(), "ok, or failed: a tombstone, which counts in its group and trains nothing"),
    Column("error", pa.string(), "one line; null unless status is failed", nullable=True),
    Column("environment", pa.string(), "facts of the episode, a JSON object"),
    Column("sampling", SAMPLING, "the sampler's parameters; top_k 0, top_p 1 and min_p 0 mean not truncated"),
    Column("generator", pa.string(), "the process that sampled it", in_content=False),
    Column("started_at", pa.float64(), "when sampling began", "seconds since the epoch", in_content=False),
    Column("seconds", pa.float64(), "how long the episode took", "seconds", in_content=False),
    Column("pack_row", pa.int32(), "training row that holds its branch (what follows the prompt); -1: in none"),
    Column("pack_offset", pa.int32(), "where the branch begins in that row", "tokens"),
)
COLUMN_BY_NAME: Mapping[str, Column] = {column.name: column for column in COLUMNS}
SCHEMA = pa.schema(
    [column.field for column in COLUMNS], metadata={"schema": SCHEMA_NAME, "version": str(SCHEMA_VERSION)}
)

# What is true of the whole table: metadata of its schema, beside the schema's name and version.
TABLE_METADATA: Mapping[str, str] = {
    "run_id": "the run",
    "step": "training step that consumes the table",
    "element_index": "which of the step's elements it is",
    "row_tokens": "L, tokens of a pack row",
    "rows": "pack rows of the element",
}
SEAL = "table_sha256"  # metadata of a stored table only: the digest of all columns and of the other metadata


class InvalidTrajectory(ValueError):
    """A table breaks a rule of the schema: where (None: does not apply), with which value, and which rule."""

    def __init__(self, reason: str, *, column: str, value: Any, row: int | None = None, group: int | None = None):
        self.reason, self.column, self.value, self.row, self.group = reason, column, value, row, group
        place = [f"group {group}" if group is not None else "", f"row {row}" if row is not None else ""]
        where = ", ".join([part for part in place if part] + [f"column {column}", f"value {value!r}"])
        super().__init__(f"{where}: {reason}")


def metadata_of(table: pa.Table) -> dict[str, str]:
    """The metadata of the table's schema, as text."""
    return {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}


def whole(column: pa.ChunkedArray) -> pa.Array:
    """`column` in one piece."""
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def lengths_of(lists: pa.Array) -> np.ndarray:
    return pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)


def split_lists(lists: pa.Array, dtype: type[np.generic]) -> list[np.ndarray]:
    flat = lists.flatten().to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    flat.flags.writeable = False
    return np.split(flat, np.cumsum(lengths_of(lists))[:-1]) if len(lists) else []


def schema_difference(table: pa.Table) -> str:
    """In words, how the table's columns differ from SCHEMA's; "" if they do not."""
    names = [field.name for field in SCHEMA]
    for name in names:
        if name not in table.column_names:
            return f"{name} is missing"
        if table.schema.field(name).type != SCHEMA.field(name).type:
            return f"{name} is {table.schema.field(name).type}, not {SCHEMA.field(name).type}"
        if table.schema.field(name).nullable != SCHEMA.field(name).nullable:
            return f"{name} is declared nullable, or not, otherwise"
    if table.column_names != names:
        return f"they are {', '.join(table.column_names)}"
    missing = [key for key in TABLE_METADATA if key not in metadata_of(table)]
    return f"metadata {', '.join(missing)} is missing" if missing else ""


# Documentation ----------------------------------------------------------------------------------------------------


def markdown_table() -> str:
    """The columns as a Markdown table, for docs/schema.md."""
    lines = [
        "| column | type | meaning | unit | off the mask | null | in content digest |",
        "|---|---|---|---|---|---|---|",
    ]
    for column in COLUMNS:
        content = "all but seconds" if column.name == "turns" else _yes(column.in_content)
        cells = [f"`{column.name}`", f"`{_type_name(column.type)}`", column.meaning, column.unit, column.off_mask]
        lines.append(f"| {' | '.join([*cells, _yes(column.nullable), content])} |")
    return "\n".join(lines) + "\n"


def metadata_markdown_table() -> str:
    """The table's metadata as a Markdown table, for docs/schema.md."""
    fixed = {"schema": f"`{SCHEMA_NAME}`", "version": f"`{SCHEMA_VERSION}`"}
    sealed = {SEAL: "digest of all columns and of the other metadata; in files only"}
    entries = {**fixed, **TABLE_METADATA, **sealed}
    rows = [f"| `{key}` | {text} |" for key, text in entries.items()]
    return "\n".join(["| key | meaning |", "|---|---|", *rows]) + "\n"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _type_name(type_: pa.DataType) -> str:
    if pa.types.is_list(type_):
        return f"list<{_type_name(type_.value_type)}>"
    if pa.types.is_struct(type_):
        return f"struct<{', '.join(f'{field.name}: {_type_name(field.type)}' for field in type_)}>"
    return str(type_)
