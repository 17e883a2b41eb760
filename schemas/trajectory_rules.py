"""The rules of a trajectory table: what `validate` checks, and the words in which it refuses.

pyarrow refuses neither a null in a column that may hold none nor anything that only we know about, so every rule is
looked for here. All checks are over whole columns; a step of a thousand trajectories takes milliseconds.

Left out on purpose: rules that need the recipe or another table (how many samples a group has by the recipe, whether
token ids are below the vocabulary's size).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.records import Role, StopReason
from schemas.trajectory_columns import (
    COLUMNS,
    InvalidTrajectory,
    lengths_of,
    metadata_of,
    schema_difference,
    split_lists,
    whole,
)


def validate(table: pa.Table) -> None:
    """Checks every rule of the schema.

    Raises:
      InvalidTrajectory: naming group, row, column and value of the first offender.
    """
    wrong = schema_difference(table)
    if wrong:
        raise InvalidTrajectory(wrong, column=wrong.split()[0], value=None)
    rows = _Rows({name: whole(table.column(name)) for name in table.column_names}, metadata_of(table))
    _check_nulls(rows)
    for check in _CHECKS:
        check(rows)


class _Rows:
    """The table in NumPy: columns one value a row, lists flat with the row of each of their entries."""

    def __init__(self, columns: Mapping[str, pa.Array], metadata: Mapping[str, str]):
        self.columns = columns
        self.metadata = metadata
        self.count = len(columns["tokens"])

    def of(self, name: str) -> np.ndarray:
        return self.columns[name].to_numpy(zero_copy_only=False)

    def flat(self, name: str, field: str | None = None) -> np.ndarray:
        items = self.columns[name].flatten()
        return (pc.struct_field(items, field) if field else items).to_numpy(zero_copy_only=False)

    def row_of(self, name: str) -> np.ndarray:
        return np.repeat(np.arange(self.count), lengths_of(self.columns[name]))

    def position(self, name: str) -> np.ndarray:
        """Place of each flat entry within its row."""
        lengths = lengths_of(self.columns[name])
        return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)

    def number(self, key: str) -> int:
        text = self.metadata[key]
        if not text.isdecimal():
            raise InvalidTrajectory("metadata must be a number", column=key, value=text)
        return int(text)

    def fail(self, row: int | np.integer, column: str, value: Any, reason: str) -> NoReturn:
        value = value.item() if isinstance(value, np.generic) else value
        group = self.columns["group_index"][int(row)].as_py()
        raise InvalidTrajectory(reason, column=column, value=value, row=int(row), group=group)

    def refuse(self, bad: np.ndarray, column: str, reason: str) -> None:
        """Fails at the first row where `bad` [rows] is true, showing the column's value there."""
        if bad.any():
            row = int(np.argmax(bad))
            self.fail(row, column, self.columns[column][row].as_py(), reason)

    def refuse_flat(self, bad: np.ndarray, column: str, reason: str) -> None:
        """Fails at the first entry of a list column where `bad` is true, saying its position in the row."""
        if bad.any():
            entry = int(np.argmax(bad))
            row, position = self.row_of(column)[entry], self.position(column)[entry]
            self.fail(row, column, self.columns[column].flatten()[entry].as_py(), f"at position {position}: {reason}")


def _check_nulls(rows: _Rows) -> None:
    for column in COLUMNS:
        array = rows.columns[column.name]
        if not column.nullable and array.null_count:
            rows.fail(int(np.argmax(_nulls(array))), column.name, None, "may not be null")
        if pa.types.is_list(array.type):
            for items in _with_children(array.flatten()):
                if items.null_count:
                    rows.refuse_flat(_nulls(items), column.name, "may not be null")
        elif pa.types.is_struct(array.type):
            for child in array.flatten():
                if child.null_count:
                    rows.refuse(_nulls(child), column.name, "may not be null")


