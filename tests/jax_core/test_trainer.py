"""The trainer's laws: packing, micro-batches and what stands off the mask change neither loss nor gradient."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jax_core.policies import TrainerStore, tree_digest
from jax_core.trainer import Trainer, plan_step
from schemas.records import tombstone
from schemas.store import RunStore
from tests.jax_core.tiny import CONFIG, content, params, random_groups, recipe, rollout

ALGORITHMS = [
    {"advantage": "grpo", "objective": "ppo_clip", "reduction": "sequence_mean_token_mean"},
    {"advantage": "dr_grpo", "objective": "ppo_clip", "reduction": "sequence_mean_token_sum_norm"},
    {"advantage": "rloo", "objective": "policy_gradient", "reduction": "token_mean"},
    {"advantage": "reinforce", "objective": "cispo", "reduction": "token_mean"},
]


def loss_and_gradient(contents, weights=None, **sections):
    trainer = Trainer(CONFIG, recipe(**sections))
    return trainer.loss_and_gradient(params() if weights is None else weights, contents, step=0)


def assert_same(one, other, relative=2e-6):
    np.testing.assert_allclose(one[0], other[0], rtol=relative, atol=1e-7)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(other[1]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=relative * scale), one[1], other[1])


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: "-".join(a.values()))
def test_packing_and_shards_change_nothing(algorithm):
    groups = random_groups(np.random.default_rng(0))
    reference = loss_and_gradient([content(groups, one_a_row=True)], algorithm=algorithm)
    assert reference[0] != 0.0
    assert_same(loss_and_gradient([content(groups)], algorithm=algorithm), reference)
    in_two = [content(groups[2:], element=1, first=2), content(groups[:2], element=0)]
    assert_same(loss_and_gradient(in_two, algorithm=algorithm), reference)


@pytest.mark.parametrize("rows", [1, 3, 32])
def test_micro_batches_change_nothing(rows):
    contents = [content(random_groups(np.random.default_rng(0)))]
    assert_same(loss_and_gradient(contents, trainer={"micro_batch_rows": rows}), loss_and_gradient(contents))


def test_the_denominator_is_the_whole_steps_not_the_micro_batches():
    """One long trajectory and three short ones: a mean of micro-batch means would weigh them alike."""
    lengths = [20, 1, 2, 1]
    groups = [[(rollout([2, 3], range(2, 2 + n), [True] * n, sample=s), float(s)) for s, n in enumerate(lengths)]]
    plan = plan_step([content(groups)], recipe().algorithm, step=0, norm=24)
    weights = {len(b.inputs): b.weight for row in plan.rows for _, b in row.branches}
    assert plan.trained_tokens == 24
    assert set(weights.values()) == {1 / 24}


def test_nan_and_infinity_off_the_mask_reach_neither_loss_nor_gradient():
    groups = random_groups(np.random.default_rng(1))
    spoilt = [
        [
            (replace(r, sampler_logprobs=np.where(r.loss_mask, r.sampler_logprobs, bad).astype(np.float32)), reward)
            for r, reward in group
        ]
        for group, bad in zip(groups, (np.nan, np.inf, -np.inf), strict=True)
    ]
    clean = loss_and_gradient([content(groups)])
    assert_same(loss_and_gradient([content(spoilt)]), clean, relative=0)


def test_a_group_of_equal_rewards_trains_nothing_and_leaves_the_denominator():
    groups = random_groups(np.random.default_rng(2))
    equal = [[(r, 0.1) for r, _ in group] for group in random_groups(np.random.default_rng(3), groups=1, samples=8)]
    mixed = [content(groups)]
    assert_same(loss_and_gradient([*mixed, content(equal, element=1, first=3)]), loss_and_gradient(mixed), relative=0)
    counted = loss_and_gradient([*mixed, content(equal, element=1, first=3)], algorithm={"equal_groups": "train"})
    assert abs(counted[0]) < abs(loss_and_gradient(mixed)[0])


def mixed_and_equal():
    """A shard of mixed groups, and one whose group agrees: it has more samples than any of the others."""
    equal = [[(r, 0.0) for r, _ in group] for group in random_groups(np.random.default_rng(3), groups=1, samples=8)]
    return [content(random_groups(np.random.default_rng(2)))], [content(equal, element=1, first=3)]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: "-".join(a.values()))
def test_equal_groups_that_count_have_the_gradient_of_computing_them_without_its_cost(algorithm, rows):
    mixed, equal = mixed_and_equal()
    plans, found = {}, {}
    for choice in ("count", "train"):
        trainer = Trainer(
            CONFIG, recipe(algorithm=algorithm | {"equal_groups": choice}, trainer={"micro_batch_rows": rows})
        )
        found[choice] = trainer.loss_and_gradient(params(), [*mixed, *equal], step=0)
        plans[choice] = plan_step([*mixed, *equal], trainer.recipe.algorithm, step=0, norm=24)
    assert len(plans["count"].rows) < len(plans["train"].rows)
    assert plans["count"].trained_tokens + plans["count"].spared_tokens == plans["train"].trained_tokens
    assert_same(found["count"], found["train"], relative=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: "-".join(a.values()))
def test_skipped_groups_differ_from_counted_ones_by_the_denominator_alone(algorithm):
    mixed, equal = mixed_and_equal()
    loss, gradient = loss_and_gradient([*mixed, *equal], algorithm=algorithm | {"equal_groups": "count"})
    skipped = loss_and_gradient([*mixed, *equal], algorithm=algorithm | {"equal_groups": "skip"})
    sizes = {
        name: [int(s.rollout.loss_mask.sum()) for c in shards for group in c.groups for s in group.samples]
        for name, shards in (("counted", [*mixed, *equal]), ("skipped", mixed))
    }
    of = sum if algorithm["reduction"] == "token_mean" else np.count_nonzero
    ratio = of(sizes["counted"]) / of(sizes["skipped"])
    assert ratio > 1.2
    assert_same((loss * ratio, jax.tree.map(lambda leaf: leaf * ratio, gradient)), skipped)


def test_a_step_of_equal_groups_that_count_moves_by_its_momentum_as_if_they_were_computed():
    mixed, equal = mixed_and_equal()
    before, _ = Trainer(CONFIG, recipe()).update(Trainer(CONFIG, recipe()).init(params()), mixed)
    after = {}
    for choice in ("skip", "count", "train"):
        after[choice], metrics = Trainer(CONFIG, recipe(algorithm={"equal_groups": choice})).update(before, equal)
        assert (metrics["trainer/micro_batches"] > 0) == (choice == "train")
    jax.tree.map(np.testing.assert_array_equal, after["count"].params, after["train"].params)
    jax.tree.map(np.testing.assert_array_equal, after["skip"].params, before.params)
    assert not np.array_equal(after["count"].params["embedding"], before.params["embedding"])


def test_an_entropy_bonus_is_so_much_less_loss_and_raises_the_entropy():
    contents = [content(random_groups(np.random.default_rng(9)))]
    trainer = {bonus: Trainer(CONFIG, recipe(algorithm={"entropy_bonus": bonus})) for bonus in (0.0, 0.5)}
    start = trainer[0.0].init(params())
    metrics = {bonus: one.update(start, contents)[1] for bonus, one in trainer.items()}
    # Under token_mean every trained token weighs the same, so the weighted entropy is the mean that is reported.
    entropy = metrics[0.0]["trainer/entropy_nats/mean"]
    assert entropy > 0.1
    np.testing.assert_allclose(
        metrics[0.5]["trainer/loss"], metrics[0.0]["trainer/loss"] - 0.5 * entropy, rtol=1e-4, atol=1e-5
    )
    after = {}
    for bonus, one in trainer.items():
        state = start
        for _ in range(5):
            state, seen = one.update(state, contents)
        after[bonus] = seen["trainer/entropy_nats/mean"]
    assert after[0.5] > after[0.0]


def test_a_tombstone_counts_in_its_group_and_trains_nothing():
    groups = random_groups(np.random.default_rng(4), groups=1, samples=5)
    failed = [(tombstone(groups[0][0][0], "it broke"), 0.0), *groups[0][1:]]
    assert_same(loss_and_gradient([content([failed])]), loss_and_gradient([content([groups[0][1:]])]), relative=0)


def test_an_update_is_the_gradient_step_that_the_optimizer_says():
    """At ratio 1, with clipping out of reach, the first Adam step moves every weight by the learning rate."""
    weights, groups = params(), random_groups(np.random.default_rng(5))
    trainer = Trainer(CONFIG, recipe(trainer={"optimizer": {"learning_rate": 0.01, "schedule": "constant"}}))
    state, metrics = trainer.update(trainer.init(weights), [content(groups)])
    _, gradient = trainer.loss_and_gradient(weights, [content(groups)], 0)

    def moved(before, after, slope):
        seen = np.abs(slope) > 1e-6
        np.testing.assert_allclose((before - after)[seen], 0.01 * np.sign(slope[seen]), rtol=0.05)

    jax.tree.map(
        moved,
        jax.tree.map(np.asarray, weights),
        jax.tree.map(np.asarray, state.params),
        jax.tree.map(np.asarray, gradient),
    )
    assert state.step == 1
    assert metrics["trainer/learning_rate"] == 0.01


def test_a_step_with_nothing_to_train_keeps_the_weights_and_still_counts():
    trainer = Trainer(CONFIG, recipe())
    start = trainer.init(params())
    equal = [[(r, 1.0) for r, _ in group] for group in random_groups(np.random.default_rng(6))]
    dead = [[(tombstone(r, "it broke"), 0.0) for r, _ in group] for group in equal]
    for groups in (equal, dead):
        state, metrics = trainer.update(start, [content(groups)])
        assert state.step == 1
        assert metrics["trainer/trained_tokens"] == 0
        jax.tree.map(np.testing.assert_array_equal, state.params, start.params)


def test_metrics_are_those_of_the_whole_step():
    """Recomputed in NumPy from the scores of every trajectory, over micro-batches of uneven content."""
    weights, groups = params(), random_groups(np.random.default_rng(7), groups=4)
    trainer = Trainer(CONFIG, recipe(trainer={"micro_batch_rows": 2}, algorithm={"equal_groups": "train"}))
    scores = trainer.score(weights, [content(groups)])
    _, metrics = trainer.update(trainer.init(weights), [content(groups)])
    made = [r for group in groups for r, _ in group]
    log_ratio = np.concatenate([(s - r.sampler_logprobs)[r.loss_mask] for s, r in zip(scores, made, strict=True)])
    assert metrics["trainer/trained_tokens"] == len(log_ratio)
    np.testing.assert_allclose(metrics["trainer/ratio/mean"], np.exp(log_ratio).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["trainer/ratio/max"], np.exp(log_ratio).max(), rtol=1e-5)
    np.testing.assert_allclose(metrics["trainer/sampler_logprob_gap_nats/mean"], np.abs(log_ratio).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["trainer/sampler_logprob_gap_nats/max"], np.abs(log_ratio).max(), rtol=1e-5)
    assert metrics["trainer/micro_batches"] > 2


def test_lag_is_counted_from_the_oldest_version_that_sampled_a_token():
    old = rollout([2, 3], [4, 5], [True, True], version=3, sample=0)
    new = rollout([2, 3], [5, 6], [True, True], version=5, sample=1)
    plan = plan_step([content([[(old, 1.0), (new, 0.0)]])], recipe().algorithm, step=5, norm=24)
    assert plan.lags.tolist() == [2, 0]


def test_lag_in_the_queue_is_counted_from_the_newest_version_at_the_commit_whatever_the_order_of_shards():
    groups = [[(rollout([2, 3], [4, 5], [True, True], version=3, sample=s), float(s)) for s in range(2)]]
    early = replace(content(groups, element=0), newest_version=3)
    late = replace(content(groups, element=1, first=1), newest_version=5)
    plan = plan_step([late, early], recipe().algorithm, step=5, norm=24)
    assert plan.queue_lags.tolist() == [2, 2, 0, 0]
    unknown = plan_step([replace(early, newest_version=None), late], recipe().algorithm, step=5, norm=24)
    assert np.isnan(unknown.queue_lags).tolist() == [True, True, False, False]


def test_every_trained_token_of_a_trajectory_has_its_advantage_and_none_else():
    #        P  P  a  E  E  a  a  E
    branch = [4, 5, 6, 7, 8, 9]
    mask = [True, False, False, True, True, False]
    groups = [[(rollout([2, 3], branch, mask, sample=0), 1.0), (rollout([2, 3], branch, mask, sample=1), 0.0)]]
    plan = plan_step([content(groups)], recipe(algorithm={"advantage": "dr_grpo"}).algorithm, step=0, norm=24)
    (_, first), (_, second) = plan.rows[0].branches
    assert first.inputs.tolist() == [3, 4, 5, 6, 7]  # the last prompt token leads; what follows the last answer is gone
    assert first.targets.tolist() == [4, 5, 6, 7, 8]
    assert first.mask.tolist() == [True, False, False, True, True]
    assert (first.advantage, second.advantage) == (0.5, -0.5)


def test_training_raises_the_probability_of_the_rewarded_answer():
    good, bad = [4, 5], [6, 7]
    groups = [
        [
            (rollout([2, 3], answer, [True, True], [-3.0, -3.0], sample=s), reward)
            for s, (answer, reward) in enumerate([(good, 1.0), (bad, 0.0)])
        ]
    ]
    trainer = Trainer(CONFIG, recipe(algorithm={"objective": "policy_gradient"}))
    state = trainer.init(params())
    before = [s.sum() for s in trainer.score(state.params, [content(groups)])]
    for _ in range(5):
        state, _ = trainer.update(state, [content(groups)])
    after = [s.sum() for s in trainer.score(state.params, [content(groups)])]
    assert after[0] > before[0]
    assert after[1] < before[1]


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_stored_and_restored_state_goes_on_bit_for_bit(moments):
    trainer = Trainer(CONFIG, recipe(trainer={"optimizer": {"moments_dtype": moments}}))
    groups, states = random_groups(np.random.default_rng(8)), TrainerStore(RunStore.in_memory())
    one, _ = trainer.update(trainer.init(params()), [content(groups)])
    states.save(1, trainer.state_tree(one))
    straight, _ = trainer.update(one, [content(groups)])
    stored = states.load(1, like=trainer.state_tree(trainer.init(params())))
    resumed, _ = trainer.update(trainer.restore(stored, 1), [content(groups)])
    assert tree_digest(trainer.state_tree(straight)) == tree_digest(trainer.state_tree(resumed))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(resumed.opt_state) if leaf.ndim} == {moments}
