"""Trees of arrays, by version, in folders that are committed once: what weights and optimizer states have in common.

    <folder>/<digest>/...      an ordinary Orbax PyTree checkpoint, and FILES.json with the digests of its files
    <folder>/COMMIT.json       created last, only if absent: this is what makes the version exist

A tree is written under a temporary name, synced, and renamed to the digest of its content. So two writers that race for
one version never write into each other's folder, and the creation of COMMIT alone decides. What a killed writer leaves
behind has no COMMIT: readers do not see it, and the next writer of that version replaces it. COMMIT stays when the
arrays are pruned: a version is made once for ever, and what it was can be told after its arrays are gone.

Left out on purpose: Orbax's CheckpointManager (its own retention, naming and step bookkeeping would compete with
COMMIT), asynchronous saves (one takes a few hundredths of a second, and must be durable before it is announced), arrays
that are sharded over hosts, and stores that are not local folders.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar
from uuid import uuid4

import jax
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]

from jax_core.faults import crash_point
from schemas.errors import DamagedDataError, UserError
from schemas.manifest import PolicyCommit, TrainerCommit
from schemas.store import RunStore

PyTree = Any
NestedDict = dict[str, Any]  # of numpy arrays
LeafPath = tuple[str, ...]  # ("layers", "0", "w")
Record = TypeVar("Record", PolicyCommit, TrainerCommit)


class StalePublisherError(UserError):
    """Somebody else holds this version, or the versions have moved on: this trainer must stop."""


class MissingVersionError(UserError):
    """A version that was never committed here, or whose arrays were pruned."""


# Trees: names, digests and nested dicts


def tree_digest(tree: PyTree) -> str:
    """SHA-256, in hex, of every leaf's path, dtype, shape and bytes, in order of path.

    The kind of container does not matter: a NamedTuple and a dict with the same names have one digest. Bytes do matter:
    0.0 and -0.0 differ, and so do two NaNs with different payloads.

    >>> tree_digest({"w": np.zeros(2, np.float32)}) == tree_digest({"w": np.zeros((2, 1), np.float32)})
    False
    """
    digest = hashlib.sha256()
    for path, leaf in sorted(named_leaves(tree), key=lambda named: named[0]):
        header = json.dumps([path, leaf.dtype.name, leaf.shape])
        digest.update(header.encode() + b"\n")
        digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def named_leaves(tree: PyTree) -> list[tuple[LeafPath, np.ndarray]]:
    """Every leaf as a numpy array, with its path. `{"a": (x, y)}` -> `[(("a", "0"), x), (("a", "1"), y)]`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(tree))
    return [(leaf_path(path), np.asarray(leaf)) for path, leaf in leaves]


def leaf_path(path: tuple[Any, ...]) -> LeafPath:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def nested_dict(tree: PyTree) -> NestedDict:
    """The tree as nested dicts of numpy arrays, by path: what Orbax gives back when it is not told the structure.

    Raises:
      ValueError: a leaf that would not come back as it is, by its path.
    """
    named = named_leaves(tree)
    _check_storable(named)
    nested: NestedDict = {}
    for path, leaf in named:
        inner = nested
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = leaf
    return nested


def _check_storable(named: list[tuple[LeafPath, np.ndarray]]) -> None:
    stored_names = set()
    for path, leaf in named:
        name = ".".join(path)  # Orbax's own name of a leaf: two leaves of one name would overwrite each other
        if name in stored_names:
            raise ValueError(
                f"two leaves are called {name!r}; names are joined with '.', so they must differ after that"
            )
        if not path or leaf.size == 0 or leaf.dtype.hasobject or not leaf.dtype.isnative:
            raise ValueError(f"leaf {name!r} of shape {leaf.shape} and dtype {leaf.dtype} cannot be stored")
        stored_names.add(name)


# Orbax: one folder, one tree


FILES = "FILES.json"  # digests of a tree's files, beside them

# What a tree takes on disk besides its arrays, at most: Orbax's indices and descriptions.
_OVERHEAD_BYTES, _OVERHEAD_BYTES_A_LEAF = 8192, 1024


