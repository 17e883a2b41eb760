"""Objectives: the loss of one token, un-reduced and float32.

Every member is

    (logprobs, sampler_logprobs, advantages, mask, *, clip_low, clip_high) -> loss of each token

`logprobs` (of the policy in training, nats), `sampler_logprobs` (of the policy that sampled, nats; no gradient flows
into it) and `mask` (bool, True where the policy sampled) have one shape, [..., T]; `advantages` broadcasts to it:
[N, 1] for one number a sequence, [N, T] for one a token. The result has that shape, and is exactly 0 off the mask.

The mask is applied before any arithmetic, so whatever stands off the mask, NaN and infinity included, reaches neither
the loss nor the gradient with respect to these inputs. (It cannot protect what made `logprobs`: a log-softmax over NaN
logits turns the zero gradient that it receives into NaN. Mask those logits as well.)

At ratio 1 every member has the policy gradient, d loss_t / d logprobs_t = -A_t.

The log ratio is limited to +-20 before `exp`, as in Tunix and unlike TRL, so that every loss is finite for any finite
log-probs. Beyond the limit the gradient is 0.

Left out on purpose: dual clipping, sequence-level ratios (GSPO), KL terms, entropy bonuses, truncated importance
weights between two samplers of one policy.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp

LOG_RATIO_LIMIT = 20.0


class Objective(Protocol):
    def __call__(
        self,
        logprobs: jax.Array,
        sampler_logprobs: jax.Array,
        advantages: jax.Array,
        mask: jax.Array,
        *,
        clip_low: float,
        clip_high: float,
    ) -> jax.Array: ...


def ppo_clip(
    logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> jax.Array:
    """L = -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), ratio = exp(logprobs - sampler_logprobs).

    PPO (arXiv 1707.06347, eq. 7), used per token by GRPO; two clip ranges as in DAPO (arXiv 2503.14476, section 3.1).
    The gradient stops where the ratio has left the range in the direction that the advantage pushes. The same function
    as Tunix's and TRL's. They may feed it log-probs that the trainer computed again for the old policy; we feed it the
    sampler's own, so the ratio is the one between the two distributions that really took part.
    """
    advantages = _on_mask(mask, advantages)
    ratio = importance_ratio(logprobs, sampler_logprobs, mask)
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return _on_mask(mask, -jnp.minimum(ratio * advantages, clipped * advantages))


def policy_gradient(
    logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> jax.Array:
    """L = -A logprobs. `sampler_logprobs`, `clip_low` and `clip_high` have no effect.

    REINFORCE (Williams, 1992; Sutton et al., 2000). Right for data that the policy in training sampled; with lag its
    gradient is biased, and `cispo` is the same loss with importance weights. The on-policy loss of Tunix and TRL is -A
    times a ratio of 1: another value, the same gradient.
    """
    del sampler_logprobs, clip_low, clip_high
    return _on_mask(mask, -_on_mask(mask, advantages) * _on_mask(mask, logprobs))


def cispo(
    logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> jax.Array:
    """L = -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) A logprobs.

    CISPO (MiniMax-M1, arXiv 2506.13585): the importance weight is clipped and every token keeps its gradient. The paper
    trains without a lower bound, and so does TRL; here that is `clip_low` of 1 or more. TRL's `epsilon_high` is the
    upper bound itself, ours is its distance from 1 as in the paper: TRL's 5.0 is `clip_high=4.0` here.
    """
    ratio = jax.lax.stop_gradient(importance_ratio(logprobs, sampler_logprobs, mask))
    weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return _on_mask(mask, -weight * _on_mask(mask, advantages) * _on_mask(mask, logprobs))


OBJECTIVES: dict[str, Objective] = {"ppo_clip": ppo_clip, "policy_gradient": policy_gradient, "cispo": cispo}


def importance_ratio(logprobs: jax.Array, sampler_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """exp(logprobs - sampler_logprobs), float32, between e**-20 and e**20; exactly 1 off the mask."""
    sampler_logprobs = jax.lax.stop_gradient(_on_mask(mask, sampler_logprobs))
    log_ratio = _on_mask(mask, logprobs) - sampler_logprobs
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def is_clipped(
    logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
) -> jax.Array:
    """For the metrics: True where `ppo_clip` stops the gradient; False off the mask. Shapes as for an objective.

    That is above the range for a positive advantage, and below it for a negative one. The same as Tunix's `pg_clipfrac`
    and TRL's `clip_ratio/region_mean`.
    """
    ratio = importance_ratio(logprobs, sampler_logprobs, mask)
    too_high = (ratio > 1.0 + clip_high) & (advantages > 0)
    too_low = (ratio < 1.0 - clip_low) & (advantages < 0)
    return mask & (too_high | too_low)


def _on_mask(mask: jax.Array, values: jax.Array) -> jax.Array:
    """`values` in float32, exactly 0 off the mask; there the gradient is exactly 0 too, whatever stood there."""
    return jnp.where(mask, jnp.asarray(values, jnp.float32), 0.0)
