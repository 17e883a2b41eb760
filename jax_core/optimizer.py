"""AdamW with a learning rate that is a pure function of the training step, so that a resume cannot shift it."""

from __future__ import annotations

import math

import jax
import optax

from jax_core.models.decoder import Params
from schemas.recipe import OptimizerSection


def learning_rate(section: OptimizerSection, step: int, steps: int) -> float:
    """Learning rate of training step `step` (from 0) of `steps`.

    The first warm-up step already has learning_rate / warmup_steps (a first step at 0 would train nothing), the first
    step after the warm-up has the peak, and the last step of the run has exactly peak * final_fraction.
    """
    if step < section.warmup_steps:
        return section.learning_rate * (step + 1) / section.warmup_steps
    progress = (step - section.warmup_steps) / max(1, steps - 1 - section.warmup_steps)
    final = section.learning_rate * section.final_fraction
    if section.schedule == "linear":
        return section.learning_rate + (final - section.learning_rate) * progress
    if section.schedule == "cosine":
        return final + (section.learning_rate - final) * (1 + math.cos(math.pi * progress)) / 2
    return section.learning_rate


def make_optimizer(section: OptimizerSection) -> optax.GradientTransformation:
    """Clip by global norm, Adam (Kingma and Ba 2015), decoupled weight decay on matrices (Loshchilov and Hutter 2019).

    Its updates are ascent directions of size 1: the caller multiplies them by minus the learning rate.
    """
    return optax.chain(
        optax.clip_by_global_norm(section.clip_norm),
        optax.scale_by_adam(b1=section.beta1, b2=section.beta2, eps=section.epsilon),
        optax.add_decayed_weights(section.weight_decay, mask=_is_matrix),
    )


def _is_matrix(params: Params) -> Params:
    # By name: norms' scales and biases are stacked over layers, so their number of axes says nothing.
    return jax.tree_util.tree_map_with_path(lambda path, _: not path[-1].key.endswith(("scale", "bias")), params)
