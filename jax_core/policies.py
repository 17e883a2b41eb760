"""The stores of weights and optimizer states, by policy version; and a cache of weights on the device.

Versions of the weights have no gaps and each is published once: version v is what v optimizer steps made. How a version
is written, committed, verified and pruned is `jax_core.committed_trees`; this module adds who may publish which one.

Left out on purpose: a pointer to the newest version (it would be a second truth beside the commits, and could be torn
or go backwards).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, Literal

import jax
import numpy as np

from jax_core.committed_trees import CommittedTrees, MissingVersionError, StalePublisherError
from jax_core.trees import LeafPath, NestedDict, PyTree, leaf_path, named_leaves, nested_dict, tree_digest
from schemas import run_layout
from schemas.errors import UserError
from schemas.manifest import PolicyCommit, TrainerCommit
from schemas.store import RunStore

__all__ = [
    "MissingVersionError",
    "PolicyCache",
    "PolicyStore",
    "StalePublisherError",
    "TrainerStore",
    "tree_digest",
]

Source = Literal["random", "checkpoint", "warm_start", "step"]


class PolicyStore:
    """The published weights of a run. Safe in many threads, and in many processes that publish and read at once.

    Params are nested dicts of arrays with string keys.
    """

    def __init__(self, store: RunStore):
        self._trees = CommittedTrees(
            store,
            "policy version",
            run_layout.policy,
            run_layout.policy_commit,
            PolicyCommit,
            ("policy-before-rename", "policy-before-commit", "after-commit"),
        )
        self._publishing = threading.Lock()
        self._looking = threading.Lock()
        self._newest: int | None = None

    def publish(
        self,
        version: int,
        params: Mapping[str, Any],
        *,
        source: Source,
        fencing_token: str = "",
    ) -> PolicyCommit:
        """Commits `params` as `version`, durably, if it is the successor of the newest version (0 in an empty store).

        To publish a committed version again with the same bytes is harmless and returns the commit that holds it; so a
        step may be tried again.

        Args:
          version: how many optimizer steps made these weights.
          params: nested dict of numpy or JAX arrays; copied to the host.
          source: what made them.
          fencing_token: names the publisher in the commit. Default: what this process holds of the run.

        Raises:
          StalePublisherError: the version is held by other weights, or is not the successor of the newest.
          LostHoldError: another process took over what this one held of the run.
          ValueError: params that would not come back as they are.
          UserError: no space left, no permission, or a store that does not answer.
        """
        tree = nested_dict(params)
        if not _is_nested_dict(params, tree):
            raise ValueError("params must be nested dicts of arrays with string keys, without empty parts")
        with self._publishing:
            parent = self.latest()
            held = self._trees.held(version, tree)
            if held is not None:
                return held
            _check_successor(version, parent)
            token = fencing_token or self._trees.store.fencing_token
            return self._trees.write(
                version, tree, lambda digest: _policy_commit(version, parent, tree, digest, source, token)
            )

    def latest(self) -> int | None:
        """The newest committed version; None if there is none. Never goes backwards within one object.

        Cheap enough to poll: versions have no gaps, so it only asks whether the next one exists.
        """
        with self._looking:
            if self._newest is None:
                self._newest = self._trees.newest()
            if self._newest is None:
                return None
            while self._trees.is_committed(self._newest + 1):
                self._newest += 1
            return self._newest

    def commit(self, version: int) -> PolicyCommit:
        """The commit of a version, also of a pruned one.

        Raises:
          MissingVersionError: it was never committed.
          DamagedDataError: the record cannot be read.
        """
        return self._trees.record(version)

    def versions(self) -> list[int]:
        """Versions that can be loaded, ascending: committed and not pruned."""
        return self._trees.stored()

    def is_stored(self, version: int) -> bool:
        """Whether the version can be loaded, by asking for it: `versions` may be late to list it."""
        return self._trees.is_stored(version)

    def load(self, version: int) -> NestedDict:
        """The weights of a version as numpy arrays, bit for bit what was published.

        Raises:
          MissingVersionError: never committed, or pruned.
          DamagedDataError: what is stored is not what was published.
        """
        return self._trees.read(version, self.commit(version).digest)

    def prune(self, keep: Collection[int]) -> None:
        """Removes the weights of every version that is not in `keep`, except the newest. Commits stay."""
        newest = self.latest()
        self._trees.prune(keep if newest is None else {*keep, newest})

    def sweep(self) -> None:
        """Removes what killed publishers left. Only for who knows that nobody else is publishing."""
        self._trees.sweep_all()


def _is_nested_dict(params: Any, tree: NestedDict) -> bool:
    """Whether `params` is what a reader gets back, who knows only the leaves' paths."""
    structure: Any = jax.tree.structure(params)
    return bool(tree) and structure == jax.tree.structure(tree)


def _check_successor(version: int, newest: int | None) -> None:
    successor = 0 if newest is None else newest + 1
    if version == successor:
        return
    there = "the run has no policy yet" if newest is None else f"the newest policy is version {newest}"
    raise StalePublisherError(
        f"policy version {version}",
        f"cannot be published: {there}, so the next is {successor}.",
        "Another trainer works on this run, or this one started from the wrong version. Start it again.",
    )


def _policy_commit(
    version: int,
    parent: int | None,
    tree: NestedDict,
    digest: str,
    source: Source,
    token: str,
) -> PolicyCommit:
    leaves = jax.tree.leaves(tree)
    return PolicyCommit(
        version=version,
        parent=parent,
        digest=digest,
        bytes=sum(leaf.nbytes for leaf in leaves),
        parameters=sum(leaf.size for leaf in leaves),
        source=source,
        fencing_token=token,
        created_at=time.time(),
    )


