"""The small parts that blocks are made of: norms, linear maps, gated MLPs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jax_core.models.config import Activation, MlpConfig, ModelConfig

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
}


class RMSNorm(nnx.Module):
    """x / rms(x) * (offset + scale) (Zhang and Sennrich 2019), computed in float32."""

    def __init__(self, model: ModelConfig, width: int, epsilon: float | None = None):
        self.scale = vector(model, width, 1.0 - model.norm_offset)
        self.offset = model.norm_offset
        self.epsilon = model.norm_epsilon if epsilon is None else epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...].astype(jnp.float32)
        scale = scale + self.offset if self.offset else scale
        return (rms_normalize(x.astype(jnp.float32), self.epsilon) * scale).astype(x.dtype)


class Mlp(nnx.Module):
    """activation(x W_gate) * (x W_up) W_down (Shazeer 2020)."""

    def __init__(self, model: ModelConfig, config: MlpConfig, rngs: nnx.Rngs):
        d, f = model.width, config.width
        self.activation = config.activation
        self.gate = matrix(rngs, model, d, f)
        self.up = matrix(rngs, model, d, f)
        self.down = matrix(rngs, model, f, d)
        self.gate_bias = vector(model, f, 0.0) if config.bias else None
        self.up_bias = vector(model, f, 0.0) if config.bias else None
        self.down_bias = vector(model, d, 0.0) if config.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = ACTIVATIONS[self.activation](linear(x, self.gate[...], self.gate_bias))
        return linear(gate * linear(x, self.up[...], self.up_bias), self.down[...], self.down_bias)


def rms_normalize(x: jax.Array, epsilon: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)


def linear(x: jax.Array, weight: jax.Array, bias: nnx.Param | None = None) -> jax.Array:
    return x @ weight if bias is None else x @ weight + bias[...]


def matrix(rngs: nnx.Rngs, model: ModelConfig, rows: int, columns: int, leading: tuple[int, ...] = ()) -> nnx.Param:
    """A random matrix [*leading, rows, columns] that keeps the variance of what it is applied to."""
    drawn = jax.random.normal(rngs.params(), (*leading, rows, columns), jnp.float32) * rows**-0.5
    return nnx.Param(drawn.astype(model.parameters_dtype))


def vector(model: ModelConfig, width: int, value: float) -> nnx.Param:
    return nnx.Param(jnp.full((width,), value, model.parameters_dtype))
