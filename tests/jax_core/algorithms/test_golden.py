"""Losses and gradients against Tunix 0.1.7 and TRL 1.16 on one table of logits (golden/README.md).

Loss within 1e-6, gradient within 1e-7. The KL term of some cases is added here: a reduction takes any token loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_core.algorithms import OBJECTIVES, REDUCTIONS, advantages_of, is_clipped

GOLDEN = Path(__file__).parent / "golden"
PROMPT_TOKENS = 5
COMPLETION_TOKENS = 7


@dataclass(frozen=True)
class Case:
    """One golden number of a peer, in our words."""

    peer: str
    name: str
    objective: str = "ppo_clip"
    reduction: str = "sequence_mean_token_mean"
    norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0  # coefficient of the low-variance KL
    temperature: float = 1.0
    advantages: str = "advantages"
    inputs: str = "inputs"
    on_policy: bool = False
    scale: float = 1.0  # theirs is ours times this


TOKEN, SEQUENCE, SUM = "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm"
HORIZON = float(COMPLETION_TOKENS)
EMPTY: dict[str, Any] = {"inputs": "inputs_emptyrow", "kl": 0.04}
CISPO: dict[str, Any] = {"objective": "cispo", "reduction": TOKEN, "clip_low": 1.0, "clip_high": 4.0}
ALL_ROWS = 7 / 8  # TRL divides by all 8 rows, the empty one included; we divide by 7

CASES = [
    Case("tunix", "grpo_onpolicy", on_policy=True),
    Case("tunix", "grpo_old"),
    Case("tunix", "grpo_old_ref_low_var_kl", kl=0.04),
    Case("tunix", "grpo_eps_high", clip_high=0.28),
    Case("tunix", "grpo_adv2d", kl=0.04, advantages="advantages_2d"),
    Case("tunix", "grpo_temp0.7", kl=0.04, temperature=0.7),
    Case("tunix", "dapo", reduction=TOKEN, clip_high=0.28),
    Case("tunix", "ppo_policy", reduction=TOKEN, advantages="advantages_2d"),
    Case("tunix", "ppo_policy_asym", reduction=TOKEN, advantages="advantages_2d", clip_low=0.1, clip_high=0.3),
    Case("tunix", "grpo_agg_token-mean", reduction=TOKEN, kl=0.04),
    Case("tunix", "grpo_agg_sequence-mean-token-mean", reduction=SEQUENCE, kl=0.04),
    Case("tunix", "grpo_agg_sequence-mean-token-scale", reduction=SUM, norm=HORIZON, kl=0.04),
    Case("tunix", "grpo_agg_seq-mean-token-sum", reduction=SUM, kl=0.04),
    Case("tunix", "grpo_agg_sequence-mean-token-sum-norm", reduction=SUM, kl=0.04),
    Case("tunix", "grpo_emptyrow_agg_token-mean", reduction=TOKEN, **EMPTY),
    Case("tunix", "grpo_emptyrow_agg_sequence-mean-token-mean", reduction=SEQUENCE, **EMPTY),
    Case("tunix", "grpo_emptyrow_agg_sequence-mean-token-scale", reduction=SUM, norm=HORIZON, **EMPTY),
    Case("tunix", "grpo_emptyrow_agg_seq-mean-token-sum", reduction=SUM, **EMPTY),
    Case("tunix", "grpo_emptyrow_agg_sequence-mean-token-sum-norm", reduction=SUM, **EMPTY),
    Case("trl", "grpo_onpolicy", on_policy=True),
    Case("trl", "grpo_old"),
    Case("trl", "grpo_old_ref_nobiascorr", kl=0.04),
    Case("trl", "grpo_eps_high", clip_high=0.28),
    Case("trl", "grpo_adv2d", kl=0.04, advantages="advantages_2d"),
    Case("trl", "grpo_temp0.7", kl=0.04, temperature=0.7),
    Case("trl", "bnpo_old", reduction=TOKEN),
    Case("trl", "dapo_old", reduction=TOKEN),
    Case("trl", "dapo_eps_high", reduction=TOKEN, clip_high=0.28),
    Case("trl", "dr_grpo_old", reduction=SUM, norm=HORIZON),
    Case("trl", "dr_grpo_old_ref_nobiascorr", reduction=SUM, norm=HORIZON, kl=0.04),
    Case("trl", "cispo_old", **CISPO),
    Case("trl", "cispo_old_ref_nobiascorr", **CISPO, kl=0.04),
    Case("trl", "cispo_emptyrow", **CISPO, **EMPTY),
    Case("trl", "bnpo_emptyrow", reduction=TOKEN, **EMPTY),
    Case("trl", "dapo_emptyrow", reduction=TOKEN, **EMPTY),
    Case("trl", "grpo_emptyrow", reduction=SEQUENCE, scale=ALL_ROWS, **EMPTY),
    Case("trl", "dr_grpo_emptyrow", reduction=SUM, norm=HORIZON, scale=ALL_ROWS, **EMPTY),
]


@pytest.fixture(scope="module")
def golden() -> dict[str, dict[str, np.ndarray]]:
    return {file.stem: dict(np.load(file)) for file in GOLDEN.glob("*.npz")}


def completion_logprobs(logits: jax.Array, completion_ids: np.ndarray, temperature: float = 1.0) -> jax.Array:
    """Table of logits [N, P + T, V] -> log-probs of the completion's tokens [N, T]."""
    predicting = logits[:, PROMPT_TOKENS - 1 : PROMPT_TOKENS - 1 + COMPLETION_TOKENS] / temperature
    return jnp.take_along_axis(jax.nn.log_softmax(predicting), completion_ids[..., None], axis=-1)[..., 0]


