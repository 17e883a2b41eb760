"""Where trees of arrays lie in a run: the same folders of the same names in two kinds of store.

A *place* holds, in the folder of each version, complete trees under the digests of their content. In a local run
directory a tree is a folder that Orbax wrote under a temporary name, synced, and renamed:

    <version>/<digest>/{FILES.json, whatever Orbax wrote}

An object store has no renaming, and Orbax names its files at will, so that two writers of one tree would mix theirs.
There Orbax writes into a local folder, and each of its files becomes an object under the digest of its bytes, which
whoever has the same file may write again. FILES.json, created last and only if absent, says which objects are the tree:

    <version>/<digest>/{FILES.json: {"d/0001": <sha256>, ...}, <sha256>, <sha256>, ...}

Readers keep what they fetched in a cache on their machine, under the digest of the tree, and verify it at each reading.

Left out on purpose: fetching only a part of a tree.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol
from uuid import uuid4

from jax_core.faults import crash_point
from jax_core.orbax_files import FILES, THE_USERS, restore_tree, save_tree
from jax_core.trees import NestedDict, tree_digest
from schemas.errors import UserError
from schemas.local_files import sync
from schemas.object_files import ObjectFiles
from schemas.store import RunStore

CACHE_VARIABLE = "ROLLSTREAM_CACHE"
CACHE_SIZE_VARIABLE = "ROLLSTREAM_CACHE_GB"
_CACHE_GB = 20.0


class TreePlace(Protocol):
    """Trees by version folder ("policies/00000042") and digest. Safe in many threads and processes at once."""

    def versions(self, parent: str) -> set[str]:
        """Names of the version folders below `parent`, whatever is in them."""

    def stored(self, parent: str, apart_from: set[str]) -> set[str]:
        """Names of the version folders below `parent` that hold a complete tree."""

    def littered(self, parent: str) -> set[str]:
        """Names of the version folders below `parent` that may hold more than a COMMIT."""

    def holds_tree(self, folder: str, digest: str) -> bool:
        """Whether the version folder holds a complete tree: this one, or in its stead another."""

    def write(self, folder: str, tree: NestedDict, crash_name: str) -> str:
        """Makes the tree lie there, complete and durable, under its digest, which is returned.

        Passes the crash point right before it is complete.
        """

    def read(self, folder: str, digest: str) -> NestedDict:
        """The tree, its files verified. Whatever is wrong with them raises something."""

    def sweep(self, folder: str, keep: str | None) -> None:
        """Removes all of the version's trees and their leftovers but the tree `keep`, each at once for its readers."""

    def remove(self, folder: str) -> None:
        """Removes the version folder, which is not committed."""


def tree_place(store: RunStore) -> TreePlace:
    if store.objects is not None:
        return ObjectPlace(store.objects, TreeCache.of_this_machine())
    return LocalPlace(store)


@dataclass(frozen=True)
class LocalPlace:
    """Trees in the folders of a local run directory."""

    store: RunStore

    def versions(self, parent: str) -> set[str]:
        return set(self.store.folders(parent))

    def stored(self, parent: str, apart_from: set[str]) -> set[str]:
        return {name for name in self.versions(parent) - apart_from if self._trees(f"{parent}/{name}")}

    def littered(self, parent: str) -> set[str]:
        return self.versions(parent)

    def holds_tree(self, folder: str, digest: str) -> bool:
        return bool(self._trees(folder))

    def _trees(self, folder: str) -> list[Path]:
        return [path for path in self._folders(folder) if not path.name.startswith(".")]

    def _folders(self, folder: str) -> list[Path]:
        try:
            return [path for path in self.store.local_path(folder).iterdir() if path.is_dir()]
        except FileNotFoundError:
            return []

    def write(self, folder: str, tree: NestedDict, crash_name: str) -> str:
        path = self.store.local_path(folder)
        writing = path / f".writing-{uuid4().hex}"
        try:
            digest = save_tree(writing, tree)
            crash_point(crash_name)
            _move_into_place(writing, path / digest)
        finally:
            shutil.rmtree(writing, ignore_errors=True)
        for changed in (path, path.parent, path.parent.parent):
            sync(changed)
        return digest

    def read(self, folder: str, digest: str) -> NestedDict:
        return restore_tree(self.store.local_path(folder) / digest)

    def sweep(self, folder: str, keep: str | None) -> None:
        for path in self._folders(folder):
            if path.name == keep:
                continue
            if not path.name.startswith("."):
                path = _hidden(path)
            shutil.rmtree(path, ignore_errors=True)

    def remove(self, folder: str) -> None:
        shutil.rmtree(self.store.local_path(folder), ignore_errors=True)


