"""Where each tensor of a Hugging Face checkpoint goes in the parameters.

A family has a table of names; the rest follows from the parameters' shapes: a leaf of two or more axes is a matrix, and
checkpoints hold matrices as [.., out, in].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jax_core.models.config import ModelConfig
from jax_core.models.decoder import param_shapes
from jax_core.models.stacks import layer_places


@dataclass(frozen=True)
class TensorRule:
    """One tensor of a Hugging Face checkpoint, or a part of one, and its place in the parameters."""

    name: str  # "model.layers.3.self_attn.q_proj.weight"
    shape: tuple[int, ...]  # of the checkpoint's whole tensor
    path: tuple[str, ...]  # leaf of Params, e.g. ("blocks", "attention", "q")
    index: tuple[int, ...] = ()  # where in the leaf's leading stacked axes it goes; () is the whole leaf
    transpose: bool = False  # swap the last two axes: checkpoint [.., out, in] -> ours [.., in, out]
    part: tuple[int, int, int] | None = None  # (axis, start, stop) of the checkpoint tensor, where it holds several


@dataclass(frozen=True)
class Fused:
    """Share `part` (from 0) of `parts` equal ones of a tensor, along its output axis."""

    name: str
    part: int
    parts: int


Names = Mapping[str, str | Fused]  # "attention.q" -> "self_attn.q_proj.weight"; {expert} where each has its own

_OUTER: Names = {
    "embedding": "model.embed_tokens.weight",
    "final_norm.scale": "model.norm.weight",
    "head": "lm_head.weight",
}


def make_rules(config: ModelConfig, block_names: Names) -> tuple[TensorRule, ...]:
    """The rules of a whole model: every leaf is covered exactly once.

    Args:
      block_names: what a leaf of a block is called behind "model.layers.{layer}.".
    """
    shapes = param_shapes(config)
    rules: list[TensorRule] = []
    for path, shape in _leaves({key: tree for key, tree in shapes.items() if not key.startswith("blocks")}):
        name = _OUTER[".".join(path)]
        assert isinstance(name, str)
        rules.append(_rule(name, shape, path, (), transpose=path == ("head",)))
    for layer, place in enumerate(layer_places(config)):
        prefix = f"model.layers.{layer}."
        for path, shape in _leaves(shapes[place.slot]):
            full_path = (place.slot, *path)
            rules += _layer_rules(prefix, block_names[".".join(path)], shape[1:], full_path, place.index)
    return tuple(rules)


def _layer_rules(
    prefix: str, name: str | Fused, shape: tuple[int, ...], path: tuple[str, ...], layer: int
) -> Iterator[TensorRule]:
    is_matrix = len(shape) > 1
    if isinstance(name, Fused):
        out = shape[-1]
        whole = (*shape[:-1], out * name.parts)
        part = (len(shape) - 2, out * name.part, out * (name.part + 1))
        yield _rule(prefix + name.name, whole, path, (layer,), is_matrix, part)
    elif "{expert}" in name:
        for expert in range(shape[0]):
            yield _rule(prefix + name.format(expert=expert), shape[1:], path, (layer, expert), is_matrix)
    else:
        yield _rule(prefix + name, shape, path, (layer,), is_matrix)


def _rule(
    name: str,
    shape: tuple[int, ...],
    path: tuple[str, ...],
    index: tuple[int, ...],
    transpose: bool,
    part: tuple[int, int, int] | None = None,
) -> TensorRule:
    theirs = (*shape[:-2], shape[-1], shape[-2]) if transpose else shape
    return TensorRule(name, theirs, path, index, transpose, part)


def _leaves(tree: Any) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [(tuple(str(key.key) for key in path), tuple(leaf.shape)) for path, leaf in found]
