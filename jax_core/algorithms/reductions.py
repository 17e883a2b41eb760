"""Reductions: what share of a step's loss each token has. N: sequences of the step.

Every member is `(trained_tokens [N] int, *, norm) -> float64 [N]`: the weight of each trained token of that sequence,
so that

    loss = sum_i weight_i * sum_t loss_it

`trained_tokens` counts where the loss mask is true, of all sequences of the whole step, in any order. The weights hold
for any packing, any split into micro-batches and any number of devices, because nothing is averaged later.

A sequence with no trained token (a tombstone, a group that is left out) has weight 0 and counts in no denominator:
adding one changes no other weight. So does Tunix; TRL's `grpo` and `dr_grpo` divide by all rows, empty ones included,
which makes the update smaller when samples fail. If no sequence has a trained token, all weights are 0.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Reduction(Protocol):
    def __call__(self, trained_tokens: np.ndarray, *, norm: float) -> np.ndarray: ...


def token_mean(trained_tokens: np.ndarray, *, norm: float) -> np.ndarray:
    """Every token of the step counts the same: 1 / sum_j tokens_j. `norm` has no effect. float64 [N].

    DAPO (arXiv 2503.14476, section 3.3). Tunix's `token-mean`, TRL's `dapo`, and its `bnpo` when the step is one
    micro-batch.

    Raises:
      ValueError: `trained_tokens` is not [N], not of integers, or has one below 0.
    """
    del norm
    tokens = _checked(trained_tokens)
    return (tokens > 0) / max(tokens.sum(), 1)


def sequence_mean_token_mean(trained_tokens: np.ndarray, *, norm: float) -> np.ndarray:
    """Every sequence counts the same: 1 / (sequences * tokens_i). `norm` has no effect. float64 [N].

    GRPO (arXiv 2402.03300, eq. 3). A token of a short sequence weighs more than one of a long sequence. Tunix's
    `sequence-mean-token-mean` (its default); TRL's `grpo`, up to the empty rows.

    Raises:
      ValueError: as for `token_mean`.
    """
    del norm
    tokens = _checked(trained_tokens)
    sequences = int(np.count_nonzero(tokens))
    return (tokens > 0) / (np.maximum(tokens, 1) * max(sequences, 1))


def sequence_mean_token_sum_norm(trained_tokens: np.ndarray, *, norm: float) -> np.ndarray:
    """The mean over sequences of their token sum over a constant: 1 / (sequences * norm). float64 [N].

    Dr. GRPO (arXiv 2503.20783, section 3.2): no length decides a token's weight. `norm` is the most tokens that a
    sequence may have; 1 gives the plain sum over tokens. It is *one sequence's* divisor, as in TRL's `dr_grpo` and
    Tunix's `sequence-mean-token-scale`. Tunix's `sequence-mean-token-sum-norm`, whose norm is the whole step's and by
    default its number of sequences, is norm 1 here.

    Raises:
      ValueError: as for `token_mean`, or `norm` is not above 0.
    """
    tokens = _checked(trained_tokens)
    if not norm > 0:
        raise ValueError(f"norm is {norm}; it divides every token's loss and must be above 0")
    sequences = int(np.count_nonzero(tokens))
    return (tokens > 0) / (float(norm) * max(sequences, 1))


REDUCTIONS: dict[str, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean_token_mean": sequence_mean_token_mean,
    "sequence_mean_token_sum_norm": sequence_mean_token_sum_norm,
}


def _checked(trained_tokens: np.ndarray) -> np.ndarray:
    tokens = np.asarray(trained_tokens)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"trained_tokens {tokens.shape} {tokens.dtype} must be whole numbers, one a sequence: [N]")
    if np.any(tokens < 0):
        raise ValueError(f"trained_tokens has {tokens.min()}; a count is 0 or more")
    return tokens.astype(np.int64)