def _move_into_place(writing: Path, target: Path) -> None:
    try:
        os.rename(writing, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if _is_intact(target):
            return  # the same content, from a killed publisher or from one that works beside us
        os.rename(target, target.with_name(f".damaged-{uuid4().hex}"))
        os.rename(writing, target)


def _is_intact(folder: Path) -> bool:
    try:
        return tree_digest(restore_tree(folder)) == folder.name
    except Exception:
        return False


def _hidden(path: Path) -> Path:
    """Takes a tree away at once, so that a reader finds all of it or nothing."""
    hidden = path.with_name(f".pruned-{uuid4().hex}")
    with suppress(FileNotFoundError):  # another sweeper was here first
        os.rename(path, hidden)
    return hidden


@dataclass(frozen=True)
class ObjectPlace:
    """Trees as objects, each readable once its FILES.json is there."""

    objects: ObjectFiles
    cache: TreeCache

    def versions(self, parent: str) -> set[str]:
        return set(self.objects.folders(parent))

    def stored(self, parent: str, apart_from: set[str]) -> set[str]:
        # One list for all versions. A pruned one costs no more than its COMMIT.
        files = [PurePosixPath(key) for key in self.objects.list(parent) if key.endswith(f"/{FILES}")]
        return {key.parts[-3] for key in files} - apart_from

    def littered(self, parent: str) -> set[str]:
        keys = [PurePosixPath(key) for key in self.objects.list(parent)]
        return {key.parts[-3] for key in keys if len(key.parts) > parent.count("/") + 3}

    def holds_tree(self, folder: str, digest: str) -> bool:
        if self.objects.exists(f"{folder}/{digest}/{FILES}"):  # which the list may be too late to name
            return True
        return any(key.endswith(f"/{FILES}") for key in self.objects.list(folder))

    def write(self, folder: str, tree: NestedDict, crash_name: str) -> str:
        with self.cache.staging() as staging:
            written = staging / "tree"
            digest = save_tree(written, tree)
            files = _names_of((written / FILES).read_bytes())
            for name, sha256 in files.items():
                self.objects.put_file(f"{folder}/{digest}/{sha256}", written / name)
            crash_point(crash_name)
            self._complete(f"{folder}/{digest}", files)
            self.cache.adopt(written, digest)
        return digest

    def _complete(self, key: str, files: dict[str, str]) -> None:
        """Creates FILES.json, unless one is there of a writer whose files, of the same tree, are all there too."""
        listing = json.dumps(files, indent=2).encode()
        if self.objects.put_new(f"{key}/{FILES}", listing):
            return
        with suppress(FileNotFoundError, ValueError):
            theirs = _names_of(self.objects.get(f"{key}/{FILES}"))
            if all(self.objects.exists(f"{key}/{sha256}") for sha256 in theirs.values()):
                return
        self.objects.put(f"{key}/{FILES}", listing)

    def read(self, folder: str, digest: str) -> NestedDict:
        files = _names_of(self.objects.get(f"{folder}/{digest}/{FILES}"))
        cached = self.cache.read(digest)
        if cached is not None:
            return cached
        with self.cache.staging() as staging:
            fetched = staging / "tree"
            fetched.mkdir()
            for name, sha256 in files.items():
                (fetched / name).parent.mkdir(parents=True, exist_ok=True)
                self.objects.get_file(f"{folder}/{digest}/{sha256}", fetched / name)
            (fetched / FILES).write_text(json.dumps(files, indent=2))
            tree = restore_tree(fetched)
            if tree_digest(tree) == digest:
                self.cache.adopt(fetched, digest)
        return tree

    def sweep(self, folder: str, keep: str | None) -> None:
        kept = self._keys_of(f"{folder}/{keep}") if keep else set()
        # FILES.json first: without it there is no tree, whatever else is there.
        for key in sorted(self.objects.list(folder), key=lambda key: not key.endswith(f"/{FILES}")):
            if key.count("/") > folder.count("/") + 1 and key not in kept:
                self.objects.delete(key)

    def _keys_of(self, key: str) -> set[str]:
        names = _names_of(self.objects.get(f"{key}/{FILES}"))
        return {f"{key}/{name}" for name in (FILES, *names.values())}

    def remove(self, folder: str) -> None:
        self.sweep(folder, keep=None)


def _names_of(listing: bytes) -> dict[str, str]:
    """FILES.json: SHA-256 of each file of a tree, by its path. Raises ValueError if it is none."""
    files = json.loads(listing)
    if not isinstance(files, dict):
        raise ValueError(f"{FILES} is no object")
    for name, sha256 in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not isinstance(sha256, str) or "/" in sha256:
            raise ValueError(f"{FILES} names {name!r}, which is no file of a tree")
    return files


@dataclass(frozen=True)
class TreeCache:
    """Whole trees on this machine, by the digest of their content, whatever runs they are of. Least recently used go.

    Safe in many processes at once: a tree is renamed into its place, and one that is taken away while it is read is
    fetched again. Nothing here is ever trusted: files are verified at each reading.

    Args:
      folder: need not exist.
      most_bytes: of all trees together. One larger tree may stay alone.
    """

    folder: Path
    most_bytes: float

    @classmethod
    def of_this_machine(cls) -> TreeCache:
        """Raises UserError if its size in the environment is no number."""
        folder = Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/rollstream").expanduser()
        size = os.environ.get(CACHE_SIZE_VARIABLE) or _CACHE_GB
        try:
            return cls(folder / "trees", float(size) * 1e9)
        except ValueError:
            raise UserError(
                f"{CACHE_SIZE_VARIABLE}={size}", "is no number of gigabytes.", "Set it to 20, say."
            ) from None

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A new folder to write in, gone afterwards. Those of killed processes are removed by the next.

        Raises:
          UserError: also from inside the context: the cache is full, or may not be written.
        """
        try:
            with self._locked_folder() as staging:
                yield staging
        except OSError as error:
            if error.errno not in THE_USERS:
                raise
            reason, way_out = f"cannot be written ({error.strerror}).", f"Free space, or set {CACHE_VARIABLE}."
            raise UserError(str(self.folder), reason, way_out) from error

    @contextmanager
    def _locked_folder(self) -> Iterator[Path]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._alone():
            self._sweep_dead()
            staging = self.folder / f".writing-{uuid4().hex}"
            staging.mkdir()
            descriptor = os.open(staging, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # let go of when this process dies
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            os.close(descriptor)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with open(self.folder / ".lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _sweep_dead(self) -> None:
        for path in self.folder.glob(".writing-*"):
            with suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its process lives
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(descriptor)

    def read(self, digest: str) -> NestedDict | None:
        """None: it is not here, or not whole."""
        path = self.folder / digest
        if not path.is_dir():
            return None
        try:
            tree = restore_tree(path)
            os.utime(path)
        except MemoryError:
            raise
        except Exception:
            shutil.rmtree(path, ignore_errors=True)
            return None
        return tree

    def adopt(self, tree: Path, digest: str) -> None:
        """Moves a whole tree here, and others out until all are small enough."""
        with suppress(OSError):  # there already
            os.rename(tree, self.folder / digest)
        self.prune(keep=digest)

    def prune(self, keep: str) -> None:
        with self._alone():
            trees = [path for path in self.folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
            sizes = {path: _bytes_in(path) for path in sorted(trees, key=_last_used)}
            total = sum(sizes.values())
            for path, size in sizes.items():
                if total <= self.most_bytes:
                    return
                if path.name != keep:
                    shutil.rmtree(path, ignore_errors=True)
                    total -= size


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _last_used(path: Path) -> float:
    return path.stat().st_mtime
