"""The three ways a decoder is run: prefill of shared prompts, extension by a chunk, and packed training rows.

A prompt is run without its last token, once a group; the last prompt token is then the first input of every sample's
own branch. So branches need nothing of the prompt but its keys and values, in sampling and in training alike.

Left out: caches that forget what a sliding window no longer sees.
"""

from __future__ import annotations

from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_core.models.attention import Keys, attend
from jax_core.models.config import AttentionConfig, ModelConfig, windows
from jax_core.models.decoder import Decoder
from jax_core.models.experts import Load, Routing, load_of
from jax_core.models.stacks import slot_blocks

Array = TypeVar("Array")  # np.ndarray on the host, jax.Array inside a compiled function


class KeyValues(NamedTuple):
    """Keys and values of one slot's layers. S = columns of each of N rows."""

    k: jax.Array  # [layers, N, S, K, h]
    v: jax.Array  # [layers, N, S, K, w]


Layers = tuple[KeyValues, ...]  # one a slot


class Prefix(NamedTuple):
    """Keys and values of prompts without their last token."""

    layers: Layers  # columns are positions
    lengths: jax.Array  # int32 [N]

    @property
    def shape(self) -> tuple[int, int]:
        """N prompts, of Tp columns."""
        return self.layers[0].k.shape[1:3]  # type: ignore[return-value]


class Cache(NamedTuple, Generic[Array]):
    """Keys and values that each row has of its own. A column is one call's slot, the same for all rows.

    The valid columns of a row hold its tokens in order, from the end of its prefix on.
    """

    layers: Layers
    valid: Array  # bool [B, S]


Masks = dict[int | None, jax.Array]  # bool [.., T, S] of each window


def empty_cache(config: ModelConfig, rows: int, columns: int, dtype: str | None = None) -> Cache[np.ndarray]:
    """A cache in which no column is valid; `dtype` is the compute dtype unless it is given."""

    def zeros(layers: int, shape: tuple[int, int]) -> jax.Array:
        return jnp.zeros((layers, rows, columns, *shape), dtype or config.compute_dtype)

    attentions = [(block.attention, layers) for block, layers in slot_blocks(config)]
    slots = tuple(KeyValues(zeros(n, a.key_shape), zeros(n, a.value_shape)) for a, n in attentions)
    return Cache(slots, np.zeros((rows, columns), bool))


def take_rows(layers: Layers, rows: np.ndarray) -> Layers:
    return jax.tree.map(lambda a: a[:, rows], layers)


def widen(layers: Layers, columns: int) -> Layers:
    """The same with so many empty columns more."""
    return jax.tree.map(lambda a: jnp.pad(a, [(0, 0), (0, 0), (0, columns), (0, 0), (0, 0)]), layers)


def write(layers: Layers, new: Layers, column: jax.Array) -> Layers:
    """`new` keys and values in the columns from `column` on."""
    return jax.tree.map(lambda a, b: jax.lax.dynamic_update_slice(a, b, (0, 0, column, 0, 0)), layers, new)


def causal(length: int) -> jax.Array:
    return jnp.tril(jnp.ones((length, length), bool))


def prefix_mask(lengths: jax.Array, padded: int) -> jax.Array:
    """bool [N, 1, Tp]: every branch token may look at all of its prompt."""
    return (jnp.arange(padded)[None] < lengths[:, None])[:, None]


