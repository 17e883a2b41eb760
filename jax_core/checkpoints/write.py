"""Writing a model in Hugging Face's layout, as transformers, vLLM and others load it.

    config.json  generation_config.json  tokenizer files
    model.safetensors                                  or, above a size,
    model-00001-of-00003.safetensors ...  model.safetensors.index.json

Everything is written to a folder beside the target, which is renamed when it is whole: a target that exists is a
complete checkpoint. Tensors are made one at a time, so that little more than the parameters is in memory.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jax_core.checkpoints.checkpoint import CONFIG, GENERATION
from jax_core.checkpoints.safetensors_files import INDEX, SINGLE, write_safetensors
from jax_core.checkpoints.tensor_source import BFLOAT16, TensorInfo
from jax_core.models.config import ModelConfig
from jax_core.models.decoder import Params
from jax_core.models.families import tensor_rules, write_config
from jax_core.models.tensor_rules import TensorRule
from schemas.errors import UserError
from schemas.local_files import sync
from schemas.text import to_json

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}
SHARD_BYTES = 5_000_000_000
Tensor = tuple[str, TensorInfo, Callable[[], np.ndarray]]


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    params: Params,
    *,
    config_json: Mapping[str, Any] | None = None,
    generation_json: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    max_shard_bytes: int = SHARD_BYTES,
    files: Mapping[str, bytes] | None = None,
) -> list[str]:
    """Writes a model; float32 parameters written as float32 come back bit for bit.

    Args:
      folder: must not exist, or be empty.
      config_json: the config.json that the model came with; `write_config(config)` if None.
      generation_json: generation_config.json; not written if None or empty.
      dtype: of all tensors, a key of `DTYPES`.
      max_shard_bytes: a file's most, unless one tensor alone has more.
      files: further files by name, such as the tokenizer's.

    Returns:
      The names of the files, sorted.

    Raises:
      UserError: the folder holds something, or cannot be written.
    """
    described = dict(config_json) if config_json is not None else write_config(config)
    with whole_folder(folder) as partial:
        _write_tensors(partial, _tensors(config, params, dtype), max_shard_bytes)
        write_json(partial / CONFIG, _with_dtype(described, dtype))
        if generation_json:
            write_json(partial / GENERATION, generation_json)
        for name, content in (files or {}).items():
            (partial / name).write_bytes(content)
        return sorted(file.name for file in partial.iterdir())


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `folder` if all goes well, and else is removed."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(str(folder), "is not empty.", "Name another folder: nothing is ever written over.")
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
        try:
            yield partial
            for file in (*partial.iterdir(), partial):
                sync(file)
            partial.chmod(0o755)  # made for its owner alone
            partial.rename(folder)  # fails if somebody has put something there meanwhile
            sync(folder.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}."
        raise UserError(str(folder), reason, "Check the path, its permissions and the space there.") from error


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """With the type under the name that the config already uses."""
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return config | {key: dtype}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(to_json(value, indent=2) + "\n")


def _tensors(config: ModelConfig, params: Params, dtype: str) -> list[Tensor]:
    """Every tensor of the checkpoint, each made from the rules that name a part of it."""
    rules: dict[str, list[TensorRule]] = {}
    for rule in tensor_rules(config):
        rules.setdefault(rule.name, []).append(rule)
    made = partial(_assembled, params, dtype=DTYPES[dtype])
    return [array_tensor(name, parts[0].shape, DTYPES[dtype], partial(made, parts)) for name, parts in rules.items()]


def array_tensor(name: str, shape: tuple[int, ...], dtype: np.dtype, make: Callable[[], np.ndarray]) -> Tensor:
    return name, TensorInfo(shape, dtype.name, int(np.prod(shape)) * dtype.itemsize, Path()), make


def _assembled(params: Params, rules: Sequence[TensorRule], dtype: np.dtype) -> np.ndarray:
    out = np.empty(rules[0].shape, dtype)
    for rule in rules:
        ours = np.asarray(leaf_of(params, rule.path)[rule.index])
        target = out
        if rule.part is not None:
            axis, start, stop = rule.part
            target = out[(slice(None),) * axis + (slice(start, stop),)]
        target[...] = ours.swapaxes(-1, -2) if rule.transpose else ours
    return out


def leaf_of(params: Params, path: tuple[str, ...]) -> Any:
    leaf: Any = params
    for key in path:
        leaf = leaf[key]
    return leaf


def _write_tensors(folder: Path, tensors: Sequence[Tensor], max_shard_bytes: int) -> None:
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        names = [SINGLE]
    else:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        write_json(folder / INDEX, _index(shards, names))
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            write_safetensors(file, shard)


def _shards(tensors: Sequence[Tensor], max_bytes: int) -> list[list[Tensor]]:
    """Tensors in order, each shard as full as it may be."""
    shards: list[list[Tensor]] = [[]]
    used = 0
    for tensor in tensors:
        size = tensor[1].nbytes
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += size
    return shards


def _index(shards: Sequence[Sequence[Tensor]], names: Sequence[str]) -> dict[str, Any]:
    weight_map = {name: file for shard, file in zip(shards, names, strict=True) for name, _, _ in shard}
    return {
        "metadata": {"total_size": sum(info.nbytes for shard in shards for _, info, _ in shard)},
        "weight_map": dict(sorted(weight_map.items())),
    }
