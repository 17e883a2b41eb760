"""A run directory as a store of keys: every write is complete or absent, and some are first-writer-wins.

Two kinds of store lie behind one class. Object stores (in memory today) go through obstore, whose create-if-absent is
one primitive on all of them. Local folders are written here, by the same method as obstore's own local store (stage a
file, then link it to its name) with what that one leaves out: a sync of the file before its name appears and of the
folder after, so that a power failure cannot leave a committed name with nothing behind it.

Left out on purpose: renaming and listing folders (object stores have neither), partial reads, and stores in a cloud
(their keys and writes would fit; appending lines and Orbax's local folders need more).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlparse

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import MemoryStore

from schemas.errors import UserError

# A staged file is `<name>#<digits>`. obstore's local store has the same convention and never lists such names.
_STAGED = re.compile(r"#\d+$")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP}

Keys = list[str]  # a name of its own, because the classes below have a method called list


class _Backend(Protocol):
    def put_new(self, key: str, data: bytes) -> bool: ...
    def put(self, key: str, data: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def exists(self, key: str) -> bool: ...
    def list(self, prefix: str) -> Keys: ...
    def delete(self, key: str) -> None: ...
    def append_line(self, key: str, line: bytes) -> None: ...
    def held(self, key: str) -> AbstractContextManager[None]: ...
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

    def __init__(self, location: str, backend: _Backend, root: Path | None):
        self.location = location
        self.root = root
        self._backend = backend

    @classmethod
    def open(cls, location: str | Path) -> RunStore:
        """The run at `location`, a local folder that need not exist: the first write makes it.

        Raises:
          UserError: `location` is in a store that runs cannot be kept in, or is a file.
        """
        root = _local_folder(str(location))
        return cls(str(location), _LocalFiles(root), root)

    @classmethod
    def in_memory(cls) -> RunStore:
        """An empty store that lives as long as this object."""
        return cls("memory:", _Memory(), None)

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
        """All keys below the folder `prefix` ("" for the whole run), at any depth, sorted."""
        folder = prefix.rstrip("/")
        return self._backend.list(_checked(folder) if folder else "")

    def delete(self, key: str) -> None:
        """Removes `key`; a key that does not exist is no error."""
        self._backend.delete(_checked(key))

    def append_line(self, key: str, line: bytes) -> None:
        """Appends one whole line (the newline is added here). Not synced: a power failure may lose the last lines.

        Lines of many writers never mix. A line torn by a dead writer is ended first, so it spoils no other line;
        readers skip what does not parse.
        """
        line = line.removesuffix(b"\n")
        if b"\n" in line:
            raise ValueError(f"{key}: a line may not hold a newline: {line[:80]!r}")
        self._backend.append_line(_checked(key), line + b"\n")

    def held(self, key: str) -> AbstractContextManager[None]:
        """Holds `key`, which must exist, for this caller alone until the context ends or the process does, however.

        Reading and writing do not ask for it: it only keeps out others who ask to hold the same key.

        Raises:
          UserError: on entering, if somebody holds it already.
        """
        return self._backend.held(_checked(key))

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


def _local_folder(location: str) -> Path:
    url = urlparse(location)
    if url.scheme == "file":
        return _not_a_file(Path(unquote(url.path)))
    if "://" in location:
        raise UserError(
            location,
            f"runs are kept in local folders; {url.scheme}:// is not supported.",
            "Give the path of a local folder, or of a mounted one.",
        )
    return _not_a_file(Path(location).absolute())


def _not_a_file(root: Path) -> Path:
    if root.is_file():
        raise UserError(str(root), "is a file, and a run is a folder.", "Name another folder.")
    return root


def _checked(key: str) -> str:
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or _STAGED.search(parts[-1]) or "\0" in key:
        raise ValueError(f"{key!r} is not a key: keys are relative paths of plain names, and do not end in #<digits>")
    return key


class _Memory:
    """obstore's memory store; lines are appended by rewriting, one writer at a time."""

    def __init__(self) -> None:
        self._objects = MemoryStore()
        self._appending = threading.Lock()

    def put_new(self, key: str, data: bytes) -> bool:
        try:
            obstore.put(self._objects, key, data, mode="create")
        except AlreadyExistsError:
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        obstore.put(self._objects, key, data)

    def get(self, key: str) -> bytes:
        return bytes(obstore.get(self._objects, key).bytes())

    def exists(self, key: str) -> bool:
        try:
            obstore.head(self._objects, key)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str) -> Keys:
        pages = obstore.list(self._objects, prefix or None)
        return sorted(entry["path"] for page in pages for entry in page)

    def delete(self, key: str) -> None:
        with suppress(FileNotFoundError):
            obstore.delete(self._objects, key)

    def append_line(self, key: str, line: bytes) -> None:
        with self._appending:
            before = self.get(key) if self.exists(key) else b""
            self.put(key, before + line)

    def held(self, key: str) -> AbstractContextManager[None]:
        return nullcontext()  # no other process has this store

    def sweep_staged(self) -> None:
        """Nothing is staged."""


