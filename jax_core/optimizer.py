"""AdamW with a learning rate that is a pure function of the training step, so that a resume cannot shift it.

Updates are computed in float32, whatever parameters and moments are kept in. A bfloat16 has eight significant bits, and
an update is often a thousandth of a weight, as the second moment's is of it by beta2 = 0.999: rounded to the nearest it
would be lost at every step. So it is rounded up or down at random, in proportion, and is there on average (stochastic
rounding: Gupta et al. 2015).

Left out: a float32 copy of bfloat16 parameters.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_core.models.decoder import Params
from schemas.recipe import OptimizerSection


def learning_rate(section: OptimizerSection, step: int, steps: int) -> float:
    """Learning rate of training step `step` (from 0) of `steps`.

    The first warm-up step already has learning_rate / warmup_steps (a first step at 0 would train nothing), the first
    step after the warm-up has the peak, and the last step of the run has exactly peak * final_fraction.
    """
    if step < section.warmup_steps:
        return section.learning_rate * (step + 1) / section.warmup_steps
    progress = (step - section.warmup_steps) / max(1, steps - 1 - section.warmup_steps)
    final = section.learning_rate * section.final_fraction
    if section.schedule == "linear":
        return section.learning_rate + (final - section.learning_rate) * progress
    if section.schedule == "cosine":
        return final + (section.learning_rate - final) * (1 + math.cos(math.pi * progress)) / 2
    return section.learning_rate


def make_optimizer(section: OptimizerSection) -> optax.GradientTransformation:
    """Clip by global norm, Adam (Kingma and Ba 2015), decoupled weight decay on matrices (Loshchilov and Hutter 2019).

    Its updates are ascent directions of size 1: the caller multiplies them by minus the learning rate.
    """
    return optax.chain(
        optax.clip_by_global_norm(section.clip_norm),
        _adam(section),
        optax.add_decayed_weights(section.weight_decay, mask=_is_matrix),
    )


def _adam(section: OptimizerSection) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(b1=section.beta1, b2=section.beta2, eps=section.epsilon)
    if section.moments_dtype == "float32":
        return adam

    def moments_in(dtype: Any, state: Any) -> Any:
        return state._replace(mu=optax.tree.cast(state.mu, dtype), nu=optax.tree.cast(state.nu, dtype))

    def init(params: Params) -> Any:
        return moments_in(jnp.bfloat16, adam.init(params))

    def update(gradient: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        updates, new = adam.update(gradient, moments_in(jnp.float32, state), params)
        leaves, structure = jax.tree.flatten((new.mu, new.nu))
        keys = _rounding_keys(state.count, len(leaves), first=len(leaves) // 2)  # those before are the weights'
        mu, nu = jax.tree.unflatten(structure, map(stochastic_bfloat16, leaves, keys))
        return updates, new._replace(mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)


def init_optimizer(section: OptimizerSection, params: Params) -> Any:
    """The optimizer's state before any update."""
    return make_optimizer(section).init(zeros(params))


def zeros(params: Params) -> Params:
    """float32 zeros in the shapes of `params`: where gradients are summed."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)


def moved(params: Params, updates: Params, rate: float | jax.Array, count: jax.Array) -> Params:
    """params - rate * updates, in the dtype of `params`.

    Args:
      updates: float32.
      count: of updates so far, int32: what random rounding is drawn from, so that a repeated step rounds alike.
    """
    leaves, structure = jax.tree.flatten(params)
    exact = [leaf - rate * update for leaf, update in zip(leaves, jax.tree.leaves(updates), strict=True)]
    keys = _rounding_keys(count, len(leaves))
    rounded = [
        stochastic_bfloat16(new, key) if old.dtype == jnp.bfloat16 else new
        for old, new, key in zip(leaves, exact, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, rounded)


def _rounding_keys(count: jax.Array, leaves: int, first: int = 0) -> list[jax.Array]:
    """What the roundings of leaves `first`, `first` + 1, ... are drawn from, after `count` updates."""
    return [jax.random.fold_in(jax.random.key(i), count) for i in range(first, first + leaves)]


def stochastic_bfloat16(values: jax.Array, key: jax.Array) -> jax.Array:
    """float32 rounded to one of the two nearest bfloat16, with the probabilities that make its mean the value itself.

    A bfloat16 is the upper half of a float32: a random lower half is added, and what is then below is cut off. Values
    must be finite.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    bits += jax.random.bits(key, values.shape, jnp.uint16)
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def _is_matrix(params: Params) -> Params:
    # By name: norms' scales and biases are stacked over layers, so their number of axes says nothing.
    return jax.tree_util.tree_map_with_path(lambda path, _: not path[-1].key.endswith(("scale", "bias")), params)