def _windowed(config: ModelConfig, mask: jax.Array, queries: jax.Array, keys: jax.Array) -> Masks:
    """`mask` [B or N or 1, .., S] for each window in the model, by positions of queries [B, T] and keys [B or 1, S]."""
    masks: Masks = {}
    for window in windows(config.blocks):
        if window is None:
            masks[window] = mask
            continue
        near = queries[:, :, None] - keys[:, None, :] < window
        masks[window] = near & (mask if mask.shape[0] == 1 else jnp.repeat(mask, len(near) // len(mask), axis=0))
    return masks


def _look(attention: AttentionConfig, places: list[tuple[jax.Array, jax.Array, Masks]], q: jax.Array) -> jax.Array:
    keys = [Keys(k, v, masks[attention.window]) for k, v, masks in places]
    return attend(q, keys, attention.scale, attention.soft_cap)


def prefill(model: Decoder, prompts: jax.Array, lengths: jax.Array) -> Prefix:
    """Runs prompts [N, Tp] (right-padded; `lengths` tokens of each are real) and keeps their keys and values."""
    n, length = prompts.shape
    positions = jnp.broadcast_to(jnp.arange(length), (n, length))
    masks = _windowed(model.config, causal(length)[None], positions[:1], positions[:1])

    def step(x, block, _):
        out = block(x, positions, lambda q, k, v: _look(block.config.attention, [(k, v, masks)], q))
        return out.x, KeyValues(out.k, out.v)

    _, layers = model.run_blocks(step, model.embed(prompts))
    return Prefix(layers, lengths)


def extend(
    model: Decoder, prefix: Prefix, cache: Cache[jax.Array], tokens: jax.Array, positions: jax.Array, valid: jax.Array
) -> tuple[jax.Array, Layers]:
    """Runs one chunk of every row, after its prefix and its cache.

    Args:
      tokens, positions, valid: [B, C]; invalid tokens are looked at by nobody.

    Returns:
      hidden [B, C, D], and the chunk's keys and values for the caller to put into the cache.
    """
    prompts, padded = prefix.shape
    rows, chunk = tokens.shape
    masked = partial(_windowed, model.config)
    prompt_ends = jnp.repeat(prefix.lengths, rows // prompts)[:, None]
    cached_positions = prompt_ends + jnp.cumsum(cache.valid, axis=1) - 1
    shared_masks = masked(prefix_mask(prefix.lengths, padded), positions, jnp.arange(padded)[None])
    cache_masks = masked(cache.valid[:, None, :], positions, cached_positions)
    own_masks = masked(causal(chunk)[None] & valid[:, None, :], positions, positions)

    def step(x, block, layer):
        shared, cached = layer

        def attend_all(q, k, v):
            places = [(shared.k, shared.v, shared_masks), (cached.k, cached.v, cache_masks), (k, v, own_masks)]
            return _look(block.config.attention, places, q)

        out = block(x, positions, attend_all)
        return out.x, KeyValues(out.k, out.v)

    return model.run_blocks(step, model.embed(tokens), tuple(zip(prefix.layers, cache.layers, strict=True)))


def packed(
    model: Decoder,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    row_prompt: jax.Array,
    tokens: jax.Array,
    segments: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """Hidden states [B, L, D] of packed rows, whose prompts are computed once each.

    Args:
      prompts: int32 [P, Tp], without their last tokens, right-padded; `prompt_lengths` [P] of each are real.
      row_prompt: int32 [B], the prompt that all branches of a row continue.
      tokens: int32 [B, L]; segments: int32 [B, L], 0 is padding, equal numbers are one branch; positions [B, L].
    """
    return packed_with_loads(model, prompts, prompt_lengths, row_prompt, tokens, segments, positions)[0]


def packed_with_loads(
    model: Decoder,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    row_prompt: jax.Array,
    tokens: jax.Array,
    segments: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, tuple[Load, ...]]:
    """As `packed`, and what the routers did with the real tokens: of each slot with experts, stacked over its layers."""
    p, padded = prompts.shape
    length = tokens.shape[1]
    prompt_positions = jnp.broadcast_to(jnp.arange(padded), (p, padded))
    shared_mask = jnp.broadcast_to(prefix_mask(prompt_lengths, padded)[row_prompt], (len(tokens), length, padded))
    own_mask = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, None, :] & causal(length)[None]
    key_positions = jnp.concatenate([prompt_positions[row_prompt], positions], axis=1)
    masks = _windowed(model.config, jnp.concatenate([shared_mask, own_mask], axis=-1), positions, key_positions)
    prompt_masks = _windowed(model.config, causal(padded)[None], prompt_positions[:1], prompt_positions[:1])
    prompt_real = prompt_positions < prompt_lengths[:, None]

    def step(carry, block, _):
        prompt_x, x = carry
        look = partial(_look, block.config.attention)
        prompt = block(prompt_x, prompt_positions, lambda q, k, v: look([(k, v, prompt_masks)], q))

        def after_prompt(q, k, v):
            k = jnp.concatenate([prompt.k[row_prompt], k], axis=1)
            v = jnp.concatenate([prompt.v[row_prompt], v], axis=1)
            return look([(k, v, masks)], q)

        branches = block(x, positions, after_prompt)
        parts = [(prompt.routing, prompt_real), (branches.routing, segments > 0)]
        return (prompt.x, branches.x), _load(parts)

    (_, hidden), loads = model.run_blocks(step, (model.embed(prompts), model.embed(tokens)))
    return hidden, tuple(load for load in loads if load is not None)


def _load(parts: list[tuple[Routing | None, jax.Array]]) -> Load | None:
    loads = [load_of(routing, mask) for routing, mask in parts if routing is not None]
    return jax.tree.map(lambda *sums: sum(sums), *loads) if loads else None