def _nulls(array: pa.Array) -> np.ndarray:
    return array.is_null().to_numpy(zero_copy_only=False)


def _with_children(items: pa.Array) -> list[pa.Array]:
    return [items, *items.flatten()] if pa.types.is_struct(items.type) else [items]


def _check_identity(rows: _Rows) -> None:
    run_id = rows.metadata["run_id"]
    rows.refuse(rows.of("run_id") != run_id, "run_id", f"the table is of run {run_id!r}")
    step = rows.number("step")
    rows.refuse(rows.of("step") != step, "step", f"the table is of step {step}")
    rows.number("element_index")
    group, sample = rows.of("group_index").astype(np.int64), rows.of("sample_index").astype(np.int64)
    rows.refuse(group < 0, "group_index", "may not be negative")
    rows.refuse(sample < 0, "sample_index", "may not be negative")
    key = group * 2**32 + sample
    _, first = np.unique(key, return_index=True)
    again = np.ones(rows.count, bool)
    again[first] = False
    rows.refuse(again, "sample_index", "this sample of the group is there twice")
    rows.refuse(np.diff(key, prepend=-1) < 0, "sample_index", "rows are in order of group and sample")


def _check_groups(rows: _Rows) -> None:
    group, sample = rows.of("group_index"), rows.of("sample_index")
    if not rows.count:
        return
    first = _first_of_group(group)
    rows.refuse(sample != np.arange(rows.count) - first, "sample_index", "the group lacks a sample before this one")
    sizes = np.bincount(first, minlength=rows.count)[first]
    rows.refuse(sizes != sizes.max(), "sample_index", f"the group lacks samples: others have {sizes.max()}")
    for column in ("prompt_id", "task"):
        values = rows.of(column)
        rows.refuse(values != values[first], column, "the samples of a group share one prompt")


def _first_of_group(group: np.ndarray) -> np.ndarray:
    """[rows] the first row of each row's group; rows are in order of group."""
    starts = np.flatnonzero(np.diff(group, prepend=group[0] - 1))
    return np.repeat(starts, np.diff(starts, append=len(group)))


def _check_lengths(rows: _Rows) -> None:
    lengths = lengths_of(rows.columns["tokens"])
    for column in ("loss_mask", "sampler_logprobs"):
        bad = lengths_of(rows.columns[column]) != lengths
        if bad.any():
            row = int(np.argmax(bad))
            found = len(rows.columns[column][row])
            rows.fail(row, column, found, f"{found} entries for {lengths[row]} tokens")
    rows.refuse_flat(rows.flat("tokens") < 0, "tokens", "token ids are not negative")


def _check_prompts(rows: _Rows) -> None:
    """A tombstone may lack its prompt altogether: the environment that would have written it is what failed."""
    lengths, prompt = lengths_of(rows.columns["tokens"]), rows.of("prompt_length").astype(np.int64)
    rows.refuse((prompt < 0) | (prompt > lengths), "prompt_length", "the prompt lies within the tokens")
    has_prompt = prompt > 0
    rows.refuse(~has_prompt & (rows.of("status") == "ok"), "prompt_length", "a trajectory has a prompt")
    inside = rows.position("tokens") < prompt[rows.row_of("tokens")]
    rows.refuse_flat(inside & rows.flat("loss_mask"), "loss_mask", "the policy did not sample the prompt")
    _check_shared_prompts(rows, prompt)


def _check_shared_prompts(rows: _Rows, prompt: np.ndarray) -> None:
    tokens = split_lists(rows.columns["tokens"], np.int32)
    group = rows.of("group_index")
    shared: dict[int, np.ndarray] = {}
    for row in np.flatnonzero(prompt > 0):
        mine = tokens[row][: prompt[row]]
        theirs = shared.setdefault(int(group[row]), mine)
        if len(mine) != len(theirs):
            rows.fail(row, "prompt_length", len(mine), f"other samples of the group have {len(theirs)} prompt tokens")
        if not np.array_equal(mine, theirs):
            at = int(np.argmax(mine != theirs))
            rows.fail(row, "tokens", mine[at], f"at position {at}: other samples have prompt token {theirs[at]}")


