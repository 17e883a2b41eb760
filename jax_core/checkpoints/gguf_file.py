"""GGUF files: metadata and tensors, read mapped and with every length checked against the file.

The header is read here and not by the `gguf` package, which trusts it (a corrupt count makes it loop without end) and
takes seconds for a vocabulary. The arithmetic of quantized blocks is the package's.
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)

Left out on purpose: big-endian files, version 1, files split in several, and quantizations other than `QUANTIZATIONS`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jax_core.checkpoints.tensor_source import BFLOAT16, MappedFile, TensorInfo, damaged
from schemas.errors import UserError

QUANTIZATIONS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")

_PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_AXES, _MOST_NESTED = 4, 2


@dataclass(frozen=True)
class _Place:
    shape: tuple[int, ...]  # slowest axis first
    dtype: str
    line_bytes: int
    start: int  # in the file
    stop: int


class GGUFFile:
    """The metadata and the tensors of one file, under GGUF's own names."""

    def __init__(self, path: Path):
        """Raises UserError if this is no GGUF file that can be read here, DamagedDataError if it is not whole."""
        self._file = MappedFile(path)
        reader = _Reader(self._file)
        tensors, entries = _counts(reader)
        self.metadata: Mapping[str, Any] = _metadata(reader, entries)
        self._places = _places(reader, tensors, self.metadata)
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo(
                place.shape,
                _PLAIN[place.dtype].name if place.dtype in _PLAIN else place.dtype,
                place.stop - place.start,
                path,
            )
            for name, place in self._places.items()
        }

    def lines(self, name: str, start: int, stop: int) -> np.ndarray:
        """Lines [start, stop) of a tensor's last axis, [stop - start, shape[-1]]; dequantized, if need be, to float32.

        A tensor [A, B, C] has A * B lines, a vector one.
        """
        place = self._places[name]
        first, last = place.start + start * place.line_bytes, place.start + stop * place.line_bytes
        if place.dtype in _PLAIN:
            return self._file.view(first, last, _PLAIN[place.dtype]).reshape(-1, place.shape[-1])
        return _dequantized(self._file.data[first:last].reshape(-1, place.line_bytes), place.dtype)

    def release(self, name: str) -> None:
        self._file.release(self._places[name].start, self._places[name].stop)


def _dequantized(blocks: np.ndarray, dtype: str) -> np.ndarray:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(invalid="ignore", over="ignore"):  # numbers that are none stay none
        return dequantize(blocks, GGMLQuantizationType[dtype])


class _Reader:
    """A place in the header, which moves on with each reading and never past the end."""

    def __init__(self, file: MappedFile):
        self.path = file.path
        self.size = file.size
        self.at = 0
        self._data = file.bytes

    def take(self, size: int) -> memoryview:
        if size > self.size - self.at:
            raise damaged(self.path, f"ends within its header: {size} bytes are due at byte {self.at} of {self.size}.")
        self.at += size
        return self._data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def numbers(self, code: str, count: int) -> list[Any]:
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))

    def text(self) -> str:
        data = self.take(self.number("Q"))
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise damaged(self.path, f"holds text that is no UTF-8 before byte {self.at}.") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and depth < _MOST_NESTED:
            item, count = self.number("I"), self.number("Q")
            if item in _SCALARS:
                return self.numbers(_SCALARS[item], count)
            if count > (self.size - self.at) // 8:  # the least that a string takes
                raise damaged(self.path, f"promises an array of {count} at byte {self.at} of {self.size}.")
            return [self.value(item, depth + 1) for _ in range(count)]
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        raise damaged(self.path, f"holds a value of unknown type {kind} before byte {self.at}.")


def _counts(reader: _Reader) -> tuple[int, int]:
    """Numbers of tensors and of metadata entries."""
    if reader.size < 24 or bytes(reader.take(4)) != b"GGUF":
        raise UserError(str(reader.path), "is no GGUF file.", "Name a .gguf file, or a folder with config.json.")
    version = reader.number("I")
    if version not in (2, 3):
        reason = f"is GGUF version {version & 0xFFFF or 'of a big-endian machine'}; versions 2 and 3 can be read."
        raise UserError(str(reader.path), reason, "Convert the model again with a current llama.cpp.")
    return reader.number("Q"), reader.number("Q")


def _metadata(reader: _Reader, entries: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(entries):  # each takes bytes, so a wrong count ends at the end of the file
        name = reader.text()
        if name in metadata:
            raise damaged(reader.path, f"holds {name} twice.")
        metadata[name] = reader.value(reader.number("I"))
    return metadata


def _places(reader: _Reader, tensors: int, metadata: Mapping[str, Any]) -> dict[str, _Place]:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise damaged(reader.path, f"has general.alignment {alignment!r}, which is no power of two.")
    described: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensors):
        name, axes = reader.text(), reader.number("I")
        if not 1 <= axes <= _MOST_AXES or name in described:
            raise damaged(reader.path, f"describes {name!r} with {axes} axes, or twice.")
        shape = tuple(reversed(reader.numbers("Q", axes)))
        if 0 in shape:
            raise damaged(reader.path, f"describes {name!r} with shape {shape}.")
        described[name] = (shape, reader.number("I"), reader.number("Q"))
    start = -(-reader.at // alignment) * alignment
    sizes = _block_sizes()
    return {name: _place(reader, name, start, sizes, *entry) for name, entry in described.items()}


def _place(
    reader: _Reader,
    name: str,
    data_start: int,
    sizes: Mapping[int, tuple[str, int, int]],
    shape: tuple[int, ...],
    kind: int,
    offset: int,
) -> _Place:
    if kind not in sizes:
        known = ", ".join((*_PLAIN, *QUANTIZATIONS))
        raise UserError(str(reader.path), f"holds {name} in type {_type_name(kind)}.", f"Use a file in {known}.")
    dtype, block, block_bytes = sizes[kind]
    if shape[-1] % block:
        raise damaged(reader.path, f"holds {name} with lines of {shape[-1]}, no multiple of {dtype}'s {block}.")
    line_bytes = shape[-1] // block * block_bytes
    start = data_start + offset
    stop = start + line_bytes * math.prod(shape[:-1])
    if stop > reader.size:
        raise damaged(reader.path, f"has {reader.size} bytes, and {name} ends at byte {stop}: it was cut or altered.")
    return _Place(shape, dtype, line_bytes, start, stop)


def _block_sizes() -> dict[int, tuple[str, int, int]]:
    """GGML's number of each type that can be read: name, numbers and bytes of a block."""
    types, sizes = _ggml()
    return {int(types[name]): (name, *sizes[types[name]]) for name in (*_PLAIN, *QUANTIZATIONS)}


def _type_name(kind: int) -> str:
    types, _ = _ggml()
    return next((each.name for each in types if each == kind), str(kind))


def _ggml() -> tuple[Any, Any]:
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise UserError("a GGUF file", "needs the package gguf.", "pip install 'rollstream[models]'") from error
    return GGMLQuantizationType, GGML_QUANT_SIZES
