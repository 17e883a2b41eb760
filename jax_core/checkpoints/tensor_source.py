"""Named tensors that lie in files, read a block of rows at a time.

What a reader promises: every offset and size was checked against the file when it was opened, so reading a tensor
cannot reach outside its file; and what was read can be let go of, so that a mapped file is never in memory whole.

Left out on purpose: machines whose numbers are big-endian, and files that change while they are mapped.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from schemas.errors import DamagedDataError, UserError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class TensorInfo:
    """What a file says of one tensor."""

    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", "float16", a quantization such as "Q4_1", or what else the file names
    nbytes: int  # in the file
    file: Path


class TensorSource(Protocol):
    """The tensors of a checkpoint under their Hugging Face names."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]: ...

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the first axis: float32, bfloat16 or float16, quantized tensors as float32.

        May be a read-only view of the file. A tensor without axes has one row.
        """
        ...

    def release(self, name: str) -> None:
        """Lets the memory of a tensor's file pages go. They are read again when they are needed again."""
        ...


def read_tensor(source: TensorSource, name: str) -> np.ndarray:
    """A whole tensor, in memory of its own."""
    info = source.infos[name]
    rows = source.rows(name, 0, info.shape[0] if info.shape else 1)
    tensor = np.array(rows).reshape(info.shape)
    source.release(name)
    return tensor


class MappedFile:
    """A file in memory that is read when it is looked at. Closed when the last view of it is gone."""

    def __init__(self, path: Path):
        """Raises UserError if there is no such file, DamagedDataError if it is empty."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size == 0:
                    raise damaged(path, "is empty.")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise UserError(str(path), f"cannot be read: {error.strerror}.", "Check the path.") from error
        self.bytes = memoryview(self._map)
        self.data = np.frombuffer(self._map, np.uint8)

    def view(self, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
        """Bytes [start, stop) as a flat array; a view, or a copy where the file does not align them."""
        data = self.data[start:stop]
        return data.view(dtype) if (data.ctypes.data % dtype.itemsize) == 0 else data.copy().view(dtype)

    def release(self, start: int, stop: int) -> None:
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)


def damaged(path: Path, reason: str) -> DamagedDataError:
    return DamagedDataError(str(path), reason, "Download or copy the file again.")
