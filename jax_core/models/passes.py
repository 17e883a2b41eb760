"""The three ways a decoder is run: prefill of shared prompts, extension by a chunk, and packed training rows.

A prompt is run without its last token, once a group; the last prompt token is then the first input of every sample's
own branch. So branches need nothing of the prompt but its keys and values, in sampling and in training alike.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jax_core.models.attention import Keys, attend
from jax_core.models.decoder import Decoder

Array = TypeVar("Array")  # np.ndarray on the host, jax.Array inside a compiled function


class Prefix(NamedTuple):
    """Keys and values of prompts without their last token. Tp = padded length."""

    k: jax.Array  # [layers, N, Tp, K, h]
    v: jax.Array  # [layers, N, Tp, K, h]
    lengths: jax.Array  # int32 [N]


class Cache(NamedTuple, Generic[Array]):
    """Keys and values that each row has of its own. A column is one call's slot, the same for all rows."""

    k: jax.Array  # [layers, B, S, K, h]
    v: jax.Array  # [layers, B, S, K, h]
    valid: Array  # bool [B, S]


def causal(length: int) -> jax.Array:
    return jnp.tril(jnp.ones((length, length), bool))


def prefill(model: Decoder, prompts: jax.Array, lengths: jax.Array) -> Prefix:
    """Runs prompts [N, Tp] (right-padded; `lengths` tokens of each are real) and keeps their keys and values."""
    n, length = prompts.shape
    positions = jnp.broadcast_to(jnp.arange(length), (n, length))

    def step(x, block, _):
        x, k, v = block(x, positions, lambda q, k, v: attend(q, [Keys(k, v, causal(length)[None])]))
        return x, (k, v)

    _, (k, v) = model.scan_blocks(step, model.embed(prompts))
    return Prefix(k, v, lengths)


def prefix_mask(lengths: jax.Array, padded: int) -> jax.Array:
    """bool [N, 1, Tp]: every branch token may look at all of its prompt."""
    return (jnp.arange(padded)[None] < lengths[:, None])[:, None]


def extend(
    model: Decoder, prefix: Prefix, cache: Cache[jax.Array], tokens: jax.Array, positions: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs one chunk of every row, after its prefix and its cache.

    Args:
      tokens, positions, valid: [B, C]; invalid tokens are looked at by nobody.

    Returns:
      hidden [B, C, D], and the chunk's keys and values [layers, B, C, K, h] for the caller to put into the cache.
    """
    chunk = tokens.shape[1]
    own_mask = causal(chunk)[None] & valid[:, None, :]
    shared_mask = prefix_mask(prefix.lengths, prefix.k.shape[2])
    cache_mask = cache.valid[:, None, :]

    def step(x, block, layer):
        prefix_k, prefix_v, cache_k, cache_v = layer

        def attend_all(q, k, v):
            places = [
                Keys(prefix_k, prefix_v, shared_mask),
                Keys(cache_k, cache_v, cache_mask),
                Keys(k, v, own_mask),
            ]
            return attend(q, places)

        x, k, v = block(x, positions, attend_all)
        return x, (k, v)

    hidden, (k, v) = model.scan_blocks(step, model.embed(tokens), (prefix.k, prefix.v, cache.k, cache.v))
    return hidden, k, v


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
    p, padded = prompts.shape
    length = tokens.shape[1]
    prompt_positions = jnp.broadcast_to(jnp.arange(padded), (p, padded))
    shared_mask = jnp.broadcast_to(prefix_mask(prompt_lengths, padded)[row_prompt], (len(tokens), length, padded))
    own_mask = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, None, :] & causal(length)[None]
    mask = jnp.concatenate([shared_mask, own_mask], axis=-1)

    def step(carry, block, _):
        prompt_x, x = carry
        prompt_x, prompt_k, prompt_v = block(
            prompt_x, prompt_positions, lambda q, k, v: attend(q, [Keys(k, v, causal(padded)[None])])
        )

        def after_prompt(q, k, v):
            k = jnp.concatenate([prompt_k[row_prompt], k], axis=1)
            v = jnp.concatenate([prompt_v[row_prompt], v], axis=1)
            return attend(q, [Keys(k, v, mask)])

        x, _, _ = block(x, positions, after_prompt)
        return (prompt_x, x), None

    (_, hidden), _ = model.scan_blocks(step, (model.embed(prompts), model.embed(tokens)))
    return hidden
