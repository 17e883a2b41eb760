"""A Llama-family decoder in Flax NNX: grouped-query attention, RoPE, RMSNorm, SwiGLU, tied or untied head.

The layers' weights are stacked and run by one `lax.scan`, so compile time does not grow with depth. A block does not
know where its keys live: the caller gives each layer an `attend` function. So prefill, decoding and packed training
are one model, and cannot drift apart (a drift would show as an importance ratio other than 1).

Left out: dropout, biases, sliding windows, mixture of experts, dtypes other than float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_core.models.attention import rotate
from jax_core.models.config import ModelConfig

Params = dict[str, Any]  # nested dict of float32 arrays
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # q [B,T,H,h], k, v [B,T,K,h] -> [B,T,H,h]

_EMBEDDING_STD = 0.02
_UNROLLED_LAYERS = 4


class RMSNorm(nnx.Module):
    """x / rms(x) * scale (Zhang and Sennrich 2019), computed in float32."""

    def __init__(self, width: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        rms = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        return (x32 * rms * self.scale[...]).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, heads, kv_heads, h = config.width, config.heads, config.kv_heads, config.head_width
        self.config = config
        self.q = _linear(rngs, d, heads * h)
        self.k = _linear(rngs, d, kv_heads * h)
        self.v = _linear(rngs, d, kv_heads * h)
        self.out = _linear(rngs, heads * h, d)

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend) -> tuple[jax.Array, jax.Array, jax.Array]:
        b, t, _ = x.shape
        c = self.config
        q = rotate((x @ self.q[...]).reshape(b, t, c.heads, c.head_width), positions, c.rope_theta)
        k = rotate((x @ self.k[...]).reshape(b, t, c.kv_heads, c.head_width), positions, c.rope_theta)
        v = (x @ self.v[...]).reshape(b, t, c.kv_heads, c.head_width)
        mixed = attend(q, k, v).reshape(b, t, c.heads * c.head_width)
        return mixed @ self.out[...], k, v


class SwiGLU(nnx.Module):
    """silu(x W_gate) * (x W_up) W_down (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.gate = _linear(rngs, config.width, config.mlp_width)
        self.up = _linear(rngs, config.width, config.mlp_width)
        self.down = _linear(rngs, config.mlp_width, config.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return (jax.nn.silu(x @ self.gate[...]) * (x @ self.up[...])) @ self.down[...]


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.width, config.norm_epsilon)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.width, config.norm_epsilon)
        self.mlp = SwiGLU(config, rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, T, D] -> (x [B, T, D], keys [B, T, K, h] rotated, values [B, T, K, h])."""
        mixed, k, v = self.attention(self.attention_norm(x), positions, attend)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), k, v


class Decoder(nnx.Module):
    """The whole model. `blocks` holds every layer's weights, stacked on a leading axis [layers, ...]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.width)
        self.config = config
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * _EMBEDDING_STD)
        self.blocks = _stacked_blocks(config, rngs)
        self.final_norm = RMSNorm(config.width, config.norm_epsilon)
        self.head = None if config.tied_head else _linear(rngs, config.width, config.vocab_size)

    def embed(self, tokens: jax.Array) -> jax.Array:
        return self.embedding[...][tokens]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., D] after the last block -> float32 logits [..., V]."""
        normed = self.final_norm(hidden)
        head = self.embedding[...].T if self.head is None else self.head[...]
        return (normed @ head).astype(jnp.float32)

    def scan_blocks(self, step: Callable[[Any, Block, Any], tuple[Any, Any]], carry: Any, per_layer: Any = None):
        """Runs `step(carry, block, layer's slice of per_layer) -> (carry, out)` over the layers, as `lax.scan` does."""
        graph, weights = nnx.split(self.blocks)

        def body(carry, xs):
            layer_weights, layer_input = xs
            return step(carry, nnx.merge(graph, layer_weights), layer_input)

        # Unrolled, a shallow model runs faster (a third of an update, on CPU); a deep one would compile for minutes.
        unroll = self.config.layers <= _UNROLLED_LAYERS
        return jax.lax.scan(body, carry, (weights, per_layer), unroll=unroll)


def _linear(rngs: nnx.Rngs, rows: int, columns: int) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), (rows, columns), jnp.float32) * rows**-0.5)


def _stacked_blocks(config: ModelConfig, rngs: nnx.Rngs) -> Block:
    @nnx.split_rngs(splits=config.layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs)

    return create(rngs)


def init_params(config: ModelConfig, seed: int) -> Params:
    """Random weights, a pure function of the configuration and the seed."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, nnx.Rngs(params=seed)), nnx.Param))


@lru_cache(maxsize=16)
def _abstract(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(params=0))), nnx.Param)  # type: ignore[return-value]


def bind(config: ModelConfig, params: Params) -> Decoder:
    """A Decoder that computes with `params`; cheap, for use inside compiled functions."""
    graph, state = _abstract(config)
    state = jax.tree.map(lambda leaf: leaf, state)  # a copy: replacing in the cached one would leak tracers
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)
