"""Rows of a data set by index: what every source of prompts gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol


class RowSource(Protocol):
    """Rows of a split. Reads are safe from several threads."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def all_rows(source: RowSource) -> Iterator[Mapping[str, Any]]:
    """Every row, in order."""
    return (source[index] for index in range(len(source)))
