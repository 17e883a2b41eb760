"""Saved shards alone remake a run's weights, bit for bit; or train something else on the same trajectories."""

from __future__ import annotations

from pathlib import Path

import pytest

from jax_core.policies import PolicyStore
from pipelines.evaluate import open_run
from pipelines.replay import ReplayedStep, changed_recipe, replay
from runners import colocated
from schemas import run_layout
from schemas.errors import DamagedDataError, UserError
from schemas.metrics import read_metrics
from schemas.store import RunStore
from stages.runtime import Runtime, release
from stages.shards import frozen_step
from tests.pipelines.tiny_runs import STEPS, copied, share_parts, tiny_recipe

RECIPE = tiny_recipe()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        share_parts(patch)
        run = tmp_path_factory.mktemp("finished") / "run"
        colocated.run(RECIPE, run)
        return run


@pytest.fixture
def shared(finished: Path, tmp_path: Path) -> Runtime:
    """A copy of a finished run of 4 steps, which a test may damage."""
    run = copied(finished, tmp_path / "run")
    release(run)
    return open_run(run)


def test_an_unchanged_replay_ends_in_the_same_bits_at_every_version(shared: Runtime) -> None:
    seen: list[ReplayedStep] = []
    result = replay(shared, RECIPE, report=seen.append)
    assert result.identical and result.distance == 0.0 and result.changes == ()
    assert [step.version for step in result.compared] == [1, 2, 3, 4]
    assert [step.digest for step in result.steps] == [shared.policies.commit(v).digest for v in range(1, STEPS + 1)]
    assert len({step.digest for step in result.steps}) == STEPS  # else equality would mean nothing
    assert list(result.steps) == seen


def test_a_replay_needs_no_prompts_pins_or_metrics_and_leaves_the_run_as_it_was(shared: Runtime) -> None:
    for key in [*shared.store.list("pins"), *shared.store.list("metrics")]:
        shared.store.delete(key)
    before = {key: shared.store.get(key) for key in shared.store.list("")}
    assert replay(shared, RECIPE).identical
    assert {key: shared.store.get(key) for key in shared.store.list("")} == before


def test_another_learning_rate_trains_other_weights_on_the_same_trajectories(shared: Runtime) -> None:
    recipe, changes = changed_recipe(RECIPE, ["trainer.optimizer.learning_rate=0.003"])
    result = replay(shared, recipe)
    assert changes == list(result.changes) == ["trainer.optimizer.learning_rate: 0.01 -> 0.003"]
    assert not result.identical and result.distance is not None and 0 < result.distance < 1
    first = result.first_difference
    assert first is not None and first.version == 1
    # The first step's loss is of the same weights on the same data; only its update differs.
    assert first.metrics["trainer/loss"] == first.recorded_metrics["trainer/loss"]


def test_another_advantage_changes_the_loss_of_the_first_step(shared: Runtime) -> None:
    recipe, _ = changed_recipe(RECIPE, ["algorithm.advantage=dr_grpo"])
    first = replay(shared, recipe).steps[0]
    assert first.metrics["trainer/loss"] != first.recorded_metrics["trainer/loss"]


def test_a_change_without_effect_on_the_weights_is_still_identical(shared: Runtime) -> None:
    recipe, changes = changed_recipe(RECIPE, ["trainer.checkpoint_every=1"])
    assert changes and replay(shared, recipe).identical


@pytest.mark.parametrize("override", ["sampling.temperature=0.5", "rollout.max_lag=3", "seed=2", "name=other"])
def test_what_the_trajectories_were_made_with_cannot_change(override: str) -> None:
    with pytest.raises(UserError, match="samples nothing") as caught:
        changed_recipe(RECIPE, [override])
    assert caught.value.offender.startswith(override.split("=")[0])
    assert "algorithm.* and trainer.*" in caught.value.way_out


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"Did you mean algorithm\.advantage"):
        changed_recipe(RECIPE, ["algorithm.advantge=rloo"])


