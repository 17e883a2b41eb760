"""Low-rank adapters (LoRA, Hu et al. 2021): what is trained, stored and published in the place of all weights.

Adapters are a nested dict like `Params`, of some of its leaves only. In the place of a weight W [.., in, out] stands

    {"a": [.., in, r], "b": [.., r, out]}

stacked on leading axes (layers, experts) as the weight is. The model computes with W + alpha / r * a @ b (equation 3,
transposed as our weights are), merged before the forward pass, in sampling and in training alike. So both compute the
same numbers from the same bits, and an on-policy importance ratio is 1; x @ a @ b beside x @ W would be a third faster
in the backward pass, and would differ from what the sampler used in the last bits.

Full fine-tuning is the same code path: there the base is None, and what is trained is the model.

Left out: dropout (it would make the sampler's policy another one than the trainer's), adapters of different ranks, and
adapters of embeddings and norms.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_core.models.decoder import Params
from schemas.errors import UserError
from schemas.identity import seed_int
from schemas.recipe import LoraSection

Adapters = Mapping[str, Any]  # nested, ending in {"a": .., "b": ..}


def full_weights(base: Params | None, trained: Params, alpha: float) -> Params:
    """The weights that the model computes with: `trained` itself, or `base` with `trained` merged as adapters."""
    return trained if base is None else merge_lora(base, trained, alpha)


def merge_lora(params: Params, adapters: Adapters, alpha: float) -> Params:
    """`params` with W + alpha / r * a @ b for each adapted W, computed in float32; other leaves are the same arrays."""
    merged = dict(params)
    for name, part in adapters.items():
        merged[name] = _adapted(params[name], part, alpha) if is_pair(part) else merge_lora(params[name], part, alpha)
    return merged


def _adapted(weight: Any, pair: Mapping[str, Any], alpha: float) -> Any:
    rank = pair["a"].shape[-1]
    a, b = (jnp.asarray(pair[name], jnp.float32) for name in ("a", "b"))
    return (weight + alpha / rank * (a @ b)).astype(weight.dtype)


# Compiled, so that merging is one pass over the weights; donating would free a base that others use.
merge = functools.partial(jax.jit, static_argnums=2)(merge_lora)


def is_pair(part: Mapping[str, Any]) -> bool:
    return part.keys() == {"a", "b"} and not any(isinstance(array, Mapping) for array in part.values())


def adapted_paths(adapters: Adapters, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path of the weight, its pair) of every adapted weight."""
    for name, part in adapters.items():
        if is_pair(part):
            yield (*prefix, name), part
        else:
            yield from adapted_paths(part, (*prefix, name))


def init_adapters(params: Params, section: LoraSection, seed: int) -> dict[str, Any]:
    """Adapters that change nothing yet: a is normal with variance 1 / in, b is 0. A pure function of its arguments.

    Args:
      params: the base; only paths and shapes are read.

    Raises:
      UserError: a pattern of `section.targets` names no matrix of the model.
    """
    adapters: dict[str, Any] = {}
    for path, shape in adapted_matrices(params, section.targets).items():
        *parents, name = path.split("/")
        place = functools.reduce(lambda inner, parent: inner.setdefault(parent, {}), parents, adapters)
        place[name] = _new_pair(shape, section.rank, seed_int("lora", seed, path))
    return adapters


def adapted_matrices(params: Params, targets: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrices that `targets` name, by their paths ("blocks/attention/q"), in order.

    Raises:
      UserError: as `init_adapters` says.
    """
    matrices = dict(sorted(_matrices(params)))
    for pattern in targets:
        if not any(_names(pattern, path) for path in matrices):
            known = ", ".join(sorted({"/".join(path.split("/")[-2:]) for path in matrices}))
            raise UserError(
                f"lora.targets: {pattern!r}", "names no matrix of this model.", f"Its matrices end in: {known}."
            )
    return {path: shape for path, shape in matrices.items() if any(_names(pattern, path) for pattern in targets)}


def _names(pattern: str, path: str) -> bool:
    # Routers choose; a pattern for matrices in general does not mean them.
    return fnmatchcase(path, pattern) and (not path.endswith("/router") or pattern.endswith("router"))


def _new_pair(shape: tuple[int, ...], rank: int, seed: int) -> dict[str, jax.Array]:
    *stacked, rows, columns = shape
    a = jax.random.normal(jax.random.key(seed % 2**63), (*stacked, rows, rank), jnp.float32) * rows**-0.5
    return {"a": a, "b": jnp.zeros((*stacked, rank, columns), jnp.float32)}


def _matrices(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    """(path, shape) of every weight of a block that multiplies activations from the right."""
    for name, part in params.items():
        path = f"{prefix}/{name}" if prefix else name
        if isinstance(part, Mapping):
            yield from _matrices(part, path)
        elif "/" in path and np.ndim(part) >= 3:  # blocks are stacked on layers: a vector of theirs has two axes
            yield path, tuple(np.shape(part))
