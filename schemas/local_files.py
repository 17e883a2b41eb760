"""A run directory on this machine's file systems: the local kind of `schemas.store`.

Bytes are written by the method of obstore's own local store (stage a file, then link it to its name) with what that one
leaves out: a sync of the file before its name appears and of the folder after, so that a power failure cannot leave a
committed name with nothing behind it. Lines are appended in place, under a lock; who holds a name locks a file, and the
system lets go of it when the process dies, so nothing here expires.

Left out on purpose: file systems without hard links, where nobody can say who was first.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from schemas import run_layout
from schemas.errors import UserError
from schemas.holds import Hold, refuse_second_holder

# A staged file is `<name>#<digits>`. obstore's local store has the same convention and never lists such names.
STAGED = re.compile(r"#\d+$")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP}

LOG_SUFFIX = ".jsonl"  # of keys that lines are appended to

Keys = list[str]  # a name of its own, because the class below has a method called list


class LocalFiles:
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
            sync(path.parent)
        return created

    def put(self, key: str, data: bytes) -> None:
        path = self._root / key
        with _named_errors(key):
            with _staged(path, data) as staged:
                os.replace(staged, path)
            sync(path.parent)

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
            found += [(inside / name).as_posix() for name in names if not STAGED.search(name)]
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

    def folders(self, prefix: str) -> Keys:
        try:
            return sorted(entry.name for entry in os.scandir(self._root / prefix) if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def log_parts(self, prefix: str) -> dict[str, int]:
        logs = [prefix] if self.exists(prefix) else self.list(prefix)
        return {log: (self._root / log).stat().st_size for log in logs if log.endswith(LOG_SUFFIX)}

    def get_part(self, key: str) -> bytes:
        return self.get(key)

    @contextmanager
    def held(self, key: str) -> Iterator[Hold]:
        """Holds a file that is there."""
        with _named_errors(key):
            # Opened for writing, because network file systems give exclusive locks to no other.
            descriptor = os.open(self._root / key, os.O_RDWR | os.O_CLOEXEC)
        with self._locked(descriptor, key):
            yield Hold(key, 0)

    @contextmanager
    def hold(self, name: str) -> Iterator[Hold]:
        """Holds a file of its own, in which the holders are counted."""
        key = run_layout.lock(name)
        path = self._root / key
        with _named_errors(key):
            _make_folder(path.parent)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with self._locked(descriptor, name):
            token = int(os.pread(descriptor, 20, 0) or b"-1") + 1
            os.pwrite(descriptor, b"%020d" % token, 0)
            yield Hold(name, token)

    @contextmanager
    def _locked(self, descriptor: int, name: str) -> Iterator[None]:
        try:
            with _named_errors(name):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    refuse_second_holder(str(self._root))
            yield
        finally:
            os.close(descriptor)  # and the lock is gone

    def sweep_staged(self) -> None:
        for folder, _, names in os.walk(self._root):
            for name in filter(STAGED.search, names):
                with suppress(FileNotFoundError):
                    Path(folder, name).unlink()


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
    sync(folder.parent)


def sync(path: Path) -> None:
    """Makes a file's content, or the names in a folder, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