class _OrbaxChatter(logging.Filter):
    """Drops what Orbax logs about an ordinary save, and its copies of exceptions that it raises to us as well."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not _orbax_is_calling():
            return True
        return record.levelno >= logging.WARNING and "_SignalingThread.run() raised" not in str(record.msg)


def _orbax_is_calling() -> bool:
    # The record cannot tell: depending on who imported absl first, its path is that of absl itself.
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("orbax."):
            return True
        frame = frame.f_back
    return False


logging.getLogger("absl").addFilter(_OrbaxChatter())


def _orbax() -> ocp.PyTreeCheckpointHandler:
    # The bare handler: the Checkpointer around it would rename and commit a second time. OCDBT holds all leaves in a
    # few files, so there is little to sync. To a compressor weights are noise: twice the time for a tenth less.
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)


def _save_tree(folder: Path, tree: NestedDict) -> None:
    """Writes `tree` into the new folder `folder`, durably. A tree without leaves has no Orbax files."""
    try:
        folder.mkdir(parents=True)
        if tree:
            _require_space(folder, tree)
            handler = _orbax()
            handler.save(folder, args=ocp.args.PyTreeSave(tree))
            handler.finalize(folder)
        (folder / FILES).write_text(json.dumps(_file_digests(folder), indent=2))
        _sync_tree(folder)
    except Exception as error:
        if _errno(error) in _THE_USERS:
            reason = f"could not be written ({os.strerror(_errno(error))})."
            raise UserError(str(folder.parent), reason, "Free space or mend permissions, then start again.") from error
        raise


def _require_space(folder: Path, tree: NestedDict) -> None:
    """Asks the system for the room that the tree will take, and gives it back.

    Orbax writes from many threads. Once one of them has failed for want of space the others go on for a while, make
    files in a folder that is being removed, and each complains on stderr.
    """
    leaves = jax.tree.leaves(tree)
    size = sum(leaf.nbytes for leaf in leaves) + _OVERHEAD_BYTES + _OVERHEAD_BYTES_A_LEAF * len(leaves)
    probe = folder / "room"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
    try:
        if hasattr(os, "posix_fallocate"):  # macOS has none
            os.posix_fallocate(descriptor, 0, size)
        elif shutil.disk_usage(folder).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)
        probe.unlink()


def _restore_tree(folder: Path) -> NestedDict:
    """The inverse of `_save_tree`: numpy arrays. Whatever is wrong with the files raises something.

    The files are checked before Orbax sees them: parsers of damaged bytes may allocate, hang or crash, and Orbax leaves
    futures behind that complain on stderr later.
    """
    promised: dict[str, str] = json.loads((folder / FILES).read_bytes())
    found = _file_digests(folder)
    for name, digest in promised.items():
        if found.get(name) != digest:
            raise ValueError(f"{name} is {'altered' if name in found else 'gone'}")
    return _orbax().restore(folder) if promised else {}


def _file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in the folder but FILES, by relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / FILES)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


_THE_USERS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS}


def _errno(error: Exception) -> int:
    """The system's error number; 0: none. TensorStore has it only in the text of a ValueError."""
    if isinstance(error, OSError):
        return error.errno or 0
    said = re.search(r"os_error_code='(\d+)'", str(error))
    return int(said.group(1)) if said else 0


def _sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Versions


