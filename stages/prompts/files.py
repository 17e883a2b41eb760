"""Prompts from files: JSONL, Parquet and Arrow IPC, one row a prompt.

    {"prompt": "6 * 7 = ?", "answer": "42"}
    {"messages": [{"role": "user", "content": "6 * 7 = ?"}], "answer": "42"}

A row has a column `prompt` (text or messages) or `messages`; all its other columns are kept, for the reward. Files are
listed by split, or all together: then the hash of what a row asks decides its split, so equal prompts are never in two.
A prompt in files of two splits is refused, because what is trained on measures nothing.

A file is gone through once, when it is opened: every row is checked there, and one that is wrong is named by file and
line. Of JSONL only the places of the lines stay in memory; Arrow IPC is mapped, and Parquet is unpacked into memory.
Left out: compressed JSONL, and files in object stores.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from schemas.errors import UserError
from schemas.recipe import DataSection, Section
from stages.options import checked_options
from stages.prompts.rows import RowSource

JSON_LINES = (".jsonl", ".ndjson")
ARROW = (".arrow", ".ipc", ".feather")
MEND = "Mend or remove that row."

Patterns = Annotated[tuple[str, ...], Field(min_length=1)]


class FileOptions(Section):
    """Options of the data source (`data.options`)."""

    files: dict[str, Patterns] | Patterns = Field(
        description="files, `*` allowed: a list that is split by content, or a list for each split"
    )
    hold_out: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.2, description="share of prompts that are not for training, half of it for test; for one list of files"
    )


def open_files(data: DataSection, split: str) -> RowSource:
    """The rows of `split`: their columns in JSON values.

    Raises:
      UserError: no such file or split; a file that cannot be read; a row that is none, by file and line; or a prompt
        that is in files of two splits.
    """
    options = checked_options(FileOptions, data.options, "data.options")
    if not isinstance(options.files, dict):
        return Rows(tuple(_of_split(open_file(path), split, options.hold_out) for path in _paths(options.files)))
    if split not in options.files:
        known = ", ".join(options.files)
        raise UserError(f"data.options.files of {data.name}", f"has no split {split!r}.", f"It has {known}.")
    opened = {name: [open_file(path) for path in _paths(patterns)] for name, patterns in options.files.items()}
    _refuse_shared(opened, data)
    return Rows(tuple(Part(file, np.arange(len(file.places))) for file in opened[split]))


def _of_split(file: RowFile, split: str, hold_out: float) -> Part:
    if split not in ("train", "validation", "test"):
        raise UserError(
            f"split {split!r}", "is none of train, validation and test.", "List the files of each split by its name."
        )
    homes = np.select([file.places < hold_out / 2, file.places < hold_out], ["test", "validation"], "train")
    return Part(file, np.flatnonzero(homes == split))


def _refuse_shared(opened: Mapping[str, Sequence[RowFile]], data: DataSection) -> None:
    held_out = {name: opened[name] for name in {data.validation_split, data.test_split} & set(opened)}
    for file in opened.get(data.train_split, ()):
        for name, others in held_out.items():
            for other in others:
                shared = np.flatnonzero(np.isin(file.places, other.places))
                if len(shared):
                    line = int(np.flatnonzero(other.places == file.places[shared[0]])[0])
                    raise UserError(
                        file.where(int(shared[0])),
                        f"asks what {other.where(line)} of split {name!r} asks ({len(shared)} such rows): what is "
                        "trained on measures nothing.",
                        "Remove such rows from one of them, or list all files together and let content decide.",
                    )


def _paths(patterns: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for pattern in patterns:
        matching = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        if not matching:
            raise UserError(pattern, "matches no file.", "See data.options.files; paths are from where you started.")
        found += map(Path, matching)
    return list(dict.fromkeys(found))


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows of a file, by index."""

    file: RowFile
    indices: np.ndarray  # int64 [n]


class Rows:
    """Rows of several files, one file after another. Reads are safe from several threads."""

    def __init__(self, parts: Sequence[Part]):
        self._parts = parts
        self._ends = np.cumsum([len(part.indices) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        place = int(np.searchsorted(self._ends, index, side="right"))
        part = self._parts[place]
        start = int(self._ends[place]) - len(part.indices)
        return part.file.row(int(part.indices[index - start]))


# One file ---------------------------------------------------------------------------------------------------------


class Reader(Protocol):
    """Raw rows of a file. `unit` is what a person counts them in."""

    unit: str

    def __iter__(self) -> Iterator[Any]: ...
    def __getitem__(self, index: int) -> Any: ...
    def number(self, index: int) -> int:
        """The row's line or row number, from 1."""
        ...


@dataclass(frozen=True, eq=False)
class RowFile:
    """A file whose rows have all been looked at. `places` [n] in [0, 1) are functions of what each row asks."""

    path: Path
    reader: Reader
    places: np.ndarray = field(repr=False)  # float64 [n]

    def row(self, index: int) -> Mapping[str, Any]:
        return checked_row(self.reader[index], self.where(index))

    def where(self, index: int) -> str:
        return f"{self.path}, {self.reader.unit} {self.reader.number(index)}"


def open_file(path: Path) -> RowFile:
    """The file; one that was opened before in this process, and has not changed, is not read again."""
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error.strerror}).", "See data.options.files.") from error
    return _opened(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=64)