class TrainerStore:
    """What a resume needs besides the weights' version: optimizer states and the like, some steps apart.

    Trees may hold any containers that JAX knows (optax states are NamedTuples); leaves are arrays and numbers.
    """

    def __init__(self, store: RunStore):
        self._trees = CommittedTrees(
            store,
            "trainer state",
            run_layout.trainer_state,
            run_layout.trainer_commit,
            TrainerCommit,
            ("trainer-before-rename", "trainer-before-commit", "after-trainer-commit"),
        )
        self._saving = threading.Lock()

    def save(self, version: int, tree: PyTree) -> TrainerCommit:
        """Commits the state that belongs to policy `version`, durably. The same state again is harmless.

        Raises:
          StalePublisherError: the version is held by another state.
          ValueError: a leaf that would not come back as it is.
          UserError: no space left, no permission, or a store that does not answer.
        """
        nested = nested_dict(tree)
        with self._saving:
            held = self._trees.held(version, nested)
            if held is not None and version in self._trees.stored():
                return held
            # A pruned state that a resumed run made again is written again: the next resume starts from it.
            return self._trees.write(
                version, nested, lambda digest: TrainerCommit(version=version, digest=digest, created_at=time.time())
            )

    def newest_at_most(self, version: int) -> int | None:
        """The newest stored state that is not ahead of policy `version`: where a resume starts."""
        return max((stored for stored in self._trees.stored() if stored <= version), default=None)

    def load(self, version: int, like: PyTree) -> PyTree:
        """The state of a version in the structure of `like`; leaves are numpy arrays, or numbers where `like` has them.

        Args:
          like: a tree of arrays, `jax.ShapeDtypeStruct`s or numbers; only its structure, shapes and dtypes are used.

        Raises:
          MissingVersionError: never saved, or pruned.
          DamagedDataError: what is stored is not what was saved.
          UserError: the state has another structure: it belongs to another optimizer or model.
        """
        stored = self._trees.read(version, self._trees.record(version).digest)
        try:
            return _in_structure_of(like, stored)
        except ValueError as error:
            raise UserError(
                f"trainer state {version}",
                f"does not fit this trainer: {error}.",
                "Resume with the recipe that made it, or start a new run.",
            ) from error

    def prune(self, keep: Collection[int]) -> None:
        """Removes every state that is not in `keep`, except the newest. Commits stay."""
        self._trees.prune(keep)

    def sweep(self) -> None:
        """Removes what killed trainers left. Only for who knows that nobody else is saving."""
        self._trees.sweep_all()


def _in_structure_of(like: PyTree, stored: NestedDict) -> PyTree:
    wanted, _ = jax.tree_util.tree_flatten_with_path(like)
    found = dict(named_leaves(stored))
    names = [leaf_path(path) for path, _ in wanted]
    differing = sorted(set(names) ^ set(found))
    if differing:
        missing, name = differing[0] in names, "/".join(differing[0])
        raise ValueError(f"{name} is {'missing in' if missing else 'only in'} the stored state")
    leaves = [_leaf_like(leaf, found[name], name) for (_, leaf), name in zip(wanted, names, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _leaf_like(like: Any, stored: np.ndarray, path: LeafPath) -> Any:
    if isinstance(like, bool | int | float):
        return stored.item()
    if (stored.shape, stored.dtype) != (like.shape, like.dtype):
        raise ValueError(f"{'/'.join(path)} is {stored.dtype}{stored.shape}, not {like.dtype}{tuple(like.shape)}")
    return stored


class PolicyCache:
    """The policies used last, on this process's device; each is loaded once, however many threads ask for it.

    `get` gives arrays on JAX's default device, so that they are not copied there on every call of a compiled function.

    Args:
      policies: where they are loaded from.
      size: how many are held.
      weights_of: what a model computes with, of what a policy stores: the same, or a base with adapters merged.
    """

    def __init__(
        self, policies: PolicyStore, size: int = 2, weights_of: Callable[[PyTree], PyTree] = lambda tree: tree
    ):
        if size < 1:
            raise ValueError(f"size={size}: a cache of policies holds at least one")
        self._policies = policies
        self._size = size
        self._weights_of = weights_of
        self._lock = threading.Lock()
        self._held: OrderedDict[int, Future[PyTree]] = OrderedDict()  # least recently used first

    def get(self, version: int) -> PyTree:
        """The weights of a version. Raises what `PolicyStore.load` raises, and then tries again on the next call."""
        with self._lock:
            future = self._held.get(version)
            ours = future is None
            if future is None:
                future = self._hold(version, Future())
            self._held.move_to_end(version)
        if ours:  # outside the lock: other versions stay available while this one loads
            self._load_into(future, version)
        return future.result()

    def put(self, version: int, params: PyTree) -> None:
        """Holds params that this process made itself. They are not copied: never donate them to a compiled function."""
        future: Future[PyTree] = Future()
        future.set_result(self._weights_of(params))
        with self._lock:
            self._hold(version, future)

    def _hold(self, version: int, future: Future[PyTree]) -> Future[PyTree]:
        self._held[version] = future
        self._held.move_to_end(version)
        while len(self._held) > self._size:
            self._held.popitem(last=False)
        return future

    def _load_into(self, future: Future[PyTree], version: int) -> None:
        try:
            future.set_result(self._weights_of(jax.device_put(self._policies.load(version))))
        except BaseException as error:
            with self._lock:
                if self._held.get(version) is future:
                    del self._held[version]
            future.set_exception(error)
