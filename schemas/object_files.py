"""A run directory in an object store (S3, GCS, Azure, or memory): the other kind of `schemas.store`.

A put is atomic there, and create-if-absent is one call, so nothing is staged. What such stores lack is made of that:

* Lines are not appended. A log is a folder of parts, `metrics/train.jsonl/<time>-<nonce>`; each writer has one of its
  own, puts it again with every line until it is long enough, and then begins the next. Behind `get`, `list` and the
  rest it is one key, as in a local folder.
* Locks are leases, see `schemas.holds`.
* A call that never answered may have had its effect. A creation that is told, when tried again, that the key exists
  looks whether it was itself; a part of a log whose last put was in doubt is not written to again.

Listings may be late: what is decided by one (which shards are orphans, say) must ask for the keys themselves.

Left out on purpose: removing uploads in parts that a killed process left unfinished (no listing shows them; give the
bucket a lifecycle rule for incomplete uploads).
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from obstore.exceptions import AlreadyExistsError

from schemas.holds import Hold, Lease
from schemas.local_files import LOG_SUFFIX
from schemas.object_calls import Calls, Objects, Patience, refuse_missing_bucket

_PART_BYTES = 64 * 1024  # a part this long gets no more lines: every line puts the whole part again
_PIECE_BYTES = 16 * 1024 * 1024  # of a file, in one call: a whole large file would not come in time
_PIECES_AT_ONCE = 8

Keys = list[str]  # a name of its own, because the class below has a method called list


@dataclass
class _Part:
    """The part of a log that this writer appends to."""

    key: str
    data: bytes = b""


@dataclass
class _OpenLog:
    lock: threading.Lock = field(default_factory=threading.Lock)
    part: _Part | None = None


class ObjectFiles:
    """An object store, or a part of one below a prefix.

    Args:
      objects: an obstore store.
      location: of the run, for messages.
    """

    def __init__(self, objects: Objects, location: str, patience: Patience | None = None):
        self._objects = objects
        self._location = location
        self._calls = Calls(location, patience or Patience())
        self._has_bucket = False
        self._logs: defaultdict[str, _OpenLog] = defaultdict(_OpenLog)
        self._opening = threading.Lock()

    # Whole objects

    def put_new(self, key: str, data: bytes) -> bool:
        while True:
            try:
                self._calls.make(key, lambda: self._objects.put(key, data, mode="create"))
                return True
            except AlreadyExistsError as error:
                try:
                    there = self.get_part(key)
                except FileNotFoundError:
                    continue  # S3 says the same of two creations at once, of which perhaps neither succeeded
                return there == data and error.attempts > 1  # type: ignore[attr-defined]

    def put(self, key: str, data: bytes) -> None:
        self._put(key, data)

    def _put(self, key: str, data: bytes | Path) -> int:
        """Returns how many attempts it took."""
        _, attempts = self._calls.make(key, lambda: self._objects.put(key, data))
        return attempts

    def get(self, key: str) -> bytes:
        *older, newest = [self.get_part(name) for name in self._parts_of(key) or [key]]
        # A last line may be torn, if the run was copied here from a local folder; it is ended, as `append_line` would.
        return b"".join(part if part.endswith(b"\n") else part + b"\n" for part in older) + newest

    def get_part(self, key: str) -> bytes:
        try:
            data, _ = self._calls.make(key, lambda: bytes(self._objects.get(key).bytes()))
        except FileNotFoundError:
            self._require_bucket()
            raise FileNotFoundError(f"{self._location} has no {key}") from None
        return data

    def exists(self, key: str) -> bool:
        return bool(self._parts_of(key)) if key.endswith(LOG_SUFFIX) else self._size(key) is not None

    def _size(self, key: str) -> int | None:
        """Of one object, in bytes; None: it does not exist."""
        try:
            found, _ = self._calls.make(key, lambda: self._objects.head(key))
        except FileNotFoundError:
            self._require_bucket()
            return None
        return int(found["size"])

    def _require_bucket(self) -> None:
        """Tells a bucket that is missing from a key that is: some answers say no more than "not found"."""
        if not self._has_bucket:
            try:
                self._calls.make("the bucket", lambda: self._objects.list_with_delimiter("locks"))
            except FileNotFoundError as error:
                refuse_missing_bucket(self._location, error)
            self._has_bucket = True

    def delete(self, key: str) -> None:
        for name in self._parts_of(key) or [key]:
            with suppress(FileNotFoundError):
                self._calls.make(name, lambda name=name: self._objects.delete(name))  # type: ignore[misc]

    # Names

    def list(self, prefix: str) -> Keys:
        return sorted({_log_of(key) or key for key in self._sizes(prefix)})

    def _sizes(self, prefix: str) -> dict[str, int]:
        """Every object below the folder, with its size in bytes, in order of name."""
        found: dict[str, int] = {}

        def read_on() -> None:  # from where an earlier attempt broke off: a long run has many pages
            for page in self._objects.list(prefix or None, offset=max(found, default=None)):
                found.update((entry["path"], int(entry["size"])) for entry in page)

        self._calls.make(prefix or "the list of keys", read_on)
        return dict(sorted(found.items()))

    def folders(self, prefix: str) -> Keys:
        found, _ = self._calls.make(prefix, lambda: self._objects.list_with_delimiter(prefix or None))
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])

    # Logs

    def append_line(self, key: str, line: bytes) -> None:
        with self._opening:
            log = self._logs[key]
        with log.lock:
            part = log.part or _Part(f"{key}/{time.time_ns():020d}-{secrets.token_hex(4)}")
            part.data += line
            log.part = None
            attempts = self._put(part.key, part.data)
            # An attempt in doubt may still arrive, after later lines, and take them back.
            if attempts == 1 and len(part.data) < _PART_BYTES:
                log.part = part

    def log_parts(self, prefix: str) -> dict[str, int]:
        if prefix.endswith(LOG_SUFFIX):
            return self._parts_of(prefix)
        sizes = self._sizes(prefix)
        return {key: size for key, size in sizes.items() if (_log_of(key) or key).endswith(LOG_SUFFIX)}

    def _parts_of(self, key: str) -> dict[str, int]:
        if not key.endswith(LOG_SUFFIX):
            return {}
        size = self._size(key)  # one object, if the run was copied here from a local folder
        return ({} if size is None else {key: size}) | self._sizes(key)

    # Files

    def put_file(self, key: str, path: Path) -> None:
        self._put(key, path)

    def get_file(self, key: str, path: Path) -> None:
        size = self._size(key)
        if size is None:
            raise FileNotFoundError(f"{self._location} has no {key}")
        with open(path, "xb") as file:

            def fetch(start: int) -> None:
                length = min(_PIECE_BYTES, size - start)
                piece, _ = self._calls.make(key, lambda: self._objects.get_range(key, start=start, length=length))
                os.pwrite(file.fileno(), piece, start)

            with ThreadPoolExecutor(_PIECES_AT_ONCE) as pool:
                list(pool.map(fetch, range(0, size, _PIECE_BYTES)))

    # Holds

    @contextmanager
    def held(self, key: str) -> Iterator[Hold]:
        if not self.exists(key):
            raise FileNotFoundError(f"{self._location} has no {key}")
        with self.hold(key) as hold:
            yield hold

    def hold(self, name: str) -> AbstractContextManager[Hold]:
        return Lease(self, self._location, name).held()

    def sweep_staged(self) -> None:
        """Nothing is staged."""


def _log_of(key: str) -> str | None:
    """The log that an object is a part of: `metrics/train.jsonl/0001-ab` -> `metrics/train.jsonl`."""
    folder, _, _ = key.rpartition("/")
    return folder if folder.endswith(LOG_SUFFIX) else None
