"""Rotary position embeddings and their scalings to longer contexts.

Left out: scalings that depend on the length of the text at hand (dynamic NTK, LongRoPE): a cached key would have to
turn again.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_core.models.config import LinearScaling, Llama3Scaling, Rope, YarnScaling, yarn_temperature


def rotate(x: jax.Array, positions: jax.Array, rope: Rope) -> jax.Array:
    """Turns the channels of x [B, T, n, h] by their frequencies times `positions` int32 [B, T], in float32."""
    inverse, scale = frequencies(rope, x.shape[-1])
    rotated = 2 * len(inverse)
    angles = positions[..., None].astype(jnp.float32) * inverse
    cos, sin = (scale * f(angles)[:, :, None] for f in (jnp.cos, jnp.sin))
    turning = x[..., :rotated].astype(jnp.float32)
    if rope.interleaved:  # scores do not change if the channels of queries and keys are permuted alike
        turning = jnp.concatenate([turning[..., 0::2], turning[..., 1::2]], axis=-1)
    low, high = jnp.split(turning, 2, axis=-1)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
    return turned if rotated == x.shape[-1] else jnp.concatenate([turned, x[..., rotated:]], axis=-1)


def frequencies(rope: Rope, head_width: int) -> tuple[np.ndarray, float]:
    """Radians a position of each pair of channels, float32 [rotated / 2], and the factor of cosine and sine."""
    rotated = int(head_width * rope.partial)
    base = head_width if rope.proportional else rotated
    inverse = rope.theta ** (-np.arange(0, 2 * (rotated // 2), 2, dtype=np.float64) / base)
    if rope.proportional:
        inverse = np.concatenate([inverse, np.zeros(head_width // 2 - len(inverse))])
    scale = 1.0
    match rope.scaling:
        case LinearScaling(factor):
            inverse = inverse / factor
        case Llama3Scaling():
            inverse = _llama3(inverse, rope.scaling)
        case YarnScaling():
            inverse, scale = _yarn(inverse, rope.theta, rotated, rope.scaling), _yarn_scale(rope.scaling)
    return inverse.astype(np.float32), scale


def _llama3(inverse: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    turns = scaling.original_positions * inverse / (2 * math.pi)
    kept = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
    kept = np.clip(kept, 0.0, 1.0)
    return (1 - kept) * inverse / scaling.factor + kept * inverse


def _yarn(inverse: np.ndarray, theta: float, rotated: int, scaling: YarnScaling) -> np.ndarray:
    def channel(turns: float) -> float:
        """The channel that turns so often within the original context (Peng et al. 2023, eq. 17)."""
        return rotated * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    width = high - low if high != low else 0.001
    kept = 1 - np.clip((np.arange(len(inverse)) - low) / width, 0.0, 1.0)
    return (1 - kept) * inverse / scaling.factor + kept * inverse


def _yarn_scale(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        over = yarn_temperature(scaling.factor, scaling.mscale_all_dim)
        return yarn_temperature(scaling.factor, scaling.mscale) / over
    return yarn_temperature(scaling.factor)