@pytest.mark.parametrize("override", ["algorithm.advantage", "=3", "seed.x=3"])
def test_what_is_no_override_is_refused(override: str) -> None:
    with pytest.raises(UserError):
        changed_recipe(RECIPE, [override])


def test_more_steps_than_were_sampled_are_refused(shared: Runtime) -> None:
    recipe, _ = changed_recipe(RECIPE, ["trainer.steps=9"])
    with pytest.raises(UserError, match="trajectories of 4 steps"):
        replay(shared, recipe)


def test_fewer_steps_stop_sooner(shared: Runtime) -> None:
    recipe, _ = changed_recipe(RECIPE, ["trainer.steps=2"])
    result = replay(shared, recipe)
    assert [step.version for step in result.steps] == [1, 2]
    assert result.identical  # the learning rate is constant in this recipe


def test_rows_shorter_than_the_saved_ones_are_refused(shared: Runtime) -> None:
    recipe = RECIPE.model_copy(update={"trainer": RECIPE.trainer.model_copy(update={"row_tokens": 20})})
    with pytest.raises(UserError, match="rows of 24 tokens"):
        replay(shared, recipe)


def test_a_damaged_shard_is_named_and_nothing_is_trained_on_it(shared: Runtime) -> None:
    listed = frozen_step(shared.store, 2)
    assert listed is not None
    data = bytearray(shared.store.get(listed.shards[0].key))
    data[len(data) // 2] ^= 1
    shared.store.put(listed.shards[0].key, bytes(data))
    seen: list[ReplayedStep] = []
    with pytest.raises(DamagedDataError) as caught:
        replay(shared, RECIPE, report=seen.append)
    assert caught.value.offender == listed.shards[0].key
    assert [step.version for step in seen] == [1, 2]


def test_a_shard_that_is_gone_is_named(shared: Runtime) -> None:
    listed = frozen_step(shared.store, 0)
    assert listed is not None
    shared.store.delete(listed.shards[1].key)
    with pytest.raises(DamagedDataError, match="is gone") as caught:
        replay(shared, RECIPE)
    assert caught.value.offender == listed.shards[1].key


def test_a_run_that_stopped_early_is_replayed_as_far_as_it_went(shared: Runtime) -> None:
    for step in (2, 3):
        shared.store.delete(run_layout.step_list(step))
    result = replay(shared, RECIPE)
    assert [step.version for step in result.steps] == [1, 2] and result.identical


def test_a_run_without_a_trained_step_has_nothing_to_replay(shared: Runtime) -> None:
    shared.store.delete(run_layout.step_list(0))
    with pytest.raises(UserError, match="nothing to replay"):
        replay(shared, RECIPE)


def test_kept_weights_and_metrics_are_a_run_directory_of_their_own(shared: Runtime, tmp_path: Path) -> None:
    recipe, _ = changed_recipe(RECIPE, ["algorithm.advantage=dr_grpo"])
    to = RunStore.open(tmp_path / "to")
    result = replay(shared, recipe, to=to)
    kept = PolicyStore(to)
    assert kept.latest() == STEPS
    assert [kept.commit(v).digest for v in range(1, STEPS + 1)] == [step.digest for step in result.steps]
    assert open_run(tmp_path / "to").recipe == recipe
    assert [event.step for event in read_metrics(to, "train")] == list(range(STEPS))
    assert to.exists(run_layout.REPLAY)


def test_an_occupied_directory_is_not_written_to(shared: Runtime) -> None:
    before = shared.store.list("")
    with pytest.raises(UserError, match="is not empty"):
        replay(shared, RECIPE, to=shared.store)
    assert shared.store.list("") == before


def test_damaged_weights_of_the_run_hide_no_verdict(shared: Runtime) -> None:
    for key in shared.store.list(run_layout.policy(STEPS)):
        if not key.endswith("COMMIT.json"):
            shared.store.delete(key)
    result = replay(shared, RECIPE)
    assert result.identical and result.distance is None
