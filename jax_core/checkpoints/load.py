"""Parameters of a checkpoint, streamed into the dtype and the sharding that they are used in.

Each leaf of the parameters is made once, in its final dtype, and filled block by block from the mapped file. So the
most memory that is used is that of the parameters, and little more. What is missing, too much or of another shape is
said by name before anything is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_core.checkpoints.checkpoint import Checkpoint
from jax_core.checkpoints.gguf_file import QUANTIZATIONS
from jax_core.checkpoints.tensor_source import TensorSource
from jax_core.models.decoder import Params, param_shapes
from jax_core.models.families import tensor_rules
from jax_core.models.tensor_rules import TensorRule
from schemas.errors import UserError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

_READABLE = ("float32", "bfloat16", "float16", *QUANTIZATIONS)
_MOST_SHOWN = 20
_BLOCK_BYTES = 1 << 23
_ALIGNMENT = 64  # bytes; memory that is aligned so is used by JAX on a CPU as it is, without a copy

Path = tuple[str, ...]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Leaf:
    """One leaf of the parameters, not read yet."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    rules: tuple[TensorRule, ...]
    source: TensorSource

    def read(self, index: Index = ()) -> np.ndarray:
        """The part of the leaf that `index` names, in memory of its own; () is all of it."""
        bounds = [slice(*each.indices(size)) for each, size in zip(index, self.shape, strict=False)]
        bounds += [slice(0, size) for size in self.shape[len(bounds) :]]
        out = _aligned(tuple(each.stop - each.start for each in bounds), self.dtype)
        for rule in self.rules:
            stacked = bounds[: len(rule.index)]
            if all(each.start <= at < each.stop for each, at in zip(stacked, rule.index, strict=True)):
                place: Any = tuple(at - each.start for each, at in zip(stacked, rule.index, strict=True))
                self._fill(out[(*place, ...)], rule, bounds[len(rule.index) :])
        return out

    def _fill(self, out: np.ndarray, rule: TensorRule, bounds: Sequence[slice]) -> None:
        """Copies the part `bounds` of what a rule names, in the checkpoint's own orientation."""
        if not out.shape:
            out[...] = self.source.rows(rule.name, 0, 1).reshape(())
            return
        wanted = list(bounds)
        if rule.transpose:
            out = out.swapaxes(-1, -2)
            wanted[-1], wanted[-2] = wanted[-2], wanted[-1]
        if rule.part is not None:
            axis, start, _ = rule.part
            wanted[axis] = slice(wanted[axis].start + start, wanted[axis].stop + start)
        first, rest = wanted[0], tuple(wanted[1:])
        for start, stop in _blocks(self.source, rule.name, first):
            block = self.source.rows(rule.name, start, stop)[(slice(None), *rest)]
            out[start - first.start : stop - first.start] = block
            del block  # the last view of pages that may go now
            self.source.release(rule.name)


Put = Callable[[Leaf], jax.Array]


def to_default_device(leaf: Leaf) -> jax.Array:
    """The whole leaf, on JAX's default device."""
    return jax.device_put(leaf.read())


def to_shardings(sharding_of: Callable[[Path, tuple[int, ...]], jax.sharding.Sharding]) -> Put:
    """Each device's own part of a leaf, read for it alone. `sharding_of` gives the sharding for a path and a shape."""

    def put(leaf: Leaf) -> jax.Array:
        sharding = sharding_of(leaf.path, leaf.shape)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf.read(index or ()))

    return put


def load_params(checkpoint: Checkpoint, dtype: Any = np.float32, put: Put = to_default_device) -> Params:
    """The model's parameters, all in `dtype` (float32 or bfloat16), each where `put` puts it.

    Raises:
      UserError: tensors are missing, too many, wrongly shaped or of a type that cannot be read; all are named.
    """
    leaves = _leaves(checkpoint, np.dtype(dtype))
    # The largest tensors first: while they are read, what is read already takes the least.
    leaves.sort(key=lambda leaf: -max(math.prod(rule.shape) for rule in leaf.rules))
    params: Params = {}
    for leaf in leaves:
        parent = params
        for key in leaf.path[:-1]:
            parent = parent.setdefault(key, {})
        parent[leaf.path[-1]] = put(leaf)
    return params