def low_variance_kl(logprobs: jax.Array, reference_logprobs: np.ndarray, mask: jax.Array) -> jax.Array:
    difference = jnp.where(mask, reference_logprobs - logprobs, 0.0)
    return jnp.exp(difference) - difference - 1.0


def loss_of(case: Case, inputs: dict[str, np.ndarray], logits: jax.Array) -> jax.Array:
    mask = jnp.asarray(inputs["completion_mask"])
    logprobs = completion_logprobs(logits, inputs["completion_ids"], case.temperature)
    sampler_logprobs = jax.lax.stop_gradient(logprobs) if case.on_policy else jnp.asarray(inputs["old_logps"])
    advantages = jnp.asarray(inputs[case.advantages]).reshape(len(mask), -1)
    losses = OBJECTIVES[case.objective](
        logprobs, sampler_logprobs, advantages, mask, clip_low=case.clip_low, clip_high=case.clip_high
    )
    losses += case.kl * low_variance_kl(logprobs, inputs["ref_logps"], mask)
    weights = REDUCTIONS[case.reduction](np.asarray(mask.sum(axis=1)), norm=case.norm)
    return case.scale * jnp.sum(weights[:, None].astype(np.float32) * losses)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.peer}-{case.name}")
def test_loss_and_gradient_agree_with_the_peer(case, golden):
    inputs, expected = golden[case.inputs], golden[case.peer]
    loss, gradient = jax.value_and_grad(lambda logits: loss_of(case, inputs, logits))(jnp.asarray(inputs["logits"]))
    assert float(loss) == pytest.approx(float(expected[f"{case.name}/loss"]), abs=1e-6)
    np.testing.assert_allclose(gradient, expected[f"{case.name}/grad"], rtol=0, atol=1e-7)


@pytest.mark.parametrize(("name", "theirs"), [("grpo", "adv_grpo"), ("rloo", "adv_rloo"), ("dr_grpo", "adv_drgrpo")])
def test_advantages_agree_with_tunix(name, theirs, golden):
    groups = golden["inputs"]["rewards"].reshape(2, 4)
    ours = np.concatenate([advantages_of(name, rewards, np.ones(4, bool)) for rewards in groups])
    np.testing.assert_allclose(ours, golden["tunix"][theirs], rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_that_these_tests_feed_in_agree_with_tunix(temperature, golden):
    inputs = golden["inputs"]
    ours = completion_logprobs(inputs["logits"], inputs["completion_ids"], temperature)
    theirs = golden["tunix"][f"logps_temp{temperature}"]
    mask = inputs["completion_mask"]
    np.testing.assert_allclose(np.asarray(ours)[mask], theirs[mask], rtol=0, atol=2e-6)


@pytest.mark.parametrize(("inputs", "fraction"), [("inputs", 13 / 35), ("inputs_emptyrow", 11 / 30)])
def test_the_fraction_of_clipped_tokens_agrees_with_both(inputs, fraction, golden):
    arrays = golden[inputs]
    logprobs = completion_logprobs(arrays["logits"], arrays["completion_ids"])
    mask = arrays["completion_mask"]
    clipped = is_clipped(
        logprobs, arrays["old_logps"], arrays["advantages"][:, None], mask, clip_low=0.2, clip_high=0.2
    )
    assert clipped.sum() / mask.sum() == pytest.approx(fraction)


def test_the_golden_cases_reach_every_reduction_and_every_objective_that_a_peer_has():
    assert {case.reduction for case in CASES} == set(REDUCTIONS)
    assert {case.objective for case in CASES} == set(OBJECTIVES) - {"policy_gradient"}
