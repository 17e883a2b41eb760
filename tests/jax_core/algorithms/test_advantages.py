"""Laws and worked examples of the advantages. G: samples of a group."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from jax_core.algorithms import ADVANTAGES, advantages_of
from schemas.errors import UserError
from schemas.recipe import AlgorithmSection

WITH_BASELINE = sorted(set(ADVANTAGES) - {"reinforce"})
REWARD_KINDS = ("success or failure", "eighths", "gaussian", "one outlier", "far from zero")

every_advantage = pytest.mark.parametrize("name", sorted(ADVANTAGES))
every_baseline = pytest.mark.parametrize("name", WITH_BASELINE)


def all_valid(rewards) -> np.ndarray:
    return np.ones(len(rewards), bool)


def advantages(name: str, rewards, valid=None) -> np.ndarray:
    return advantages_of(name, np.asarray(rewards, np.float64), all_valid(rewards) if valid is None else valid)


def random_rewards(rng: np.random.Generator, kind: str, samples: int) -> np.ndarray:
    match kind:
        case "success or failure":
            return rng.integers(0, 2, samples).astype(float)
        case "eighths":
            return rng.integers(-16, 17, samples) / 8
        case "gaussian":
            return rng.normal(size=samples)
        case "one outlier":
            rewards = np.zeros(samples)
            rewards[rng.integers(samples)] = 1000.0
            return rewards
    return 1e6 + rng.normal(size=samples)


def random_groups(seed: int, groups_of_a_kind: int = 30):
    """Rewards and validity of many groups of 1 to 16 samples, some with tombstones."""
    rng = np.random.default_rng(seed)
    for kind in REWARD_KINDS:
        for _ in range(groups_of_a_kind):
            samples = int(rng.integers(1, 17))
            yield random_rewards(rng, kind, samples), rng.random(samples) < rng.choice([0.5, 0.9, 1.0])


# Worked examples


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("grpo", [1, 0, 0, 1], [0.866024, -0.866024, -0.866024, 0.866024]),
        ("grpo", [2, 2, 2, 2], [0, 0, 0, 0]),
        ("grpo", [0, 0.5, 1, 3], [-0.855527, -0.475293, -0.095059, 1.425878]),
        ("rloo", [1, 0, 0, 1], [0.666667, -0.666667, -0.666667, 0.666667]),
        ("rloo", [2, 2, 2, 2], [0, 0, 0, 0]),
        ("rloo", [0, 0.5, 1, 3], [-1.5, -0.833333, -0.166667, 2.5]),
        ("dr_grpo", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ("dr_grpo", [2, 2, 2, 2], [0, 0, 0, 0]),
        ("dr_grpo", [0, 0.5, 1, 3], [-1.125, -0.625, -0.125, 1.875]),
        ("reinforce", [0, 0.5, 1, 3], [0, 0.5, 1, 3]),
    ],
)
def test_advantages_of_a_worked_group(name, rewards, expected):
    np.testing.assert_allclose(advantages(name, rewards), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [0.707106, 0, -0.707106, 0]),
        ("dr_grpo", [1, 0, -1, 0]),
        ("rloo", [2, 0, -2, 0]),
        ("reinforce", [3, 0, 1, 0]),
    ],
)
def test_a_tombstone_is_not_a_failure_of_the_policy_and_leaves_the_baseline_alone(name, expected):
    # Samples 1 and 3 are tombstones. Counted as reward 0 they would make the baseline 1 and push sample 2 nowhere.
    valid = np.array([True, False, True, False])
    np.testing.assert_allclose(advantages(name, [3.0, 0.0, 1.0, 0.0], valid), expected, atol=1e-6)


# The contract of the family


def test_the_table_holds_exactly_the_names_of_the_recipe():
    assert set(ADVANTAGES) == set(get_args(AlgorithmSection.model_fields["advantage"].annotation))


@every_advantage
def test_every_advantage_is_finite_float32_and_one_a_sample(name):
    for rewards, valid in random_groups(seed=0):
        result = advantages(name, rewards, valid)
        assert result.dtype == np.float32
        assert result.shape == rewards.shape
        assert np.isfinite(result).all()


@every_advantage
def test_inputs_are_not_changed(name):
    rewards, valid = np.array([1.0, 2.0, 4.0]), np.array([True, True, False])
    advantages(name, rewards, valid)
    assert rewards.tolist() == [1.0, 2.0, 4.0]
    assert valid.tolist() == [True, True, False]


@every_advantage
def test_a_tombstone_has_advantage_zero_and_its_reward_is_never_read(name):
    for rewards, valid in random_groups(seed=1):
        poisoned = np.where(valid, rewards, np.nan)
        result = advantages(name, poisoned, valid)
        assert not result[~valid].any()
        np.testing.assert_array_equal(result, advantages(name, rewards, valid))


@every_advantage
def test_valid_samples_have_the_advantages_of_a_group_without_the_tombstones(name):
    for rewards, valid in random_groups(seed=2):
        np.testing.assert_array_equal(advantages(name, rewards, valid)[valid], advantages(name, rewards[valid]))


@every_advantage
@pytest.mark.parametrize("samples", [1, 8])
def test_a_group_of_tombstones_only_is_all_zero(name, samples):
    result = advantages(name, np.full(samples, np.nan), np.zeros(samples, bool))
    assert result.tolist() == [0.0] * samples


@every_advantage
@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
def test_a_valid_reward_that_is_not_finite_is_refused_by_its_sample(name, reward):
    with pytest.raises(ValueError, match="sample 2"):
        advantages(name, [0.0, 1.0, reward, 1.0])


@every_advantage
@pytest.mark.parametrize(
    ("rewards", "valid"),
    [
        (np.zeros((2, 4)), np.ones((2, 4), bool)),
        (np.zeros(4), np.ones(3, bool)),
        (np.zeros(4), np.ones(4)),
    ],
    ids=["two groups at once", "lengths differ", "valid is not bool"],
)
def test_what_is_not_one_group_is_refused(name, rewards, valid):
    with pytest.raises(ValueError, match="must be of one group"):
        advantages(name, rewards, valid)


@every_advantage
def test_advantages_follow_their_samples_when_the_group_is_reordered(name):
    rng = np.random.default_rng(3)
    for rewards, valid in random_groups(seed=3):
        order = rng.permutation(len(rewards))
        moved = advantages(name, rewards[order], valid[order])
        np.testing.assert_allclose(moved, advantages(name, rewards, valid)[order], rtol=1e-5, atol=1e-6)


@every_advantage
def test_a_higher_reward_never_has_a_lower_advantage(name):
    for rewards, valid in random_groups(seed=4):
        by_reward = advantages(name, rewards, valid)[valid][np.argsort(rewards[valid], kind="stable")]
        assert (np.diff(by_reward) >= 0).all()


def test_an_unknown_name_is_refused_with_those_that_exist():
    with pytest.raises(UserError, match=r"'gae'.*'dr_grpo', 'grpo', 'reinforce', 'rloo'"):
        advantages("gae", [0.0, 1.0])


# Laws of the baselines


@every_baseline
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -0.1, 1 / 3, 1e-9, 1e9 + 0.1, 1e300])
@pytest.mark.parametrize("samples", [1, 2, 3, 7, 8, 16])
def test_equal_rewards_give_zero_advantage_exactly(name, reward, samples):
    assert advantages(name, [reward] * samples).tolist() == [0.0] * samples


@every_baseline
def test_equal_rewards_among_tombstones_give_zero_advantage_exactly(name):
    valid = np.array([True, False, True, True, False])
    assert advantages(name, [0.1, 5.0, 0.1, 0.1, -5.0], valid).tolist() == [0.0] * 5


@every_baseline
def test_one_valid_sample_has_no_baseline_and_learns_nothing(name):
    assert advantages(name, [5.0, 1.0, 1.0], np.array([True, False, False])).tolist() == [0.0] * 3


@every_baseline
def test_shifting_all_rewards_changes_no_bit(name):
    # Eighths and whole shifts are exact in float64, so nothing is left to rounding.
    rng = np.random.default_rng(5)
    for _ in range(50):
        rewards = random_rewards(rng, "eighths", int(rng.integers(1, 17)))
        shift = float(rng.integers(-(2**20), 2**20))
        np.testing.assert_array_equal(advantages(name, rewards + shift), advantages(name, rewards))


@every_baseline
def test_advantages_of_a_group_sum_to_zero(name):
    for rewards, valid in random_groups(seed=6):
        result = advantages(name, rewards, valid).astype(np.float64)
        assert abs(result.sum()) <= 1e-6 * np.abs(result).sum()


@every_baseline
def test_the_sign_says_whether_a_reward_is_above_the_mean(name):
    for rewards, valid in random_groups(seed=7):
        exact = np.unique(rewards[valid]).size <= 1 or np.isin(rewards[valid] * 8, np.arange(-16, 17)).all()
        if exact:
            above = np.sign(rewards[valid] * valid.sum() - rewards[valid].sum())
            found = advantages(name, rewards, valid)[valid]
            assert (np.sign(found)[above != 0] == above[above != 0]).all()
            assert (np.abs(found)[above == 0] < 1e-6).all()


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "reinforce"])
def test_without_a_deviation_advantages_scale_with_the_rewards(name):
    for rewards, valid in random_groups(seed=8):
        np.testing.assert_array_equal(advantages(name, 4 * rewards, valid), 4 * advantages(name, rewards, valid))


def test_grpo_does_not_depend_on_the_scale_of_the_rewards():
    for rewards, valid in random_groups(seed=9):
        if valid.any() and np.ptp(rewards[valid]) > 0.1:
            ours, scaled = advantages("grpo", rewards, valid), advantages("grpo", 1000 * rewards, valid)
            np.testing.assert_allclose(scaled, ours, rtol=1e-4)


def test_grpo_has_sample_deviation_one():
    for rewards, valid in random_groups(seed=10):
        if valid.any() and np.ptp(rewards[valid]) > 0.1:
            assert np.std(advantages("grpo", rewards, valid)[valid], ddof=1) == pytest.approx(1.0, rel=1e-4)


def test_grpo_of_rewards_that_differ_by_rounding_only_stays_small():
    assert np.abs(advantages("grpo", [0.1 + 0.2, 0.3, 0.3, 0.3])).max() < 1e-9


def test_rloo_subtracts_the_mean_of_the_other_samples():
    for rewards, valid in random_groups(seed=11):
        kept = rewards[valid]
        if kept.size >= 2:
            others = [np.delete(kept, i).mean() for i in range(kept.size)]
            np.testing.assert_allclose(
                advantages("rloo", rewards, valid)[valid], kept - others, rtol=1e-6, atol=1e-7 * np.ptp(kept) + 1e-9
            )


def test_reinforce_learns_from_equal_rewards_and_from_one_sample():
    assert advantages("reinforce", [0.5]).tolist() == [0.5]
    assert advantages("reinforce", [2.0, 2.0, 2.0]).tolist() == [2.0, 2.0, 2.0]