def verified_rules(checkpoint: Checkpoint) -> tuple[TensorRule, ...]:
    """The rules by which a checkpoint becomes parameters. Raises what `load_params` raises, and reads no weights."""
    rules = tensor_rules(checkpoint.config)
    problems = mismatches(checkpoint, rules)
    if problems:
        way_out = "Use the model's own files, whole and unmixed."
        raise UserError(checkpoint.location, f"does not fit its configuration: {'; '.join(problems)}.", way_out)
    return rules


def _leaves(checkpoint: Checkpoint, dtype: np.dtype) -> list[Leaf]:
    """Every leaf of the parameters, with the rules that fill it."""
    of_leaf: dict[Path, list[TensorRule]] = {}
    for rule in verified_rules(checkpoint):
        of_leaf.setdefault(rule.path, []).append(rule)
    abstract = jax.tree_util.tree_leaves_with_path(param_shapes(checkpoint.config))
    shapes = {tuple(str(key.key) for key in path): leaf.shape for path, leaf in abstract}
    assert of_leaf.keys() == shapes.keys(), f"rules that miss {of_leaf.keys() ^ shapes.keys()}"
    return [Leaf(path, shapes[path], dtype, tuple(of_leaf[path]), checkpoint.tensors) for path in shapes]


def mismatches(checkpoint: Checkpoint, rules: Sequence[TensorRule]) -> list[str]:
    """What keeps a checkpoint from being loaded, a sentence for each kind, with the tensors' names."""
    infos = checkpoint.tensors.infos
    wanted = {rule.name: rule.shape for rule in rules}
    found = {
        "missing": [f"{name} {list(shape)}" for name, shape in wanted.items() if name not in infos],
        "not of this model": [
            f"{name} (differs from {EMBEDDING}, to which it is tied)" if name == HEAD else name
            for name in infos
            if name not in wanted and not _tolerated(checkpoint, name)
        ],
        "wrongly shaped": [
            f"{name} is {list(infos[name].shape)} and should be {list(shape)}"
            for name, shape in wanted.items()
            if name in infos and infos[name].shape != shape
        ],
        "of a type that cannot be read": [
            f"{name} ({infos[name].dtype})" for name in wanted if name in infos and infos[name].dtype not in _READABLE
        ],
    }
    return [f"{kind}: {_listed(names)}" for kind, names in found.items() if names]


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more


def _tolerated(checkpoint: Checkpoint, name: str) -> bool:
    """Tensors that a model does not need and that many checkpoints carry: tables of rotary frequencies, the layers
    that predict several tokens ahead, and a second copy of the embedding where the head is tied to it."""
    if re.fullmatch(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq", name):
        return True
    if layer := re.match(r"model\.layers\.(\d+)\.", name):
        layers = checkpoint.config_json.get("num_hidden_layers", 0)
        return layers <= int(layer[1]) < layers + (checkpoint.config_json.get("num_nextn_predict_layers") or 0)
    return name == HEAD and _copies(checkpoint.tensors, HEAD, EMBEDDING)


def _copies(source: TensorSource, name: str, other: str) -> bool:
    """Whether two tensors hold the same numbers."""
    if other not in source.infos or source.infos[name].shape != source.infos[other].shape:
        return False
    if not {source.infos[each].dtype for each in (name, other)} <= set(_READABLE):
        return False
    blocks = _blocks(source, name, slice(0, source.infos[name].shape[0]))
    same = all(np.array_equal(source.rows(name, *block), source.rows(other, *block)) for block in blocks)
    source.release(name)
    source.release(other)
    return same


def _blocks(source: TensorSource, name: str, rows: slice) -> Iterator[tuple[int, int]]:
    """`rows` of a tensor in blocks of a few megabytes, [start, stop) each."""
    height = max(1, _BLOCK_BYTES // max(1, 4 * math.prod(source.infos[name].shape[1:])))
    return ((start, min(start + height, rows.stop)) for start in range(rows.start, rows.stop, height))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
