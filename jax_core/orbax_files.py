"""One tree of arrays in one local folder, and back: an ordinary Orbax PyTree checkpoint, with digests of its files.

Left out on purpose: Orbax's CheckpointManager (its own retention, naming and step bookkeeping would compete with
COMMIT), asynchronous saves (a tree must be durable before it is announced), and arrays that are sharded over hosts.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import jax
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]

from jax_core.trees import NestedDict, tree_digest
from schemas.errors import UserError
from schemas.local_files import sync

FILES = "FILES.json"  # digests of a tree's files, beside them

# Of one file of arrays, about: large trees lie in several, so that several threads write, sync and digest them.
_FILE_BYTES = 2**27

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
    # few files, so there is little to sync. To a compressor weights are noise: twice the time for a tenth less. We wait
    # for a save to end, so the arrays need no copy that others cannot change meanwhile.
    arrays = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    handlers = ((np.ndarray, arrays), (jax.Array, ocp.type_handlers.ArrayHandler()))  # it warns where there is no other
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,
        use_zarr3=True,
        use_compression=False,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(*handlers),
    )


def save_tree(folder: Path, tree: NestedDict) -> str:
    """Writes `tree` into the new folder `folder`, durably, and returns its `tree_digest`, computed beside the writing.

    A tree without leaves has no Orbax files. Nobody may change the arrays meanwhile.
    """
    try:
        folder.mkdir(parents=True)
        with ThreadPoolExecutor(1) as beside:
            digest = beside.submit(tree_digest, tree)
            if tree:
                _require_space(folder, tree)
                handler = _orbax()
                handler.save(folder, args=ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=_FILE_BYTES))
                handler.finalize(folder)
            (folder / FILES).write_text(json.dumps(file_digests(folder), indent=2))
            sync_tree(folder)
            return digest.result()
    except Exception as error:
        if errno_of(error) in THE_USERS:
            reason = f"could not be written ({os.strerror(errno_of(error))})."
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


def restore_tree(folder: Path) -> NestedDict:
    """The inverse of `save_tree`: numpy arrays. Whatever is wrong with the files raises something.

    The files are checked before Orbax sees them: parsers of damaged bytes may allocate, hang or crash, and Orbax leaves
    futures behind that complain on stderr later.
    """
    promised: dict[str, str] = json.loads((folder / FILES).read_bytes())
    found = file_digests(folder)
    for name, digest in promised.items():
        if found.get(name) != digest:
            raise ValueError(f"{name} is {'altered' if name in found else 'gone'}")
    return _orbax().restore(folder) if promised else {}


def file_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in the folder but FILES, by relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / FILES)
    with ThreadPoolExecutor() as pool:
        digests = pool.map(_sha256, paths)
        return {path.relative_to(folder).as_posix(): digest for path, digest in zip(paths, digests, strict=True)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:  # in pieces: a file of gigabytes need not be in memory once more
        return hashlib.file_digest(file, "sha256").hexdigest()


# Errors of the system that the user can mend: no space, or no permission.
THE_USERS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS}


def errno_of(error: Exception) -> int:
    """The system's error number; 0: none. TensorStore has it only in the text of a ValueError."""
    if isinstance(error, OSError):
        return error.errno or 0
    said = re.search(r"os_error_code='(\d+)'", str(error))
    return int(said.group(1)) if said else 0


def sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))
