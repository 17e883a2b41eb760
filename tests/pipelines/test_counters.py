"""What the stages counted for Beam is what they wrote into the run directory, on every runner; and a job that was
stopped in its runner leaves a run that is resumed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.metrics import MetricsFilter
from apache_beam.runners.runner import PipelineResult

from runners import colocated
from runners.generator import generate
from runners.ledger import TRAINED, ledger_of
from runners.profiles import PROFILES
from runners.run_directory import prepare_run
from schemas import run_layout
from schemas.errors import UserError
from schemas.metrics import MetricEvent, read_metrics
from schemas.recipe import Recipe
from schemas.records import Rollout
from schemas.store import RunStore
from stages.prompts.datasets import DATA_VARIABLE
from stages.prompts.shares import Share
from stages.reward.base import RewardKind, RewardOptions
from stages.reward.kinds import REWARDS
from stages.runtime import Runtime, release
from stages.train import train_ready_steps
from tests.pipelines import placed
from tests.pipelines.placed import wait_until
from tests.pipelines.tiny_runs import ELEMENTS, STEPS, begin, share_parts, tiny_recipe

# A counter of a stage, and what of the run directory it equals: the sum of a metric, or a stage's number of events.
AGREE = {
    ("AdmitPrompts", "out-admitted"): "prompts",
    ("AdmitPrompts", "deferrals"): "prompts/deferrals",
    ("Rollout", "in-prompts"): "prompts/groups",
    ("Rollout", "out-trajectories"): "rollout/trajectories",
    ("Rollout", "failed-trajectories"): "rollout/failed_trajectories",
    ("Rollout", "sampled-tokens"): "rollout/sampled_tokens",
    ("Reward", "in-trajectories"): "reward/trajectories",
    ("Reward", "failed-trajectories"): "reward/failed_trajectories",
    ("GroupByPrompt", "in-rollouts"): "reward/trajectories",
    ("GroupByPrompt", "dropped-duplicates"): "group/duplicates",
    ("GroupByPrompt", "out-groups"): "group/groups",
    ("GroupByPrompt", "out-tombstones"): "group/tombstones",
    ("Pack", "in-groups"): "group/groups",
    ("Pack", "out-rows"): "pack/rows",
    ("Pack", "out-tokens"): "pack/tokens",
    ("Pack", "unplaced-trajectories"): "pack/unplaced_trajectories",
    ("WriteShards", "in-trajectories"): "shards/trajectories",
    ("WriteShards", "in-tokens"): "shards/tokens",
    ("WriteShards", "written"): "shards",
    ("WriteShards", "out-bytes"): "shards/bytes",
    ("WriteShards", "dead-letters"): "shards/dead_letters",
    ("Train", "in-shards"): "shards",
    ("Train", "out-steps"): "train",
    ("Train", "trained-tokens"): "trainer/trained_tokens",
    ("Train", "trained-groups"): "trainer/trained_groups",
    ("Train", "dropped-too-old-groups"): "trainer/too_old_groups",
}
OF_COLOCATED = {("WarmStart", "published"), *(key for key in AGREE if key[0] == "Train")}
FAILING = 2  # sample of each group whose reward fails
AHEAD = tiny_recipe(rollout={"max_lag": STEPS - 1}, evaluation={"every": 0})  # version 0 may sample everything


@pytest.fixture(autouse=True)
def one_reward_of_each_group_fails(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    def judge(rollout: Rollout) -> float:
        if rollout.id.sample_index == FAILING:
            raise OSError("the judge is gone")
        return len(rollout.tokens) + rollout.id.sample_index / 10

    share_parts(monkeypatch)
    monkeypatch.setitem(REWARDS, "environment_return", RewardKind(RewardOptions, lambda options, recipe: judge))
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path_factory.getbasetemp() / "counters-data"))


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[PipelineResult]:
    """The results of all pipelines that run."""
    kept: list[PipelineResult] = []
    usual = beam.Pipeline.run

    def run(pipeline: beam.Pipeline, *arguments: Any, **options: Any) -> PipelineResult:
        kept.append(usual(pipeline, *arguments, **options))
        return kept[-1]

    monkeypatch.setattr(beam.Pipeline, "run", run)
    return kept


def counted(results: Sequence[PipelineResult]) -> Mapping[tuple[str, str], int]:
    """What all pipelines counted together, by stage and name."""
    total: Counter[tuple[str, str]] = Counter()
    for result in results:
        for counter in result.metrics().query(MetricsFilter())["counters"]:
            name = counter.key.metric
            if name.namespace.startswith("stages."):
                total[name.namespace.rpartition(".")[2], name.name] += counter.committed
    return total


def recorded(events: Sequence[MetricEvent], what: str) -> float:
    if "/" in what:
        return sum(event.values[what] for event in events if what in event.values)
    return sum(event.stage == what for event in events)


def assert_they_agree(results: Sequence[PipelineResult], run: Path, *, but: set[tuple[str, str]]) -> None:
    events = read_metrics(RunStore.open(run))
    counters = counted(results)
    assert set(counters) - {("WarmStart", "published")} <= set(AGREE), "a counter that nothing is held against"
    expected = {key: recorded(events, what) for key, what in AGREE.items() if key not in but}
    assert {key: counters.get(key, 0) for key in expected} == expected
    # Something was dropped, and something failed: else zeros would agree.
    assert expected["Reward", "failed-trajectories"] == expected["Pack", "unplaced-trajectories"] > 0


def prism_flags(name: str) -> list[str]:
    prism = placed.placement(name).prism
    return [f"--prism_location={prism}"] if prism else []


def begun(run: Path, recipe: Recipe) -> None:
    prepare_run(RunStore.open(run), recipe, resume=False)
    begin(run, recipe)
    release(run)


def test_the_counters_of_a_colocated_run_are_its_metrics(tmp_path: Path, results: list[PipelineResult]) -> None:
    colocated.run(AHEAD, tmp_path)
    assert_they_agree(results, tmp_path, but=set())
    assert counted(results)["Train", "out-steps"] == STEPS


@pytest.mark.parametrize("generators", [1, 2])
def test_the_counters_of_all_generators_together_are_the_metrics_of_the_run(
    generators: int, tmp_path: Path, results: list[PipelineResult]
) -> None:
    begun(tmp_path, AHEAD)
    for index in range(generators):
        generate(tmp_path, PROFILES["local"], Share(index, generators))
    assert len(results) == generators
    assert_they_agree(results, tmp_path, but=OF_COLOCATED)
    assert counted(results)["WriteShards", "written"] == STEPS * ELEMENTS


def test_where_elements_go_side_by_side_prism_counts_no_more_than_there_is(
    tmp_path: Path, results: list[PipelineResult]
) -> None:
    """Fewer it may count: of bundles that end before it has learned a counter's name it keeps one (2.77.0)."""
    flags = prism_flags("prism")
    begun(tmp_path, AHEAD)
    generate(tmp_path, PROFILES["prism"], beam_flags=flags)
    events = read_metrics(RunStore.open(tmp_path))
    assert recorded(events, "shards") == STEPS * ELEMENTS
    for key, number in counted(results).items():
        assert 0 <= number <= recorded(events, AGREE[key]), key