class _LocalFiles:
    """A local folder. Bytes are staged beside their key, synced, and then given its name in one system call.

    A killed writer leaves a staged file behind; no reader sees it, no writer minds it, and `sweep_staged` removes it.
    """

    def __init__(self, root: Path):
        self._root = root

    def put_new(self, key: str, data: bytes) -> bool:
        path = self._root / key
        with _named_errors(key):
            if not path.is_file():
                with _staged(path, data) as staged:
                    created = _link(key, staged, path)
            else:
                created = False
            # Also for a loser: who is told that the key exists must not lose it because its writer died before syncing.
            _sync_folder(path.parent)
        return created

    def put(self, key: str, data: bytes) -> None:
        path = self._root / key
        with _named_errors(key):
            with _staged(path, data) as staged:
                os.replace(staged, path)
            _sync_folder(path.parent)

    def get(self, key: str) -> bytes:
        path = self._root / key
        with _named_errors(key):
            try:
                return path.read_bytes()
            except (IsADirectoryError, NotADirectoryError) as error:
                raise FileNotFoundError(errno.ENOENT, "no such key", str(path)) from error

    def exists(self, key: str) -> bool:
        return (self._root / key).is_file()

    def list(self, prefix: str) -> Keys:
        found = []
        for folder, _, names in os.walk(self._root / prefix):
            inside = Path(folder).relative_to(self._root)
            found += [(inside / name).as_posix() for name in names if not _STAGED.search(name)]
        return sorted(found)

    def delete(self, key: str) -> None:
        with _named_errors(key), suppress(FileNotFoundError, NotADirectoryError):
            (self._root / key).unlink()

    def append_line(self, key: str, line: bytes) -> None:
        path = self._root / key
        with _named_errors(key):
            _make_folder(path.parent)
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                _append(descriptor, line)
            finally:
                os.close(descriptor)

    @contextmanager
    def held(self, key: str) -> Iterator[None]:
        with _named_errors(key):
            # Opened for writing, because network file systems give exclusive locks to no other.
            descriptor = os.open(self._root / key, os.O_RDWR | os.O_CLOEXEC)
        try:
            with _named_errors(key):
                _lock_or_refuse(descriptor, str(self._root))
            yield
        finally:
            os.close(descriptor)  # and the lock is gone

    def sweep_staged(self) -> None:
        for folder, _, names in os.walk(self._root):
            for name in filter(_STAGED.search, names):
                with suppress(FileNotFoundError):
                    Path(folder, name).unlink()


def _lock_or_refuse(descriptor: int, location: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(location, "another process is at work on it.", "Wait until it ends, or stop it.") from None


def _append(descriptor: int, line: bytes) -> None:
    """One write of one line, by whoever holds the file's lock; a line that does not fit is taken back."""
    size = os.fstat(descriptor).st_size
    torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
    whole = (b"\n" if torn else b"") + line
    written = os.write(descriptor, whole)
    if written < len(whole):
        os.ftruncate(descriptor, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _staged(path: Path, data: bytes) -> Iterator[Path]:
    """`data`, complete and synced, in a file beside `path`; whatever happens, the staged name is gone afterwards."""
    _make_folder(path.parent)
    staged = path.with_name(f"{path.name}#{secrets.randbits(63)}")
    try:
        with open(staged, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield staged
    finally:
        with suppress(FileNotFoundError):
            staged.unlink()


def _link(key: str, staged: Path, path: Path) -> bool:
    """Gives a staged file its name, unless the name is taken: the one step that decides who was first."""
    try:
        os.link(staged, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise UserError(
                key,
                f"the file system of {path.parent} has no hard links, so it cannot say who was first.",
                "Put the run on a file system that has them (ext4, xfs, btrfs, APFS, NFS).",
            ) from error
        raise
    return True


def _make_folder(folder: Path) -> None:
    """Makes `folder` and its missing parents, each synced into its own parent."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        _make_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir()
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _named_errors(key: str) -> Iterator[None]:
    """Errors that the user can mend, under the name of the key; all others as they are."""
    try:
        yield
    except OSError as error:
        said = f"{error.strerror} ({error.filename})." if error.filename else f"{error.strerror}."
        if error.errno in _FULL:
            raise UserError(key, f"could not be written: {said}", "Free some space, then start again.") from error
        if error.errno in _FORBIDDEN:
            raise UserError(key, f"is not accessible: {said}", "Give this user access, or use another run.") from error
        if error.errno == errno.ENOTDIR:
            raise UserError(key, f"a file is in the way: {said}", "Move it away, or use another run.") from error
        raise
