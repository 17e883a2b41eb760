"""Laws and worked examples of the reductions. N: sequences of a step."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from jax_core.algorithms import REDUCTIONS
from schemas.recipe import AlgorithmSection

every_reduction = pytest.mark.parametrize("name", sorted(REDUCTIONS))


def random_counts(seed: int):
    """Trained tokens of the sequences of many steps; a third of the sequences is empty."""
    rng = np.random.default_rng(seed)
    for _ in range(30):
        sequences = int(rng.integers(1, 40))
        yield np.where(rng.random(sequences) < 0.33, 0, rng.integers(1, 100, sequences))


# Worked examples


@pytest.mark.parametrize(
    ("name", "norm", "expected"),
    [
        ("token_mean", 1.0, 2.75),
        ("sequence_mean_token_mean", 1.0, 3.5),
        ("sequence_mean_token_sum_norm", 1.0, 5.5),
        ("sequence_mean_token_sum_norm", 4.0, 1.375),
    ],
)
def test_reduction_of_a_worked_batch(name, norm, expected):
    losses = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0]])
    weights = REDUCTIONS[name](mask.sum(axis=1), norm=norm)
    assert np.sum(weights[:, None] * losses * mask) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", [1 / 8, 1 / 8, 0, 1 / 8]),
        ("sequence_mean_token_mean", [1 / 3, 1 / 6, 0, 1 / 15]),
        ("sequence_mean_token_sum_norm", [1 / 30, 1 / 30, 0, 1 / 30]),
    ],
)
def test_weights_of_a_worked_step(name, expected):
    np.testing.assert_allclose(REDUCTIONS[name](np.array([1, 2, 0, 5]), norm=10.0), expected, rtol=1e-15)


# The contract of the family


def test_the_table_holds_exactly_the_names_of_the_recipe():
    assert set(REDUCTIONS) == set(get_args(AlgorithmSection.model_fields["reduction"].annotation))


@every_reduction
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_weights_are_finite_float64_and_one_a_sequence(name, dtype):
    for counts in random_counts(seed=0):
        weights = REDUCTIONS[name](counts.astype(dtype), norm=64.0)
        assert weights.dtype == np.float64
        assert weights.shape == counts.shape
        assert np.isfinite(weights).all()


@every_reduction
def test_exactly_the_sequences_with_trained_tokens_have_weight(name):
    for counts in random_counts(seed=1):
        np.testing.assert_array_equal(REDUCTIONS[name](counts, norm=64.0) > 0, counts > 0)


@every_reduction
def test_adding_empty_sequences_changes_no_other_weight(name):
    rng = np.random.default_rng(2)
    for counts in random_counts(seed=2):
        places = rng.integers(0, counts.size + 1, 5)
        crowded = REDUCTIONS[name](np.insert(counts, places, 0), norm=64.0)
        np.testing.assert_array_equal(crowded[crowded > 0], REDUCTIONS[name](counts[counts > 0], norm=64.0))


@every_reduction
@pytest.mark.parametrize("sequences", [0, 1, 5])
def test_a_step_with_nothing_to_train_has_no_weight(name, sequences):
    assert REDUCTIONS[name](np.zeros(sequences, np.int64), norm=64.0).tolist() == [0.0] * sequences


@every_reduction
def test_weights_follow_their_sequences_when_the_step_is_reordered(name):
    rng = np.random.default_rng(3)
    for counts in random_counts(seed=3):
        order = rng.permutation(counts.size)
        moved = REDUCTIONS[name](counts[order], norm=64.0)
        np.testing.assert_array_equal(moved, REDUCTIONS[name](counts, norm=64.0)[order])


@every_reduction
def test_a_step_repeated_twice_has_the_same_loss(name):
    rng = np.random.default_rng(4)
    for counts in random_counts(seed=4):
        losses = rng.normal(size=counts.size) * counts  # summed over each sequence's tokens
        once = REDUCTIONS[name](counts, norm=64.0) @ losses
        twice = REDUCTIONS[name](np.tile(counts, 2), norm=64.0) @ np.tile(losses, 2)
        assert twice == pytest.approx(once, rel=1e-12, abs=1e-12)


@every_reduction
@pytest.mark.parametrize(
    "counts", [np.array([1.0, 2.0]), np.array([True, False]), np.array([[1, 2]]), np.array([3, -1])], ids=str
)
def test_what_are_not_counts_of_sequences_is_refused(name, counts):
    with pytest.raises(ValueError, match="trained_tokens"):
        REDUCTIONS[name](counts, norm=64.0)


# Laws of one member


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean_token_mean"])
def test_a_mean_of_equal_losses_is_that_loss_and_norm_has_no_effect(name):
    for counts in random_counts(seed=5):
        if counts.any():
            for norm in (1.0, 64.0):
                assert REDUCTIONS[name](counts, norm=norm) @ counts == pytest.approx(1.0, rel=1e-12)


def test_token_mean_weighs_every_token_alike():
    for counts in random_counts(seed=6):
        assert np.unique(REDUCTIONS["token_mean"](counts, norm=64.0)[counts > 0]).size <= 1


def test_sequence_mean_weighs_every_sequence_alike():
    for counts in random_counts(seed=7):
        shares = (REDUCTIONS["sequence_mean_token_mean"](counts, norm=64.0) * counts)[counts > 0]
        np.testing.assert_allclose(shares, 1 / max(shares.size, 1), rtol=1e-12)


def test_sum_norm_is_token_mean_when_every_sequence_has_norm_tokens():
    counts = np.full(6, 64)
    ours = REDUCTIONS["sequence_mean_token_sum_norm"](counts, norm=64.0)
    np.testing.assert_allclose(ours, REDUCTIONS["token_mean"](counts, norm=64.0), rtol=1e-15)


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
def test_a_norm_that_is_not_above_zero_is_refused(norm):
    with pytest.raises(ValueError, match="norm is"):
        REDUCTIONS["sequence_mean_token_sum_norm"](np.array([1, 2]), norm=norm)
