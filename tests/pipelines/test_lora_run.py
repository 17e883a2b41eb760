"""A run that trains adapters keeps every promise of one that trains all weights, and stores adapters alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_core.lora import adapted_paths, init_adapters, merge
from jax_core.models.decoder import init_params, param_shapes
from pipelines.evaluate import evaluate_run, open_run, run_results
from pipelines.replay import replay
from runners import colocated
from schemas import run_layout
from schemas.errors import UserError
from schemas.metrics import read_metrics
from stages.runtime import Runtime, release
from tests.pipelines.tiny_runs import (
    STEPS,
    Killed,
    Outcome,
    kill_at,
    outcome,
    quarantined,
    share_parts,
    tiny_recipe,
)

LORA = {"rank": 2, "alpha": 8.0, "targets": ("*/attention/*", "*/mlp/down")}
RECIPE = tiny_recipe(lora=LORA, rollout={"max_lag": 0}, evaluation={"every": 0, "test_prompts": 4, "samples": 2})


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    share_parts(monkeypatch, trainer=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that nothing disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        share_parts(patch, trainer=False)
        run = tmp_path_factory.mktemp("finished") / "run"
        colocated.run(RECIPE, run)
        yield run


@pytest.fixture(scope="module")
def reference(finished: Path) -> Outcome:
    return outcome(finished)


@pytest.fixture
def shared(finished: Path) -> Runtime:
    release(finished)
    return open_run(finished)


def shapes_of(tree) -> dict[str, tuple[int, ...]]:
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_every_step_trains_other_adapters(reference: Outcome) -> None:
    # Else the equalities below would hold for a run that does nothing.
    assert len(set(reference.policies)) == STEPS + 1


def test_a_policy_is_its_adapters_and_nothing_else(shared: Runtime) -> None:
    adapters = init_adapters(param_shapes(shared.model_config), RECIPE.lora, RECIPE.seed)
    names = {"/".join(path) for path, _ in adapted_paths(adapters)}
    assert names == {f"blocks/attention/{name}" for name in ("q", "k", "v", "out")} | {"blocks/mlp/down"}
    numbers = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    for version in range(STEPS + 1):
        assert (shared.policies.commit(version).parameters, shared.policies.commit(version).bytes) == (
            numbers,
            4 * numbers,
        )
    for version in shared.policies.versions():
        assert shapes_of(shared.policies.load(version)) == shapes_of(adapters)


def test_the_trainers_state_is_of_adapters_and_nothing_else(shared: Runtime) -> None:
    adapters = shared.policies.load(STEPS)
    state = shared.trainer.init(adapters)
    stored = shared.trainer_states.load(STEPS, like=shared.trainer.state_tree(state))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(stored)]
    assert sum(leaf.size for leaf in arrays if leaf.ndim) == 3 * numbers  # the adapters and Adam's two moments of them
    assert sum(leaf.ndim == 0 for leaf in arrays) == 1  # and the count of updates


def test_all_files_of_a_policy_take_less_room_than_the_model(finished: Path, shared: Runtime) -> None:
    model = 4 * sum(leaf.size for leaf in jax.tree.leaves(param_shapes(shared.model_config)))
    for version in shared.policies.versions():
        files = (finished / run_layout.policy(version)).rglob("*")
        assert 0 < sum(file.stat().st_size for file in files if file.is_file()) < model


def test_what_a_policy_samples_with_is_the_base_with_its_adapters(shared: Runtime) -> None:
    base = init_params(shared.model_config, RECIPE.seed)
    first, last = shared.policy_cache.get(0), shared.policy_cache.get(STEPS)
    expected = merge(base, shared.policies.load(STEPS), 8.0)
    for tree, other in ((first, base), (last, expected)):
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), tree, other))
    changed = jax.tree.map(lambda a, b: bool((np.asarray(a) != np.asarray(b)).any()), base, last)
    assert changed["blocks"]["attention"]["q"] and changed["blocks"]["mlp"]["down"]
    assert not changed["blocks"]["mlp"]["up"] and not changed["embedding"]


def test_every_ratio_of_an_on_policy_step_is_one(shared: Runtime) -> None:
    trained = [event.values for event in read_metrics(shared.store, "train")]
    assert len(trained) == STEPS and all(values["trainer/trained_tokens"] > 0 for values in trained)
    for values in trained:
        assert values["trainer/lag_steps/max"] == 0
        assert values["trainer/sampler_logprob_gap_nats/max"] <= 1e-5
        assert values["trainer/ratio/max"] == pytest.approx(1.0, abs=1e-5)


def test_two_runs_of_one_recipe_are_equal_bit_for_bit(reference: Outcome, tmp_path: Path) -> None:
    colocated.run(RECIPE, tmp_path / "again")
    assert outcome(tmp_path / "again") == reference


@pytest.mark.parametrize(("point", "passing"), [("policy-before-commit", 4), ("before-checkpoint", 1)])
def test_a_run_that_is_killed_and_resumed_ends_as_if_it_had_not_been(
    point: str, passing: int, reference: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disarm = kill_at(monkeypatch, point, passing)
    with pytest.raises(Killed):
        colocated.run(RECIPE, tmp_path)
    disarm()
    colocated.run(RECIPE, tmp_path, resume=True)
    assert outcome(tmp_path) == reference
    assert not quarantined(tmp_path)


def test_a_replay_ends_in_the_same_bits_at_every_version(shared: Runtime) -> None:
    result = replay(shared, RECIPE)
    assert result.identical and result.distance == 0.0
    assert [step.version for step in result.compared] == list(range(1, STEPS + 1))


def test_its_policies_are_evaluated_like_any_others(shared: Runtime) -> None:
    evaluation = evaluate_run(shared)
    assert (evaluation.version, evaluation.digest) == (STEPS, shared.policies.commit(STEPS).digest)
    assert evaluation.parts == evaluate_run(shared).parts
    assert [part.total.failed for part in evaluation.parts] == [0, 0]
    assert [result.label for result in run_results(shared).results] == [
        "random weights",
        f"after RL ({STEPS} steps)",
        "scripted rule",
    ]


def test_a_warm_start_trains_adapters_too(tmp_path: Path) -> None:
    optimizer = {"schedule": "constant", "learning_rate": 1e-2}
    warm_start = {"steps": 4, "demonstrations": 4, "batch": 4, "optimizer": optimizer}  # all of them at every step
    recipe = tiny_recipe(lora=LORA, trainer={"steps": 1}, warm_start=warm_start)
    colocated.run(recipe, tmp_path)
    shared = open_run(tmp_path)
    assert shared.policies.commit(0).source == "warm_start"
    warmed = dict(adapted_paths(shared.policies.load(0)))
    assert all(np.any(pair["b"]) for pair in warmed.values())
    losses = [event.values["warm_start/loss"] for event in read_metrics(shared.store, "warm_start")]
    assert losses[-1] < losses[0]


def test_targets_that_name_nothing_are_refused_before_there_is_a_run(tmp_path: Path) -> None:
    recipe = tiny_recipe(lora=LORA | {"targets": ("*/attention/*", "*/q_proj")})
    with pytest.raises(UserError, match=r"names no matrix of this model.*attention/q"):
        colocated.run(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()