def _check_logprobs(rows: _Rows) -> None:
    logprobs, mask = rows.flat("sampler_logprobs"), rows.flat("loss_mask")
    rows.refuse_flat(~np.isfinite(logprobs), "sampler_logprobs", "log-probabilities are finite")
    rows.refuse_flat(logprobs > 0.0, "sampler_logprobs", "a log-probability is at most 0")
    rows.refuse_flat(~mask & (logprobs != 0.0), "sampler_logprobs", "it is 0.0 where the policy did not sample")


def _check_spans(rows: _Rows) -> None:
    _check_extents(rows, "version_spans", least=1)
    rows.refuse_flat(
        rows.flat("version_spans", "policy_version") < 0, "version_spans", "policy versions are not negative"
    )
    covered = _covered(rows, "version_spans", np.ones(len(rows.flat("version_spans", "start")), bool))
    mask = rows.flat("loss_mask")
    rows.refuse_flat(mask & ~covered, "loss_mask", "the policy sampled this token, and no version span covers it")
    rows.refuse_flat(~mask & covered, "loss_mask", "a version span covers a token that the policy did not sample")


def _check_turns(rows: _Rows) -> None:
    _check_extents(rows, "turns", least=0)
    roles = rows.flat("turns", "role")
    rows.refuse_flat(~np.isin(roles.astype(str), get_args(Role)), "turns", f"roles are {', '.join(get_args(Role))}")
    rows.refuse_flat(~np.isfinite(rows.flat("turns", "seconds")), "turns", "seconds are finite")
    by_policy = _covered(rows, "turns", roles == "policy")
    rows.refuse_flat(rows.flat("loss_mask") & ~by_policy, "loss_mask", "a sampled token lies in a turn of the policy")


def _check_extents(rows: _Rows, column: str, *, least: int) -> None:
    """Each [start, end) lies inside its row's tokens, is not shorter than `least`, and begins where or after the last
    one ended."""
    start, end = rows.flat(column, "start").astype(np.int64), rows.flat(column, "end").astype(np.int64)
    row = rows.row_of(column)
    inside = (start >= 0) & (end <= lengths_of(rows.columns["tokens"])[row])
    rows.refuse_flat(~inside, column, "it lies within the tokens")
    rows.refuse_flat(end - start < least, column, "it ends after it starts")
    follows = np.zeros(len(start), bool)
    follows[1:] = (row[1:] == row[:-1]) & (start[1:] < end[:-1])
    rows.refuse_flat(follows, column, "it begins before the one before it ended")


def _covered(rows: _Rows, column: str, chosen: np.ndarray) -> np.ndarray:
    """[all tokens] true inside a chosen extent of a list of (start, end)."""
    lengths = lengths_of(rows.columns["tokens"])
    base = (np.cumsum(lengths) - lengths)[rows.row_of(column)]
    change = np.zeros(lengths.sum() + 1, np.int64)
    np.add.at(change, (base + rows.flat(column, "start"))[chosen], 1)
    np.add.at(change, (base + rows.flat(column, "end"))[chosen], -1)
    return np.cumsum(change)[:-1] > 0


def _check_outcomes(rows: _Rows) -> None:
    status, stop = rows.of("status"), rows.of("stop_reason")
    failed = status == "failed"
    rows.refuse(~failed & (status != "ok"), "status", "it is ok or failed")
    stops = get_args(StopReason)
    rows.refuse(~np.isin(stop.astype(str), stops), "stop_reason", f"it is one of {', '.join(stops)}")
    rows.refuse(failed != (stop == "failed"), "stop_reason", "it is failed exactly where status is failed")
    said = ~_nulls(rows.columns["error"])
    rows.refuse(failed != said, "error", "it is said exactly where status is failed")
    sampled = np.bincount(rows.row_of("loss_mask"), weights=rows.flat("loss_mask"), minlength=rows.count) > 0
    rows.refuse(failed & sampled, "loss_mask", "a tombstone trains nothing")


