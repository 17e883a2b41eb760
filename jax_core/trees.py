"""Trees of arrays: names of their leaves, a digest of their content, and their form as nested dicts."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import jax
import numpy as np

PyTree = Any
NestedDict = dict[str, Any]  # of numpy arrays
LeafPath = tuple[str, ...]  # ("layers", "0", "w")


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
