"""Trees of arrays, by version, that are committed once: what weights and optimizer states have in common.

    <folder>/<digest>/...      the tree, see `jax_core.tree_places`
    <folder>/COMMIT.json       created last, only if absent: this is what makes the version exist

A tree lies complete under the digest of its content before its COMMIT is created. So two writers that race for one
version never write into each other's tree, and the creation of COMMIT alone decides. What a killed writer leaves behind
has no COMMIT: readers do not see it, and the next writer of that version replaces it. COMMIT stays when the arrays are
pruned: a version is made once for ever, and what it was can be told after its arrays are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

from jax_core.faults import crash_point
from jax_core.tree_places import TreePlace, tree_place
from jax_core.trees import NestedDict, tree_digest
from schemas.errors import DamagedDataError, UserError
from schemas.manifest import PolicyCommit, TrainerCommit
from schemas.store import RunStore

Record = TypeVar("Record", PolicyCommit, TrainerCommit)


class StalePublisherError(UserError):
    """Somebody else holds this version, or the versions have moved on: this trainer must stop."""


class MissingVersionError(UserError):
    """A version that was never committed here, or whose arrays were pruned."""


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
    known: set[int] = field(default_factory=set)  # seen committed; saves asking again, as a commit is for ever

    @cached_property
    def place(self) -> TreePlace:
        return tree_place(self.store)

    def is_committed(self, version: int) -> bool:
        if version not in self.known and self.store.exists(self.commit_key(version)):
            self.known.add(version)
        return version in self.known

    def newest(self) -> int | None:
        """The newest committed version among those that are listed, which may be late; None if there is none."""
        listed = sorted(self._begun() | {0}, reverse=True)
        return next((version for version in listed if self.is_committed(version)), None)

    def stored(self) -> list[int]:
        """Committed versions whose arrays are still here, as far as they are listed."""
        pruned = {self._name(version) for version in self.pruned}
        found = self.place.stored(self._parent, pruned)
        return sorted(version for version in _versions(found) if self.is_committed(version))

    def is_stored(self, version: int) -> bool:
        if not self.is_committed(version):
            return False
        return self.place.holds_tree(self.folder_key(version), self.record(version).digest)

    def _begun(self) -> set[int]:
        """Versions that have a folder, whatever is in it."""
        return _versions(self.place.versions(self._parent))

    @property
    def _parent(self) -> str:
        return self.folder_key(0).rpartition("/")[0]

    def _name(self, version: int) -> str:
        return self.folder_key(version).rpartition("/")[2]

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

    def held(self, version: int, tree: NestedDict) -> Record | None:
        """The record that holds the version if it is of this tree; None if nobody holds it.

        Raises:
          StalePublisherError: another content holds it.
        """
        return self._agreed(version, tree_digest(tree)) if self.is_committed(version) else None

    def _agreed(self, version: int, digest: str) -> Record:
        record = self.record(version)
        if record.digest != digest:
            raise StalePublisherError(
                f"{self.noun} {version}",
                f"is committed already with other content ({record.digest[:12]} there, {digest[:12]} here): "
                "another trainer works on this run, or this one did not repeat its steps exactly.",
                "Keep one trainer for a run; start it again and it goes on from the newest commit.",
            )
        return record

    def write(self, version: int, tree: NestedDict, record_of: Callable[[str], Record]) -> Record:
        """Writes the tree, then COMMIT. Returns the record that holds the version now, ours or an equal one.

        Args:
          record_of: makes our record, of the tree's digest.

        Raises:
          StalePublisherError: another content won.
          LostHoldError: this process is no longer the one that may write here.
        """
        before_complete, before_commit, after_commit = self.crash_points
        try:
            ours = record_of(self.place.write(self.folder_key(version), tree, before_complete))
        except Exception:
            # Who wins the version sweeps its folder, and so may have taken ours away while we wrote.
            if not self.is_stored(version):
                raise
            ours = record_of(tree_digest(tree))
        crash_point(before_commit)
        self.store.check_holds()
        created = self.store.put_new(self.commit_key(version), ours.to_json())
        crash_point(after_commit)
        self.pruned.discard(version)
        self.sweep(version, self.record(version).digest)
        return ours if created else self._agreed(version, ours.digest)

    def read(self, version: int, digest: str) -> NestedDict:
        """The tree, verified.

        Raises:
          MissingVersionError: its arrays were pruned.
          DamagedDataError: they are not what was committed.
        """
        folder = self.folder_key(version)
        try:
            tree = self.place.read(folder, digest)
            found = tree_digest(tree)
        except (MemoryError, UserError):
            raise
        except Exception as error:  # Orbax and TensorStore raise whatever a torn file makes them raise
            if not self.place.holds_tree(folder, digest):
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
        self.place.sweep(self.folder_key(version), keep)

    def sweep_all(self) -> None:
        """Removes what killed publishers left of any version. Only for who knows that nobody else is writing."""
        for version in _versions(self.place.littered(self._parent)):
            if not self.is_committed(version):
                self.place.remove(self.folder_key(version))
                continue
            with suppress(DamagedDataError):  # which tree is the right one cannot be told: all stay
                self.sweep(version, self.record(version).digest)

    def prune(self, keep: Collection[int]) -> None:
        """Removes the arrays of all stored versions that are not in `keep`, except the newest.

        Raises:
          LostHoldError: this process is no longer the one that may write here; its `keep` is of the past.
        """
        self.store.check_holds()
        stored = self.stored()
        for version in set(stored[:-1]) - set(keep):
            self.sweep(version, keep=None)
            self.pruned.add(version)


def _versions(names: Collection[str]) -> set[int]:
    return {int(name) for name in names if name.isdecimal()}


def _first_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return text if len(text) <= 200 else text[:200] + "..."