@dataclass(frozen=True)
class CommittedTrees(Generic[Record]):
    """The versions of one kind of tree in a run. Safe in many threads and processes at once."""

    store: RunStore
    noun: str  # "policy version"
    folder_key: Callable[[int], str]
    commit_key: Callable[[int], str]
    record_type: type[Record]
    crash_points: tuple[str, str, str]  # before the rename, before COMMIT, after COMMIT
    pruned: set[int] = field(default_factory=set)  # seen without arrays; saves looking into thousands of old folders

    def folder(self, version: int) -> Path:
        return self.store.local_path(self.folder_key(version))

    def is_committed(self, version: int) -> bool:
        return self.store.exists(self.commit_key(version))

    def committed(self) -> list[int]:
        return sorted(version for version in self._begun() if self.is_committed(version))

    def stored(self) -> list[int]:
        """Committed versions whose arrays are still here."""
        return sorted(version for version in self._begun() - self.pruned if self._is_stored(version))

    def _begun(self) -> set[int]:
        """Versions that have a folder, whatever is in it."""
        parent = self.folder(0).parent
        names = os.listdir(parent) if parent.is_dir() else []
        return {int(name) for name in names if name.isdecimal()}

    def _is_stored(self, version: int) -> bool:
        return self.is_committed(version) and any(self._trees(version))

    def _trees(self, version: int) -> list[Path]:
        """Complete trees in the version's folder: at most one, unless publishers race or were killed."""
        return [path for path in self._folders(version) if not path.name.startswith(".")]

    def _folders(self, version: int) -> list[Path]:
        try:
            return [path for path in self.folder(version).iterdir() if path.is_dir()]
        except FileNotFoundError:
            return []

    def record(self, version: int) -> Record:
        key = self.commit_key(version)
        try:
            data = self.store.get(key)
        except FileNotFoundError:
            raise self._missing(version, "was never committed in this run.") from None
        record = self.record_type.from_json(data, key)
        if record.version != version:
            raise DamagedDataError(key, f"speaks of version {record.version}.", "Restore the file from a copy.")
        return record

    def agreed(self, version: int, digest: str) -> Record | None:
        """The record that holds the version if it has this digest; None if nobody holds it.

        Raises:
          StalePublisherError: another content holds it.
        """
        if not self.is_committed(version):
            return None
        record = self.record(version)
        if record.digest != digest:
            raise StalePublisherError(
                f"{self.noun} {version}",
                f"is committed already with other content ({record.digest[:12]} there, {digest[:12]} here): "
                "another trainer works on this run, or this one did not repeat its steps exactly.",
                "Keep one trainer for a run; start it again and it goes on from the newest commit.",
            )
        return record

    def write(self, tree: NestedDict, ours: Record) -> Record:
        """Writes the tree, then COMMIT. Returns the record that holds the version now, ours or an equal one.

        Raises:
          StalePublisherError: another content won.
        """
        version, (_, before_commit, after_commit) = ours.version, self.crash_points
        try:
            self._write_tree(version, tree, ours.digest)
        except Exception:
            # Who wins the version sweeps its folder, and so may have taken ours away while we wrote.
            if not self._is_stored(version):
                raise
        crash_point(before_commit)
        created = self.store.put_new(self.commit_key(version), ours.to_json())
        crash_point(after_commit)
        self.pruned.discard(version)
        self.sweep(version, self.record(version).digest)
        return ours if created else self.agreed(version, ours.digest) or ours

    def _write_tree(self, version: int, tree: NestedDict, digest: str) -> None:
        folder = self.folder(version)
        writing = folder / f".writing-{uuid4().hex}"
        try:
            _save_tree(writing, tree)
            crash_point(self.crash_points[0])
            self._move_into_place(writing, folder / digest)
        finally:
            shutil.rmtree(writing, ignore_errors=True)
        for changed in (folder, folder.parent, folder.parent.parent):
            _sync(changed)

    def _move_into_place(self, writing: Path, target: Path) -> None:
        try:
            os.rename(writing, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if _is_intact(target):
                return  # the same content, from a killed publisher or from one that works beside us
            os.rename(target, target.with_name(f".damaged-{uuid4().hex}"))
            os.rename(writing, target)

    def read(self, version: int, digest: str) -> NestedDict:
        """The tree, verified.

        Raises:
          MissingVersionError: its arrays were pruned.
          DamagedDataError: they are not what was committed.
        """
        folder = self.folder(version) / digest
        try:
            tree = _restore_tree(folder)
            found = tree_digest(tree)
        except MemoryError:
            raise
        except Exception as error:  # Orbax and TensorStore raise whatever a torn file makes them raise
            if not self._trees(version):
                raise self._missing(version, "has no arrays any more: they were pruned.") from error
            raise self._damaged(version, f"cannot be read ({_first_line(error)}).") from error
        if found != digest:
            raise self._damaged(version, f"has digest {found[:12]}, and {digest[:12]} was committed.")
        return tree

    def _missing(self, version: int, reason: str) -> MissingVersionError:
        stored = ", ".join(map(str, self.stored())) or "none"
        return MissingVersionError(f"{self.noun} {version}", reason, f"Stored: {stored}.")

    def _damaged(self, version: int, reason: str) -> DamagedDataError:
        offender = f"{self.noun} {version} ({self.folder_key(version)})"
        return DamagedDataError(offender, reason, "Restore its files from a copy, or go back to an older version.")

    def sweep(self, version: int, keep: str | None) -> None:
        """Removes every folder of the version but the tree `keep`: leftovers of killed and of losing publishers."""
        for path in self._folders(version):
            if path.name == keep:
                continue
            if not path.name.startswith("."):
                path = _hidden(path)
            shutil.rmtree(path, ignore_errors=True)

    def sweep_all(self) -> None:
        """Removes what killed publishers left of any version. Only for who knows that nobody else is writing."""
        for version in self._begun():
            if not self.is_committed(version):
                shutil.rmtree(self.folder(version), ignore_errors=True)
                continue
            with suppress(DamagedDataError):  # which tree is the right one cannot be told: all stay
                self.sweep(version, self.record(version).digest)

    def prune(self, keep: Collection[int]) -> None:
        """Removes the arrays of all stored versions that are not in `keep`, except the newest."""
        stored = self.stored()
        for version in set(stored[:-1]) - set(keep):
            self.sweep(version, keep=None)
            self.pruned.add(version)


def _is_intact(folder: Path) -> bool:
    try:
        return tree_digest(_restore_tree(folder)) == folder.name
    except Exception:
        return False


def _hidden(path: Path) -> Path:
    """Takes a tree away at once, so that a reader finds all of it or nothing."""
    hidden = path.with_name(f".pruned-{uuid4().hex}")
    with suppress(FileNotFoundError):  # another sweeper was here first
        os.rename(path, hidden)
    return hidden


def _first_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text if len(text) <= 200 else text[:200] + "..."