def _opened(path: Path, changed: int, size: int) -> RowFile:
    reader = _reader(path)
    places = [
        _place(checked_row(raw, f"{path}, {reader.unit} {reader.number(index)}")) for index, raw in enumerate(reader)
    ]
    return RowFile(path, reader, np.array(places, np.float64))


def _reader(path: Path) -> Reader:
    if path.suffix in JSON_LINES:
        return JsonLines(path)
    if path.suffix == ".parquet":
        return TableRows(_table(path, lambda: pq.read_table(path, memory_map=True)))
    if path.suffix in ARROW:
        return TableRows(_table(path, lambda: _mapped(path)))
    known = ", ".join((*JSON_LINES, ".parquet", *ARROW))
    raise UserError(str(path), f"is of no kind that is read here ({known}).", "Name or convert it accordingly.")


class JsonLines:
    """Lines of JSON by index; blank lines are none. Iterating goes over the file once and notes where lines are."""

    unit = "line"

    def __init__(self, path: Path):
        self._path = path
        with path.open("rb") as file:  # mapped, so that one that is replaced later is still the one that was checked
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        self._spans: list[tuple[int, int, int]] = []  # start, end, line number

    def __iter__(self) -> Iterator[Any]:
        self._spans.clear()
        start, number = 0, 1
        while start < len(self._data):
            end = self._data.find(b"\n", start) + 1 or len(self._data)
            if self._data[start:end].strip():
                self._spans.append((start, end, number))
                yield self[len(self._spans) - 1]
            start, number = end, number + 1

    def __getitem__(self, index: int) -> Any:
        start, end, number = self._spans[index]
        try:
            return json.loads(self._data[start:end], parse_constant=_no_number)
        except ValueError as error:
            raise UserError(f"{self._path}, line {number}", f"is no JSON ({error}).", MEND) from None

    def number(self, index: int) -> int:
        return self._spans[index][2]


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON value")


class TableRows:
    """Rows of an Arrow table by index."""

    unit = "row"

    def __init__(self, table: pa.Table):
        self._table = table

    def __iter__(self) -> Iterator[Any]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def __getitem__(self, index: int) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]

    def number(self, index: int) -> int:
        return index + 1


def _table(path: Path, read: Any) -> pa.Table:
    try:
        return read()
    except (OSError, pa.ArrowException) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(str(path), f"cannot be read ({said}).", "Is it whole, and named by its kind?") from error


def _mapped(path: Path) -> pa.Table:
    source = pa.memory_map(str(path))
    try:
        return pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:  # the stream format, which Hugging Face's datasets are kept in
        source.seek(0)
        return pa.ipc.open_stream(source).read_all()


# One row ----------------------------------------------------------------------------------------------------------


def checked_row(raw: Any, where: str) -> Mapping[str, Any]:
    """A row as a prompt's payload: JSON values, with `prompt` as text or `messages` as a list of messages.

    Raises:
      UserError: naming `where`: it is no table, asks nothing, or has a value that is no JSON value.
    """
    if not isinstance(raw, Mapping):
        raise UserError(where, f"is a {type(raw).__name__}, and not a table of columns.", MEND)
    row = {str(name): _json(value, f"{where}, column {name}") for name, value in raw.items()}
    if isinstance(row.get("prompt"), list) and row.get("messages") is None:
        row["messages"] = row.pop("prompt")
    if row.get("messages") is not None:
        row["messages"] = _messages(row["messages"], where)
    elif not isinstance(row.get("prompt"), str) or not row["prompt"]:
        raise UserError(where, "has neither a text 'prompt' nor 'messages'.", MEND)
    return row


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise UserError(where, "its 'messages' are no list of messages.", MEND)
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UserError(where, f"its message {number} has no role or no content.", MEND)
    # Columns of Arrow have the same fields in every row: what a message does not have is null there.
    return [{k: v for k, v in message.items() if v is not None or k == "content"} for message in value]


def _json(value: Any, where: str) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not np.isfinite(value):
            raise UserError(where, f"{value} is no JSON value.", MEND)
        return value
    if isinstance(value, Mapping):
        return {str(name): _json(item, where) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item, where) for item in value]
    raise UserError(where, f"a {type(value).__name__} is no JSON value.", "Leave the column out, or make it text.")


def _place(row: Mapping[str, Any]) -> float:
    """A number in [0, 1) that depends on what the row asks alone."""
    asked = json.dumps(row.get("messages") or row["prompt"], sort_keys=True)
    return int(hashlib.sha256(asked.encode()).hexdigest()[:13], 16) / 16**13
