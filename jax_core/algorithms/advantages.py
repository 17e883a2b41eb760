"""Advantages: how the rewards of one group become one number a sample. G: samples of the group.

Every member is `(rewards [G], valid [G] bool) -> float32 [G]`, computed in float64.

`valid` is False for a tombstone, a sample whose generation or scoring failed. Its advantage is exactly 0, its reward is
never read, and mean, deviation and number of samples are those of the valid samples only. A failure says nothing about
the policy: counting it as reward 0 would lower the baseline and push the siblings up for having survived. A baseline
needs two valid samples; with fewer, every advantage of the group is 0.

With a baseline (all but `reinforce`), equal rewards give exactly 0.0 and a shift of all rewards changes nothing.

Left out on purpose: whitening over the whole batch, length penalties, learned baselines.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from schemas.errors import UserError

Advantage = Callable[[np.ndarray, np.ndarray], np.ndarray]

GRPO_EPSILON = 1e-6


def grpo(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """A_i = (r_i - mean r) / (std r + 1e-6), with the sample deviation (ddof 1). float32 [G].

    DeepSeekMath (arXiv 2402.03300, section 4.1.2), which leaves ddof and epsilon open. Both are Tunix's; TRL has ddof 1
    too but epsilon 1e-4, which shrinks the advantages of a group whose rewards lie close together. Unlike them we work
    in float64 and from the smallest reward: otherwise equal rewards such as [0.1] * 8 may deviate from their own mean.

    Raises:
      ValueError: the arrays are not both [G], `valid` is not bool, or a valid reward is not finite.
    """
    deviations, samples = _deviations(rewards, valid)
    std = np.sqrt(np.sum(deviations**2) / max(samples - 1, 1))
    return (deviations / (std + GRPO_EPSILON)).astype(np.float32)


def dr_grpo(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean r. float32 [G].

    Dr. GRPO (arXiv 2503.20783, section 3.2): dividing by the deviation favours prompts that are nearly always or nearly
    never solved. The same as Tunix's and as TRL's `scale_rewards="none"`.

    Raises:
      ValueError: as for `grpo`.
    """
    deviations, _ = _deviations(rewards, valid)
    return deviations.astype(np.float32)


def rloo(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean of the other samples' r = n / (n - 1) * (r_i - mean r), n valid samples. float32 [G].

    REINFORCE leave-one-out (Kool et al., 2019; arXiv 2402.14740): the baseline does not depend on the sample that
    it is subtracted from, so the gradient is unbiased. The same as Tunix's and TRL's.

    Raises:
      ValueError: as for `grpo`.
    """
    deviations, samples = _deviations(rewards, valid)
    return (deviations * (samples / max(samples - 1, 1))).astype(np.float32)


def reinforce(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """A_i = r_i: no baseline. float32 [G].

    REINFORCE (Williams, 1992) with the episode's return on every token. The only member that learns from a group of
    one, and from a group of equal rewards. The group estimators of Tunix and TRL all subtract a mean; this one is for
    runs with one sample a prompt.

    Raises:
      ValueError: as for `grpo`.
    """
    rewards, valid = _checked(rewards, valid)
    return np.where(valid, rewards, 0.0).astype(np.float32)


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "reinforce": reinforce}


def advantages_of(name: str, rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The advantages [G] of one group, by the recipe's `algorithm.advantage`.

    >>> advantages_of("rloo", np.array([1.0, 0.0, 0.0]), np.array([True, True, False])).tolist()
    [1.0, -1.0, 0.0]

    Raises:
      UserError: no advantage has this name.
      ValueError: as for `grpo`.
    """
    if name not in ADVANTAGES:
        raise UserError(
            f"algorithm.advantage={name!r}", "is not an advantage that we know.", f"Choose one of {sorted(ADVANTAGES)}."
        )
    return ADVANTAGES[name](rewards, valid)


def _deviations(rewards: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, int]:
    """r_i - mean r over the valid samples, 0 elsewhere, float64 [G]; and how many are valid."""
    rewards, valid = _checked(rewards, valid)
    deviations = np.zeros_like(rewards)
    samples = int(valid.sum())
    if samples:
        # The mean of [0.1] * 8 is not 0.1 in floating point. Measured from the smallest, equal rewards are exact zeros,
        # and so are their mean and their deviations.
        above = rewards[valid] - rewards[valid].min()
        deviations[valid] = above - above.mean()
    return deviations, samples


def _checked(rewards: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rewards = np.asarray(rewards, np.float64)
    valid = np.asarray(valid)
    if rewards.ndim != 1 or rewards.shape != valid.shape or valid.dtype != np.bool_:
        raise ValueError(
            f"rewards {rewards.shape} and valid {valid.shape} {valid.dtype} must be of one group, [G] and bool [G]"
        )
    spoilt = np.flatnonzero(valid & ~np.isfinite(rewards))
    if spoilt.size:
        # One NaN would make the whole group NaN, and the update after it.
        raise ValueError(f"reward of sample {spoilt[0]} is {rewards[spoilt[0]]}; a valid sample needs a finite reward")
    return rewards, valid
