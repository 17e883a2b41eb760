"""A decoder in Flax NNX whose families differ by configuration alone: attention, gated MLP or experts, RMS norms.

Like blocks are stacked and run by `lax.scan` (`stacks.py`), so compile time does not grow with depth. A block does not
know where its keys live: the caller gives each layer an `attend` function. So prefill, decoding and packed training
are one model, and cannot drift apart (a drift would show as an importance ratio other than 1).

Left out: dropout, encoders, images and sound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_core.models.config import AttentionConfig, BlockConfig, ModelConfig
from jax_core.models.experts import Experts, Routing
from jax_core.models.layers import Mlp, RMSNorm, linear, matrix, rms_normalize, vector
from jax_core.models.rope import rotate
from jax_core.models.stacks import slot_blocks, slot_name, stacks_of

Params = dict[str, Any]  # nested dict of arrays
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # q [B,T,H,h], k [B,T,K,h], v [B,T,K,w] -> [B,T,H,w]
Attended = tuple[jax.Array, jax.Array, jax.Array]  # output [B,T,D], keys [B,T,K,h] rotated, values [B,T,K,w]

_EMBEDDING_STD = 0.02
_UNROLLED_LAYERS = 4
# The logit of an id that stands for no token. Finite, so that probability times log-probability is 0, and not NaN.
_NEVER = -1e30
# Kept as they are stored, and computed with in float32; everything else is cast to the compute dtype.
_FLOAT32_LEAVES = frozenset({"scale", "router", "correction_bias", "router_input_scale", "expert_scale"})
_REMAT_POLICIES = {"blocks": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


class BlockOutput(NamedTuple):
    x: jax.Array  # [B, T, D]
    k: jax.Array  # [B, T, K, h] rotated
    v: jax.Array  # [B, T, K, w]
    routing: Routing | None  # of the block's experts, if it has any


class Attention(nnx.Module):
    """Grouped-query attention."""

    def __init__(self, model: ModelConfig, config: AttentionConfig, rngs: nnx.Rngs):
        c, d = config, model.width
        wide, narrow = c.heads * c.head_width, c.kv_heads * c.head_width
        self.config = config
        self.epsilon = model.norm_epsilon
        self.q = matrix(rngs, model, d, wide)
        self.k = matrix(rngs, model, d, narrow)
        self.v = None if c.keys_are_values else matrix(rngs, model, d, narrow)
        self.out = matrix(rngs, model, wide, d)
        self.q_bias = vector(model, wide, 0.0) if c.qkv_bias else None
        self.k_bias = vector(model, narrow, 0.0) if c.qkv_bias else None
        self.v_bias = vector(model, narrow, 0.0) if c.qkv_bias and not c.keys_are_values else None
        self.out_bias = vector(model, d, 0.0) if c.out_bias else None
        self.q_norm = RMSNorm(model, c.head_width) if c.qk_norm else None
        self.k_norm = RMSNorm(model, c.head_width) if c.qk_norm else None

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend) -> Attended:
        b, t, _ = x.shape
        c = self.config
        q = linear(x, self.q[...], self.q_bias).reshape(b, t, c.heads, c.head_width)
        k = linear(x, self.k[...], self.k_bias).reshape(b, t, c.kv_heads, c.head_width)
        v = k if self.v is None else linear(x, self.v[...], self.v_bias).reshape(b, t, c.kv_heads, c.head_width)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if c.value_norm:
            v = rms_normalize(v.astype(jnp.float32), self.epsilon).astype(v.dtype)
        q, k = rotate(q, positions, c.rope), rotate(k, positions, c.rope)
        mixed = attend(q, k, v).reshape(b, t, c.heads * c.head_width)
        return linear(mixed, self.out[...], self.out_bias), k, v


class LatentAttention(nnx.Module):
    """Multi-head latent attention (DeepSeek-AI 2024, section 2.1.1), the up-projections of keys and values absorbed.

    The score q . (W_uk c) is (W_uk^T q) . c, so the latent c is all that a cache keeps, and attention is that of many
    queries on one key head; mixing values is mixing latents, projected up once.
    """

    def __init__(self, model: ModelConfig, config: AttentionConfig, rngs: nnx.Rngs):
        assert config.latent is not None
        c, d, n = config.latent, model.width, config.heads
        wide = n * (c.nope_width + c.rope_width)
        down = c.kv_rank + c.rope_width
        self.config = config
        self.q = matrix(rngs, model, d, wide) if c.q_rank is None else None
        self.q_down = None if c.q_rank is None else matrix(rngs, model, d, c.q_rank)
        self.q_up = None if c.q_rank is None else matrix(rngs, model, c.q_rank, wide)
        self.q_down_bias = None if c.q_rank is None or not config.qkv_bias else vector(model, c.q_rank, 0.0)
        self.q_norm = None if c.q_rank is None else RMSNorm(model, c.q_rank, c.norm_epsilon)
        self.kv_down = matrix(rngs, model, d, down)
        self.kv_down_bias = vector(model, down, 0.0) if config.qkv_bias else None
        self.kv_norm = RMSNorm(model, c.kv_rank, c.norm_epsilon)
        self.kv_up = matrix(rngs, model, c.kv_rank, n * (c.nope_width + c.value_width))
        self.out = matrix(rngs, model, n * c.value_width, d)
        self.out_bias = vector(model, d, 0.0) if config.out_bias else None

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend) -> Attended:
        b, t, _ = x.shape
        latent, rope, heads = self.config.latent, self.config.rope, self.config.heads
        assert latent is not None
        kv_up = self.kv_up[...].reshape(latent.kv_rank, heads, latent.nope_width + latent.value_width)
        key_up, value_up = jnp.split(kv_up, [latent.nope_width], axis=-1)
        q = self._queries(x).reshape(b, t, heads, latent.nope_width + latent.rope_width)
        q_nope, q_rope = jnp.split(q, [latent.nope_width], axis=-1)
        q_latent = jnp.einsum("btnh,rnh->btnr", q_nope, key_up)
        down = linear(x, self.kv_down[...], self.kv_down_bias)
        c, k_rope = jnp.split(down, [latent.kv_rank], axis=-1)
        c = self.kv_norm(c)[:, :, None]
        k = jnp.concatenate([c, rotate(k_rope[:, :, None], positions, rope)], axis=-1)
        q = jnp.concatenate([q_latent, rotate(q_rope, positions, rope)], axis=-1)
        values = jnp.einsum("btnr,rnv->btnv", attend(q, k, c), value_up)
        return linear(values.reshape(b, t, heads * latent.value_width), self.out[...], self.out_bias), k, c

    def _queries(self, x: jax.Array) -> jax.Array:
        if self.q is not None:
            return linear(x, self.q[...])
        assert self.q_down is not None and self.q_up is not None and self.q_norm is not None
        return linear(self.q_norm(linear(x, self.q_down[...], self.q_down_bias)), self.q_up[...])


class Block(nnx.Module):
    def __init__(self, model: ModelConfig, config: BlockConfig, rngs: nnx.Rngs):
        attention = LatentAttention if config.attention.latent else Attention
        both = config.mlp is not None and config.experts is not None
        self.config = config
        self.attention_norm = RMSNorm(model, model.width)
        self.attention = attention(model, config.attention, rngs)
        self.mlp_norm = RMSNorm(model, model.width)
        self.mlp = Mlp(model, config.mlp, rngs) if config.mlp else None
        self.experts = Experts(model, config.experts, rngs) if config.experts else None
        self.attention_output_norm = RMSNorm(model, model.width) if config.output_norms else None
        self.mlp_output_norm = RMSNorm(model, model.width) if config.output_norms else None
        self.experts_norm = RMSNorm(model, model.width) if both else None
        self.dense_part_norm = RMSNorm(model, model.width) if both else None
        self.experts_part_norm = RMSNorm(model, model.width) if both else None
        self.output_scale = vector(model, 1, 1.0) if config.output_scale else None

    def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend) -> BlockOutput:
        """One block on x [B, T, D], its tokens at `positions` int32 [B, T]."""
        mixed, k, v = self.attention(self.attention_norm(x), positions, attend)
        x = x + _normed(self.attention_output_norm, mixed)
        added, routing = self._feed_forward(x)
        x = x + _normed(self.mlp_output_norm, added)
        if self.output_scale is not None:
            x = x * self.output_scale[...]
        return BlockOutput(x, k, v, routing)

    def _feed_forward(self, x: jax.Array) -> tuple[jax.Array, Routing | None]:
        normed = self.mlp_norm(x)
        if self.experts is None:
            assert self.mlp is not None
            return self.mlp(normed), None
        if self.mlp is None:
            return self.experts(normed, normed)
        assert self.experts_norm is not None
        mixed, routing = self.experts(self.experts_norm(x), x)  # side by side; the router has norms of its own
        return _normed(self.dense_part_norm, self.mlp(normed)) + _normed(self.experts_part_norm, mixed), routing


def _normed(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


Step = Callable[[Any, Block, Any], tuple[Any, Any]]  # carry, block, layer's input -> carry, layer's output


class Decoder(nnx.Module):
    """The whole model. `blocks`, `blocks_1`, ... hold each slot's weights, stacked on a leading axis."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.width)
        embedding = jax.random.normal(rngs.params(), shape, jnp.float32) * _EMBEDDING_STD
        self.config = config
        self.embedding = nnx.Param(embedding.astype(config.parameters_dtype))
        for slot, (block, repeats) in enumerate(slot_blocks(config)):
            setattr(self, slot_name(slot), _stacked(config, block, repeats, rngs))
        self.final_norm = RMSNorm(config, config.width)
        self.head = None if config.tied_head else matrix(rngs, config, config.width, config.vocab_size)

    def embed(self, tokens: jax.Array) -> jax.Array:
        embedded = self.embedding[...][tokens]
        scale = self.config.embedding_scale
        return embedded if scale == 1.0 else embedded * jnp.asarray(scale, embedded.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., D] after the last block -> float32 logits [..., V].

        Sampling and training both take them from here, so what is never sampled has no part in training's softmax.
        """
        normed = self.final_norm(hidden)
        head = self.embedding[...].T if self.head is None else self.head[...]
        logits = jnp.matmul(normed, head, preferred_element_type=jnp.float32)
        cap, known = self.config.logit_soft_cap, self.config.known_tokens
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        return logits if known is None else jnp.where(jnp.arange(logits.shape[-1]) < known, logits, _NEVER)

    def run_blocks(self, step: Step, carry: Any, per_slot: Sequence[Any] | None = None) -> tuple[Any, tuple[Any, ...]]:
        """Runs `step` over all layers in order.

        Args:
          per_slot: for each slot, a tree with a leading axis of its layers; `step` gets its layer's part.

        Returns:
          The last carry, and for each slot its layers' outputs, stacked.
        """
        outs: list[Any] = []
        for stack in stacks_of(self.config):
            parts = [nnx.split(getattr(self, slot_name(slot))) for slot in stack.slots]
            steps = [_remat(self.config, step, graph) for graph, _ in parts]
            given = tuple(None if per_slot is None else per_slot[slot] for slot in stack.slots)

            def body(carry, xs, steps=steps):
                made = []
                for one_step, weights, inputs in zip(steps, *xs, strict=True):
                    carry, out = one_step(carry, weights, inputs)
                    made.append(out)
                return carry, tuple(made)

            # Unrolled, a shallow model runs faster (a third of an update, on CPU); a deep one compiles for minutes.
            unroll = stack.repeats == 1 or self.config.layers <= _UNROLLED_LAYERS
            weights = tuple(weights for _, weights in parts)
            carry, made = jax.lax.scan(body, carry, (weights, given), length=stack.repeats, unroll=unroll)
            outs += made
        return carry, tuple(outs)


def _remat(config: ModelConfig, step: Step, graph: nnx.GraphDef) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """`step` of one layer as a function of its weights, which the backward pass runs again if the policy says so."""

    def run(carry, weights, inputs):
        return step(carry, nnx.merge(graph, weights), inputs)

    return run if config.remat == "none" else jax.checkpoint(run, policy=_REMAT_POLICIES[config.remat])


def _stacked(config: ModelConfig, block: BlockConfig, repeats: int, rngs: nnx.Rngs) -> Block:
    @nnx.split_rngs(splits=repeats)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs: nnx.Rngs) -> Block:
        return Block(config, block, rngs)

    return create(rngs)


def init_params(config: ModelConfig, seed: int) -> Params:
    """Random weights, a pure function of the configuration and the seed."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, nnx.Rngs(params=seed)), nnx.Param))


@lru_cache(maxsize=16)
def _abstract(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(params=0))), nnx.Param)  # type: ignore[return-value]


def param_shapes(config: ModelConfig) -> Params:
    """The parameters as `jax.ShapeDtypeStruct`s; computes nothing."""
    return nnx.to_pure_dict(_abstract(config)[1])


def bind(config: ModelConfig, params: Params) -> Decoder:
    """A Decoder that computes with `params`, in the compute dtype; cheap, for use inside compiled functions."""
    graph, state = _abstract(config)
    state = jax.tree.map(lambda leaf: leaf, state)  # a copy: replacing in the cached one would leak tracers
    nnx.replace_by_pure_dict(state, _cast(config, params))
    return nnx.merge(graph, state)


def _cast(config: ModelConfig, params: Params) -> Params:
    def cast(path, leaf):
        return leaf if path[-1].key in _FLOAT32_LEAVES else leaf.astype(config.compute_dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
