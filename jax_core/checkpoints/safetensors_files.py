"""Safetensors files: reading them mapped, alone or sharded by an index, and writing them tensor by tensor.

A file is a length (8 bytes), a JSON header of that length that gives each tensor's type, shape and place, and the data.
The places must tile the data exactly, which is how a file that was cut short is noticed.
(https://huggingface.co/docs/safetensors, "Format")
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jax_core.checkpoints.tensor_source import BFLOAT16, MappedFile, TensorInfo, damaged
from schemas.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_MOST_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
_NUMPY = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BFLOAT16}
_CODES = {dtype.name: code for code, dtype in _NUMPY.items()}


class SafetensorsFile:
    """The tensors of one file. See `TensorSource`."""

    def __init__(self, path: Path):
        """Raises DamagedDataError if the file is no safetensors file, or is not whole."""
        self._file = MappedFile(path)
        header, self._start = _header(self._file)
        self._places = _places(header, self._file, self._start)
        self.infos: Mapping[str, TensorInfo] = {
            name: TensorInfo(shape, _NUMPY[code].name if code in _NUMPY else code, stop - start, path)
            for name, (code, shape, start, stop) in self._places.items()
        }

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        code, shape, first, _ = self._places[name]
        row = _ITEM_BYTES[code] * math.prod(shape[1:])
        return self._file.view(first + start * row, first + stop * row, _NUMPY[code]).reshape(-1, *shape[1:])

    def release(self, name: str) -> None:
        _, _, start, stop = self._places[name]
        self._file.release(start, stop)


class ShardedSafetensors:
    """The tensors of several files, as one source. See `TensorSource`."""

    def __init__(self, index: Path):
        """Raises DamagedDataError naming the index, or the file that does not hold what the index promises."""
        self._of: dict[str, SafetensorsFile] = {}
        weight_map = _weight_map(index)
        files = {file: SafetensorsFile(index.parent / file) for file in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            if name not in files[file].infos:
                raise damaged(index, f"places {name} in {file}, which does not hold it.")
            self._of[name] = files[file]
        self.infos: Mapping[str, TensorInfo] = {name: file.infos[name] for name, file in self._of.items()}

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._of[name].rows(name, start, stop)

    def release(self, name: str) -> None:
        self._of[name].release(name)


def open_safetensors(folder: Path) -> SafetensorsFile | ShardedSafetensors:
    """The tensors of a Hugging Face folder.

    Raises:
      UserError: the folder holds none, or a shard that its index names is missing.
      DamagedDataError: naming the file that is torn, truncated or altered.
    """
    if (folder / INDEX).is_file():
        return ShardedSafetensors(folder / INDEX)
    if (folder / SINGLE).is_file():
        return SafetensorsFile(folder / SINGLE)
    way_out = "Name a folder of a model in safetensors format, or a .gguf file."
    raise UserError(str(folder), f"holds neither {SINGLE} nor {INDEX}.", way_out)


def _header(file: MappedFile) -> tuple[dict[str, Any], int]:
    """The header, and where the data begins."""
    if file.size < 8:
        raise damaged(file.path, f"has {file.size} bytes; a safetensors file begins with a length of 8.")
    length = int(file.data[:8].view("<u8")[0])
    if length > min(file.size - 8, _MOST_HEADER_BYTES):
        raise damaged(file.path, f"promises a header of {length} bytes and has {file.size} in all.")
    header = parse_json(file.path, file.data[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    return header, 8 + length


def parse_json(path: Path, data: bytes) -> dict[str, Any]:
    """The JSON object in a file's bytes. Raises DamagedDataError naming `path`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:  # torn JSON and broken UTF-8 alike; nesting without end
        raise damaged(path, f"holds no whole JSON where it should ({error}).") from error
    if not isinstance(value, dict):
        raise damaged(path, "holds JSON that is no object.")
    return value


_Place = tuple[str, tuple[int, ...], int, int]  # type code, shape, first byte, end, both in the file


def _places(header: Mapping[str, Any], file: MappedFile, start: int) -> dict[str, _Place]:
    places = {name: _place(name, entry, file.path) for name, entry in header.items()}
    end = 0
    for name, (_, _, first, stop) in sorted(places.items(), key=lambda item: item[1][2:]):
        if first != end:
            raise damaged(file.path, f"says that {name} begins at byte {first} of the data, and {end} is next.")
        end = stop
    if start + end != file.size:
        raise damaged(
            file.path, f"has {file.size} bytes where its header promises {start + end}: it was cut or altered."
        )
    return {name: (code, shape, start + first, start + stop) for name, (code, shape, first, stop) in places.items()}


def _place(name: str, entry: Any, path: Path) -> _Place:
    try:
        code, shape, (first, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        item = _ITEM_BYTES[code]
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"describes {name} in a way that cannot be read.") from error
    if not isinstance(shape, list) or not all(_is_count(size) for size in [*shape, first, stop]):
        raise damaged(path, f"gives {name} a shape or a place that is none.")
    if stop - first != item * math.prod(shape):
        raise damaged(path, f"gives {name} {stop - first} bytes, and {code}{shape} takes {item * math.prod(shape)}.")
    return code, tuple(shape), first, stop


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = parse_json(index, index.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged(index, "has no weight_map.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise damaged(index, f"places {name} in {file!r}, which is no name of a file beside it.")
        if not (index.parent / file).is_file():
            raise UserError(str(index.parent / file), f"is missing; {index.name} names it.", "Download or copy it too.")
    return weight_map


def write_safetensors(file: BinaryIO, tensors: Sequence[tuple[str, TensorInfo, Callable[[], np.ndarray]]]) -> None:
    """Writes tensors, made one at a time when their turn comes, with the header that transformers expects."""
    ends = list(accumulate(info.nbytes for _, info, _ in tensors))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for (name, info, _), end in zip(tensors, ends, strict=True):
        place = [end - info.nbytes, end]
        header[name] = {"dtype": _CODES[info.dtype], "shape": list(info.shape), "data_offsets": place}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the data is aligned
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for _, info, make in tensors:
        array = np.asarray(make(), order="C")
        assert (array.shape, array.dtype.name) == (info.shape, info.dtype)
        file.write(array.reshape(-1).view(np.uint8).data)
