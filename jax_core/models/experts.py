"""A mixture of experts by grouped matmul: tokens sorted by expert, one ragged product for each weight.

There is no capacity: every token reaches all of its experts, so none is dropped, and what a token gets does not depend
on which others are in the batch.

Left out: experts spread over devices.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_core.models.config import ExpertsConfig, MlpConfig, ModelConfig
from jax_core.models.layers import ACTIVATIONS, Mlp, linear, matrix, rms_normalize, vector


class Routing(NamedTuple):
    """What a router decided for tokens [...]."""

    probabilities: jax.Array  # float32 [..., E], sum 1
    chosen: jax.Array  # int32 [..., k]


class Load(NamedTuple):
    """Sums over the real tokens of one layer; add those of two batches to have both's."""

    tokens: jax.Array  # float32 [], tokens routed
    chosen: jax.Array  # float32 [E], times that each expert was chosen
    probability: jax.Array  # float32 [E], sum of its probabilities
    entropy: jax.Array  # float32 [], sum of the routers' entropies, nats


class Experts(nnx.Module):
    def __init__(self, model: ModelConfig, config: ExpertsConfig, rngs: nnx.Rngs):
        d, e, f = model.width, config.experts, config.width
        self.config = config
        self.epsilon = model.norm_epsilon
        self.width = d
        self.router = matrix(rngs, model, d, e)
        self.correction_bias = vector(model, e, 0.0) if config.correction_bias else None
        self.router_input_scale = vector(model, d, 1.0) if config.scaled else None
        self.expert_scale = vector(model, e, 1.0) if config.scaled else None
        self.gate = matrix(rngs, model, d, f, leading=(e,))
        self.up = matrix(rngs, model, d, f, leading=(e,))
        self.down = matrix(rngs, model, f, d, leading=(e,))
        shared = config.shared_width
        self.shared = Mlp(model, MlpConfig(shared, config.activation), rngs) if shared else None

    def __call__(self, x: jax.Array, router_input: jax.Array) -> tuple[jax.Array, Routing]:
        """x [B, T, D] -> (y [B, T, D], what the router decided from `router_input` [B, T, D])."""
        c = self.config
        correction = None if self.correction_bias is None else self.correction_bias[...]
        probabilities, weights, chosen = route(self._logits(router_input), c, correction)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[...].astype(jnp.float32)[chosen]
        flat = x.reshape(-1, x.shape[-1])
        pairs = chosen.reshape(len(flat), -1), weights.reshape(len(flat), -1)
        mixed = mix_experts(flat, *pairs, self.gate[...], self.up[...], self.down[...], ACTIVATIONS[c.activation])
        mixed = mixed.reshape(x.shape)
        if self.shared is not None:
            mixed = mixed + self.shared(x)
        return mixed, Routing(probabilities, chosen)

    def _logits(self, x: jax.Array) -> jax.Array:
        """float32 [B, T, E]: a rounding error here would send a token elsewhere."""
        x = x.astype(jnp.float32)
        if self.router_input_scale is not None:
            x = rms_normalize(x, self.epsilon) * self.router_input_scale[...] * self.width**-0.5
        return linear(x, self.router[...].astype(jnp.float32))


def route(
    logits: jax.Array, config: ExpertsConfig, correction: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Probabilities float32 [..., E], weights float32 [..., k] and numbers int32 [..., k] of each token's experts.

    Softmax scores are Shazeer et al. 2017's; sigmoid scores, the correction bias (of the choice alone) and the limit to
    the best groups, by the sum of a group's two best, are DeepSeek-V3's (DeepSeek-AI 2024, section 2.1.2).
    """
    c = config
    scores = jax.nn.softmax(logits) if c.scores == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if correction is None else scores + correction
    if c.groups_per_token < c.groups:
        grouped = choice.reshape(*choice.shape[:-1], c.groups, c.experts // c.groups)
        group_scores = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        best = jax.lax.top_k(group_scores, c.groups_per_token)[1]
        allowed = jax.nn.one_hot(best, c.groups, dtype=jnp.bool).any(-2)
        choice = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(choice.shape)
    chosen = jax.lax.top_k(choice, c.per_token)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if c.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    probabilities = scores if c.scores == "softmax" else scores / (scores.sum(-1, keepdims=True) + 1e-20)
    return probabilities, weights * c.scaling, chosen


def mix_experts(x, chosen, weights, gate, up, down, activation) -> jax.Array:
    """Weighted sum of the chosen experts' gated MLPs, [N, D].

    Args:
      x: [N, D]; chosen: int32 [N, k]; weights: float32 [N, k].
      gate, up: [E, D, F]; down: [E, F, D].
    """
    n, per_token = chosen.shape
    expert = chosen.reshape(-1)
    order = jnp.argsort(expert, stable=True)  # pair number of each sorted place
    sizes = jnp.bincount(expert, length=gate.shape[0]).astype(jnp.int32)
    ordered = x[order // per_token]
    hidden = activation(grouped_matmul(ordered, gate, sizes)) * grouped_matmul(ordered, up, sizes)
    out = grouped_matmul(hidden, down, sizes)
    back = jnp.argsort(order)
    pairs = out[back].reshape(n, per_token, -1)
    return jnp.einsum("nkd,nk->nd", pairs, weights.astype(x.dtype))


def grouped_matmul(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """x [M, D], its first sizes[0] rows times weights[0] [D, F], the next sizes[1] times weights[1], ... -> [M, F]."""
    return jax.lax.ragged_dot(x, weights, sizes)


def load_of(routing: Routing, mask: jax.Array) -> Load:
    """Sums over the tokens where `mask` bool [...] is True."""
    counted = mask[..., None].astype(jnp.float32)
    probabilities = routing.probabilities
    experts = probabilities.shape[-1]
    hits = jax.nn.one_hot(routing.chosen, experts, dtype=jnp.float32).sum(-2)
    axes = tuple(range(mask.ndim))
    entropy = -jnp.sum(jax.scipy.special.xlogy(probabilities, probabilities) * counted)
    return Load(counted.sum(), (hits * counted).sum(axes), (probabilities * counted).sum(axes), entropy)


def balance_loss(load: Load) -> jax.Array:
    """E sum_e f_e P_e (Fedus et al. 2021, eq. 4) of each layer: 1 where the load is even, at most E.

    f_e is expert e's share of all choices, P_e its mean probability. Only P_e has a gradient. Leading axes of `load`
    (layers) stay.
    """
    experts = load.chosen.shape[-1]
    share = load.chosen / jnp.maximum(load.chosen.sum(-1, keepdims=True), 1.0)
    mean = load.probability / jnp.maximum(load.tokens, 1.0)[..., None]
    return experts * jnp.sum(share * mean, axis=-1)
