"""A run directory as a store of keys: every write is complete or absent, and some are first-writer-wins.

Two kinds of store lie behind one class: folders of this machine's file systems (`schemas.local_files`), and object
stores (`schemas.object_files`) by the addresses that obstore knows: S3, GCS, Azure, and memory.

Left out on purpose: renaming (object stores have none), partial reads, and profiles of cloud tools (`~/.aws`):
credentials and options come from the environment variables that obstore reads, or from the machine's own role.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlparse

from obstore.store import MemoryStore

from schemas.errors import UserError
from schemas.holds import Hold
from schemas.local_files import LOG_SUFFIX, STAGED, LocalFiles
from schemas.object_calls import SCHEMES, Objects, Patience, open_objects
from schemas.object_files import ObjectFiles

Keys = list[str]  # a name of its own, because the classes below have a method called list


class _Backend(Protocol):
    def put_new(self, key: str, data: bytes) -> bool: ...
    def put(self, key: str, data: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def exists(self, key: str) -> bool: ...
    def list(self, prefix: str) -> Keys: ...
    def folders(self, prefix: str) -> Keys: ...
    def delete(self, key: str) -> None: ...
    def append_line(self, key: str, line: bytes) -> None: ...
    def log_parts(self, prefix: str) -> dict[str, int]: ...
    def get_part(self, key: str) -> bytes: ...
    def held(self, key: str) -> AbstractContextManager[Hold]: ...
    def hold(self, name: str) -> AbstractContextManager[Hold]: ...
    def sweep_staged(self) -> None: ...


class RunStore:
    """The files of one run, by key. Keys are relative paths with `/`, as `schemas.run_layout` spells them.

    Safe to use from many threads and processes at once.

    >>> store = RunStore.in_memory()
    >>> store.put_new("pins/0.json", b"first"), store.put_new("pins/0.json", b"second")
    (True, False)
    >>> store.get("pins/0.json")
    b'first'
    """

    def __init__(self, location: str, backend: _Backend, root: Path | None = None):
        self.location = location
        self.root = root
        self.objects = backend if isinstance(backend, ObjectFiles) else None
        self._backend = backend

    @classmethod
    def open(cls, location: str | Path) -> RunStore:
        """The run at `location`: a local folder, or the address of one in an object store ("s3://bucket/runs/a").

        It need not exist: the first write makes it. Nobody is asked anything yet.

        Raises:
          UserError: `location` is no address that a run can have, or is a file.
        """
        if _scheme(location) in SCHEMES:
            patience = Patience()
            return cls.over(open_objects(str(location), patience), str(location).rstrip("/"), patience)
        root = _local_folder(str(location))
        return cls(str(location), LocalFiles(root), root)

    @classmethod
    def in_memory(cls) -> RunStore:
        """An empty store that lives as long as this object."""
        objects = MemoryStore()
        return cls.over(objects, f"memory:{id(objects):x}")

    @classmethod
    def over(cls, objects: Objects, location: str, patience: Patience | None = None) -> RunStore:
        """A run in a store that is open already."""
        return cls(location, ObjectFiles(objects, location, patience))

    def put_new(self, key: str, data: bytes) -> bool:
        """Creates `key` unless it exists; durable before it returns. False: the key exists and stays as it was."""
        return self._backend.put_new(_checked(key), data)

    def put(self, key: str, data: bytes) -> None:
        """Creates or replaces `key`; a reader sees the old bytes or the new ones, never a mixture."""
        self._backend.put(_checked(key), data)

    def get(self, key: str) -> bytes:
        """Raises FileNotFoundError if the key does not exist."""
        return self._backend.get(_checked(key))

    def exists(self, key: str) -> bool:
        return self._backend.exists(_checked(key))

    def list(self, prefix: str = "") -> Keys:
        """All keys below the folder `prefix` ("" for the whole run), at any depth, sorted.

        Keys that others have just written may be missing from an object store's list.
        """
        return self._backend.list(_checked_folder(prefix))

    def folders(self, prefix: str) -> Keys:
        """Names of the folders right below the folder `prefix`, sorted. Late as `list` is."""
        return self._backend.folders(_checked_folder(prefix))

    def delete(self, key: str) -> None:
        """Removes `key`; a key that does not exist is no error."""
        self._backend.delete(_checked(key))

    def append_line(self, key: str, line: bytes) -> None:
        """Appends one whole line (the newline is added here) to a log, whose key ends in ".jsonl".

        Lines of many writers never mix. In a local folder it is not synced: a power failure may lose the last lines. A
        line torn by a dead writer is ended first, so it spoils no other line; readers skip what does not parse.
        """
        line = line.removesuffix(b"\n")
        if b"\n" in line:
            raise ValueError(f"{key}: a line may not hold a newline: {line[:80]!r}")
        if not _checked(key).endswith(LOG_SUFFIX):
            raise ValueError(f"{key}: lines are appended to logs, and their names end in {LOG_SUFFIX}")
        self._backend.append_line(key, line + b"\n")

    def log_parts(self, prefix: str) -> dict[str, int]:
        """The keys that lines lie under, with their sizes in bytes: of the log `prefix`, or of all logs in that folder.

        A log has one in a local folder, and several in an object store, in order of their age. This is for who reads
        growing logs again and again: a part only grows, and no line is in two. All others `get` a log whole.
        """
        return self._backend.log_parts(_checked_folder(prefix))

    def get_part(self, key: str) -> bytes:
        """One part of a log, by the key that `log_parts` gave it."""
        return self._backend.get_part(_checked(key))

    def held(self, key: str) -> AbstractContextManager[Hold]:
        """Holds `key`, which must exist, for this caller alone until the context ends or the process does, however.

        Reading and writing do not ask for it: it only keeps out others who ask to hold the same key. For what happens
        when a holder in an object store falls silent, see `schemas.holds`.

        Raises:
          UserError: on entering, if somebody holds it already.
        """
        return _known(self.location, self._backend.held(_checked(key)))

    def hold(self, name: str) -> AbstractContextManager[Hold]:
        """Holds `name`, which need not be a key ("trainer", "share-2-of-4"), as `held` does.

        What is yielded has a `token`, larger than that of every earlier holder of the name.
        """
        return _known(self.location, self._backend.hold(_checked(name)))

    def check_holds(self) -> None:
        """For who is about to publish. Raises LostHoldError if anything that this process held of the run was taken."""
        for hold in _holds(self.location):
            hold.check()

    @property
    def fencing_token(self) -> str:
        """Names what this process holds of the run, as in "trainer:7"; "" if it holds nothing."""
        return ",".join(f"{hold.name}:{hold.token}" for hold in _holds(self.location))

    def sweep_staged(self) -> None:
        """Removes what killed writers left staged. Only for who knows that nobody else is writing."""
        self._backend.sweep_staged()

    def local_path(self, key: str) -> Path:
        """Where `key` lies on this machine, for libraries that write files themselves.

        Raises:
          UserError: the store is not a local folder.
        """
        if self.root is None:
            raise UserError(self.location, f"is no local folder, and {key} must be one.", "Use a local run directory.")
        return self.root / _checked(key)

    def __repr__(self) -> str:
        return f"RunStore({self.location!r})"


_HOLDS: list[tuple[str, Hold]] = []  # of this process, by location
_HOLDS_LOCK = threading.Lock()


@contextmanager
def _known(location: str, holding: AbstractContextManager[Hold]) -> Iterator[Hold]:
    """Makes a hold known to every store object of this process, since whoever publishes has opened one of its own."""
    with holding as hold:
        with _HOLDS_LOCK:
            _HOLDS.append((location, hold))
        try:
            yield hold
        finally:
            with _HOLDS_LOCK:
                _HOLDS.remove((location, hold))


def _holds(location: str) -> list[Hold]:
    with _HOLDS_LOCK:
        return [hold for place, hold in _HOLDS if place == location]


def _scheme(location: str | Path) -> str:
    return urlparse(str(location)).scheme.lower() if "://" in str(location) else ""


def _local_folder(location: str) -> Path:
    url = urlparse(location)
    if url.scheme == "file":
        return _not_a_file(Path(unquote(url.path)))
    if re.match(r"\w+:/", location):  # also s3:/bucket, which pathlib makes of an address
        raise UserError(
            location,
            f"runs are not kept at {url.scheme}: addresses of this form.",
            "Give the path of a folder, or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX.",
        )
    return _not_a_file(Path(location).absolute())


def _not_a_file(root: Path) -> Path:
    if root.is_file():
        raise UserError(str(root), "is a file, and a run is a folder.", "Name another folder.")
    return root


def _checked_folder(prefix: str) -> str:
    folder = prefix.rstrip("/")
    return _checked(folder) if folder else ""


def _checked(key: str) -> str:
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or STAGED.search(parts[-1]) or "\0" in key:
        raise ValueError(f"{key!r} is not a key: keys are relative paths of plain names, and do not end in #<digits>")
    return key
