"""An object store that misbehaves as real ones do: calls fail, or take effect and fail to say so; lists come late."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from schemas.object_calls import Objects, Patience

THROTTLED = "Generic S3 error: Server returned non-2xx status code: 503 Service Unavailable: SlowDown"
TIMED_OUT = "Generic S3 error: HTTP error: error sending request: operation timed out"

QUICK = Patience(attempts=12, first_attempts=12, sleep=lambda seconds: None)
"""Tries again often and at once: with half of the calls failing, one of 4,096 would still be given up."""


@dataclass
class FaultyStore:
    """obstore's memory store with faults, drawn with a seed.

    Args:
      refused: share of the calls that fail and do nothing.
      unanswered: share of the calls that do what they should, and then fail.
      late: keys put in the last so many puts are missing from lists.
      slow_seconds: what every call takes.
      page: keys in one page of a list.
    """

    refused: float = 0.0
    unanswered: float = 0.0
    late: int = 0
    slow_seconds: float = 0.0
    page: int = 3
    objects: Objects = field(default_factory=MemoryStore)
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()
        self._recent: list[str] = []
        self.calls: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            draw = self._random.random()
            self.calls[name] += 1
        time.sleep(self.slow_seconds)
        if draw < self.refused:
            self.faults["refused"] += 1
            raise GenericError(THROTTLED)
        answer = getattr(self.objects, name)(*args, **kwargs)
        if draw < self.refused + self.unanswered:
            self.faults["unanswered"] += 1
            raise GenericError(TIMED_OUT)
        return answer

    def put(self, path: str, file: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._recent = [*self._recent, path][-self.late :] if self.late else []
        return self._call("put", path, file, **kwargs)

    def get(self, path: str) -> Any:
        return self._call("get", path)

    def get_range(self, path: str, *, start: int, length: int) -> Any:
        return self._call("get_range", path, start=start, length=length)

    def head(self, path: str) -> Any:
        return self._call("head", path)

    def delete(self, paths: str) -> Any:
        return self._call("delete", paths)

    def list(self, prefix: str | None = None, *, offset: str | None = None) -> Iterator[list[Any]]:
        seen = self._seen(self._call("list", prefix, offset=offset))
        for start in range(0, len(seen), self.page):
            yield seen[start : start + self.page]
            if start + self.page < len(seen) and self._random.random() < self.refused:
                self.faults["torn list"] += 1
                raise GenericError(THROTTLED)

    def _seen(self, pages: Iterable[list[Any]]) -> list[Any]:
        found = sorted((entry for page in pages for entry in page), key=lambda entry: entry["path"])
        seen = [entry for entry in found if entry["path"] not in self._recent]
        self.faults["late"] += len(found) - len(seen)
        return seen

    def list_with_delimiter(self, prefix: str | None = None) -> Any:
        found = self._call("list_with_delimiter", prefix)
        if not self.late:
            return found
        below = f"{prefix}/" if prefix else ""
        inside = [entry["path"].removeprefix(below) for entry in self._seen(self.objects.list(prefix))]
        folders = {below + key.split("/")[0] for key in inside if "/" in key}
        return {"common_prefixes": sorted(folders), "objects": []}
