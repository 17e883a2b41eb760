"""From logits to the distribution that a token is drawn from, and the draw itself.

The log-probability reported for a token is that of the distribution it was really drawn from: temperature, top-k,
top-p and min-p applied, then renormalised. Trainers that score with other logits than the sampler drew from get an
importance ratio that is wrong before any update.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from schemas.records import SamplingRecord


def sampling_logprobs(logits: jax.Array, sampling: SamplingRecord) -> jax.Array:
    """Log-probabilities [..., V], nats, float32; -inf where the support is truncated.

    In this order, each over the tokens that the one before kept: temperature; top-k (the k most likely, ties at the
    k-th kept); top-p (Holtzman et al. 2020: the smallest set of most likely tokens whose probabilities sum to at least
    p; never empty); min-p (Nguyen et al. 2024: at least min_p times the most likely).
    """
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32) / sampling.temperature)
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        logprobs = _keep(logprobs, logprobs >= jax.lax.top_k(logprobs, sampling.top_k)[0][..., -1:])
    if sampling.top_p < 1.0:
        descending = -jnp.sort(-logprobs)
        before = jnp.cumsum(jnp.exp(descending), axis=-1) - jnp.exp(descending)
        least = jnp.min(jnp.where(before < sampling.top_p, descending, jnp.inf), axis=-1, keepdims=True)
        logprobs = _keep(logprobs, logprobs >= least)
    if sampling.min_p > 0.0:
        logprobs = _keep(logprobs, logprobs >= jnp.max(logprobs, axis=-1, keepdims=True) + jnp.log(sampling.min_p))
    return logprobs


def _keep(logprobs: jax.Array, kept: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(jnp.where(kept, logprobs, -jnp.inf))


def draw(logprobs: jax.Array, seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """One token of each row, int32 [B].

    Args:
      logprobs: [B, V].
      seeds: uint32 [B, 2], each row's own key, derived from the trajectory's identity.
      positions: int32 [B], the index that the token will have in its trajectory. With the seed it names the draw, so
        that a token depends neither on the other rows of the batch nor on how often anything was tried.
    """

    def one(row, seed, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.categorical(key, row)

    return jax.vmap(one)(logprobs, seeds, positions).astype(jnp.int32)