def _check_rewards(rows: _Rows) -> None:
    failed, reward = rows.of("status") == "failed", rows.of("reward")
    rows.refuse(~np.isfinite(reward), "reward", "rewards are finite")
    rows.refuse_flat(
        ~np.isfinite(rows.flat("reward_components", "value")), "reward_components", "reward components are finite"
    )
    rows.refuse(failed & (reward != 0.0), "reward", "a tombstone has reward 0.0")
    rows.refuse(
        failed & (lengths_of(rows.columns["reward_components"]) > 0), "reward_components", "a tombstone has none"
    )


def _check_records(rows: _Rows) -> None:
    for row, text in enumerate(rows.columns["environment"].to_pylist()):
        if not _is_json_object(text):
            rows.fail(row, "environment", text, "facts are a JSON object")
    temperature = pc.struct_field(rows.columns["sampling"], "temperature").to_numpy(zero_copy_only=False)
    rows.refuse(~(np.isfinite(temperature) & (temperature > 0)), "sampling", "the temperature is finite and above 0")
    for column in ("started_at", "seconds"):
        rows.refuse(~np.isfinite(rows.of(column)), column, "seconds are finite")


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _check_plan(rows: _Rows) -> None:
    """Each branch lies in one row, beside branches of its own group only, and overlaps none.

    A branch goes from the end of the prompt to the last sampled token. One that lay in no row would be training data
    lost without a word.
    """
    pack_row, offset = rows.of("pack_row").astype(np.int64), rows.of("pack_offset").astype(np.int64)
    row_tokens, count = rows.number("row_tokens"), rows.number("rows")
    lengths = _branch_lengths(rows)
    end = offset + lengths
    rows.refuse((pack_row < -1) | (pack_row >= count), "pack_row", f"the table has {count} pack rows; -1 is none")
    placed = pack_row >= 0
    rows.refuse(placed & (rows.of("status") == "failed"), "pack_row", "a tombstone lies in no pack row")
    rows.refuse(~placed & (lengths > 0), "pack_row", "a trajectory with sampled tokens lies in a pack row")
    outside = placed & ((offset < 0) | (end > row_tokens))
    rows.refuse(outside, "pack_offset", f"the branch lies within the row's {row_tokens} tokens")
    order = np.lexsort((end, offset, pack_row))
    order = order[placed[order]]
    before, after = order[:-1], order[1:]
    together = pack_row[before] == pack_row[after]
    group = rows.of("group_index")
    _refuse_at(rows, after[together & (group[before] != group[after])], "pack_row", "a pack row holds one group only")
    _refuse_at(rows, after[together & (offset[after] < end[before])], "pack_offset", "branches overlap")


def _branch_lengths(rows: _Rows) -> np.ndarray:
    """[rows] tokens from the end of the prompt to the last sampled one; 0 where none is sampled."""
    ends = np.zeros(rows.count, np.int64)
    mask = rows.flat("loss_mask")
    np.maximum.at(ends, rows.row_of("loss_mask")[mask], rows.position("loss_mask")[mask] + 1)
    return np.maximum(ends - rows.of("prompt_length"), 0)


def _refuse_at(rows: _Rows, offenders: np.ndarray, column: str, reason: str) -> None:
    bad = np.zeros(rows.count, bool)
    bad[offenders] = True
    rows.refuse(bad, column, reason)


_CHECKS: tuple[Callable[[_Rows], None], ...] = (
    _check_identity,
    _check_groups,
    _check_lengths,
    _check_prompts,
    _check_logprobs,
    _check_spans,
    _check_turns,
    _check_outcomes,
    _check_rewards,
    _check_records,
    _check_plan,
)
