"""Attention over keys that lie in several places, as one softmax.

A token of a branch attends to its group's prompt (computed once a group), to what its own row has cached, and to its
own chunk. Keeping these as parts, rather than copying them into one array, is what makes the prompt shared.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Finite, so that a row with nothing to attend to (padding) gets a uniform, finite, ignored result. With -inf its
# softmax would be NaN, and 0 * NaN in the backward pass would poison every gradient.
_MASKED = -1e30


class Keys(NamedTuple):
    """One place to attend to. Its batch N may divide the queries' batch B: B // N consecutive rows share it."""

    k: jax.Array  # [N, S, K, h], rotated
    v: jax.Array  # [N, S, K, w]
    mask: jax.Array  # bool [B or N or 1, T or 1, S]: True where a query may look


def attend(q: jax.Array, places: list[Keys], scale: float, soft_cap: float | None = None) -> jax.Array:
    """Scaled dot-product attention of q [B, T, H, h] over all `places` at once -> [B, T, H, w].

    Query head i uses key head i // (H // K) (grouped-query attention, Ainslie et al. 2023). Softmax in float32.
    """
    scores = [_scores(q, place, scale, soft_cap) for place in places]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    ends = list(accumulate(s.shape[-1] for s in scores))
    parts = jnp.split(weights, ends[:-1], axis=-1)
    mixed = [_mix(part, place.v) for part, place in zip(parts, places, strict=True)]
    return sum(mixed[1:], start=mixed[0])


def _scores(q: jax.Array, place: Keys, scale: float, soft_cap: float | None) -> jax.Array:
    """Masked scores [B, K, R, T, S], R = H // K query heads a key head."""
    b, t, heads, width = q.shape
    n, s, kv_heads, _ = place.k.shape
    grouped = q.reshape(n, b // n, t, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("ngtkrh,nskh->ngkrts", grouped, place.k, preferred_element_type=jnp.float32)
    scores = scores.reshape(b, kv_heads, heads // kv_heads, t, s) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    mask = place.mask
    if mask.shape[0] not in (1, b):
        mask = jnp.repeat(mask, b // mask.shape[0], axis=0)
    return jnp.where(mask[:, None, None], scores, _MASKED)


def _mix(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Weighted values [B, T, H, w] of weights [B, K, R, T, S] and v [N, S, K, w]."""
    b, kv_heads, repeats, t, s = weights.shape
    n, width = v.shape[0], v.shape[-1]
    grouped = weights.astype(v.dtype).reshape(n, b // n, kv_heads, repeats, t, s)
    return jnp.einsum("ngkrts,nskh->ngtkrh", grouped, v).reshape(b, t, kv_heads * repeats, width)