@pytest.mark.parametrize("name", ["local", "prism"])
def test_counters_are_the_metrics_also_where_every_element_waits_for_the_one_before(
    name: str, tmp_path: Path, results: list[PipelineResult]
) -> None:
    recipe = tiny_recipe(rollout={"elements_per_step": 1}, evaluation={"every": 0})
    flags = prism_flags(name)
    begun(tmp_path, recipe)
    with trainer_beside(tmp_path, recipe):
        generate(tmp_path, PROFILES[name], beam_flags=flags)
    assert_they_agree(results, tmp_path, but=OF_COLOCATED)
    assert counted(results)["AdmitPrompts", "deferrals"] >= STEPS - 1


@contextmanager
def trainer_beside(run: Path, recipe: Recipe) -> Iterator[None]:
    """Trains in a thread, with a Runtime of its own, while the context lasts."""
    shared, ended = Runtime(run, recipe), threading.Event()

    def train() -> None:
        while not ended.wait(0.02):
            train_ready_steps(shared)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    yield
    ended.set()
    thread.join()


# Stopped in the runner


@pytest.mark.slow
def test_a_job_that_is_cancelled_in_its_runner_says_so_and_the_run_is_resumed(
    tmp_path: Path, results: list[PipelineResult]
) -> None:
    placement, recipe, run = placed.placement("prism"), tiny_recipe(evaluation={"every": 0}), tmp_path / "run"
    begun(run, recipe)
    last_of_step_0 = run / run_layout.manifest(0, ELEMENTS - 1)

    def cancel() -> None:
        wait_until(last_of_step_0.exists)  # after it the source waits for a policy that nobody makes
        results[0].cancel()

    canceller = threading.Thread(target=cancel, daemon=True)
    canceller.start()
    with pytest.raises(UserError, match=r"rollout-1-of-1: its job was stopped \(CANCELLED\)"):
        generate(run, PROFILES["prism"], beam_flags=prism_flags("prism"))
    canceller.join()
    placement.run(recipe, run, resume=True)
    ledger = ledger_of(RunStore.open(run))
    assert (ledger.problems, set(ledger.totals)) == ((), {TRAINED})
