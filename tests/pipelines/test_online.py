"""The closed loop keeps its promises: the lag bound, equal bits, and a killed run that ends as if it had not been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jax_core import faults
from runners import colocated
from schemas import run_layout
from schemas.errors import DamagedDataError, UserError
from schemas.metrics import read_metrics
from schemas.recipe import Recipe
from schemas.recipe_io import recipe_to_json
from schemas.store import RunStore
from stages.prompts import source
from stages.prompts.datasets import DATA_VARIABLE
from stages.runtime import Runtime, release
from stages.shards import list_manifests
from stages.train import StepReport, train_ready_steps
from tests.pipelines.tiny_runs import (
    ELEMENTS,
    STEPS,
    Killed,
    Outcome,
    begin,
    kill_at,
    outcome,
    quarantined,
    sample_everything,
    share_parts,
    tiny_recipe,
)

RECIPE = tiny_recipe()
STAGES = ("prompts", "rollout", "reward", "group", "pack", "shards")  # which record every element


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    share_parts(monkeypatch)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run that nothing disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        share_parts(patch)
        run = tmp_path_factory.mktemp("reference") / "run"
        colocated.run(RECIPE, run)
        return outcome(run)


def test_every_step_makes_other_weights_from_its_own_shards(reference: Outcome) -> None:
    # Else the equalities below would hold for a run that does nothing.
    assert len(set(reference.policies)) == STEPS + 1
    assert len(set(reference.shards)) == STEPS * ELEMENTS
    assert reference.steps == tuple(reference.shards[i : i + ELEMENTS] for i in range(0, STEPS * ELEMENTS, ELEMENTS))


def test_two_runs_of_one_recipe_are_equal_bit_for_bit(reference: Outcome, tmp_path: Path) -> None:
    colocated.run(RECIPE, tmp_path / "again")
    assert outcome(tmp_path / "again") == reference


def test_replaying_every_bundle_changes_no_shard_and_no_weight(reference: Outcome, tmp_path: Path) -> None:
    colocated.run(RECIPE, tmp_path / "run", beam_flags=["--direct_runner_bundle_repeat=1"])
    assert outcome(tmp_path / "run") == reference
    assert not quarantined(tmp_path / "run")


# Where a run of 4 steps of 2 elements is killed: (point, its passing). The trainer's state is saved at versions 2, 4.
CRASHES = [
    ("shard-before-data", 4),
    ("shard-before-manifest", 3),
    ("after-manifest", 3),
    ("after-manifest", 4),
    ("before-step-list", 3),
    ("after-step-list", 3),
    ("policy-before-rename", 1),
    ("policy-before-commit", 4),
    ("after-commit", 4),
    ("before-checkpoint", 1),
    ("trainer-before-rename", 1),
    ("trainer-before-commit", 1),
    ("after-trainer-commit", 1),
    ("after-checkpoint", 2),
]


@pytest.mark.parametrize(("point", "passing"), CRASHES)
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
    recorded = [(e.stage, e.step, e.labels.get("element")) for e in read_metrics(RunStore.open(tmp_path))]
    assert sorted(recorded, key=str) == sorted(
        [
            *(("train", step, None) for step in range(STEPS)),
            *((stage, step, element) for stage in STAGES for step in range(STEPS) for element in range(ELEMENTS)),
        ],
        key=str,
    )


def test_a_run_that_is_killed_at_every_step_ends_all_the_same(
    reference: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt in range(STEPS + 1):  # each publishes one version and dies
        disarm = kill_at(monkeypatch, "after-commit", 1)
        with pytest.raises(Killed):
            colocated.run(RECIPE, tmp_path, resume=attempt > 0)
        disarm()
    assert outcome(tmp_path) == reference


@pytest.mark.slow
@pytest.mark.parametrize("crash", ["shard-before-manifest:3", "policy-before-commit:4", "before-checkpoint:1"])
def test_a_process_that_is_killed_by_the_system_is_resumed_exactly(
    crash: str, reference: Outcome, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_bytes(recipe_to_json(RECIPE))
    program = (
        "import pathlib, sys\n"
        "from runners import colocated\n"
        "from schemas.recipe_io import recipe_from_json\n"
        "colocated.run(recipe_from_json(pathlib.Path(sys.argv[1]).read_bytes(), 'recipe'), sys.argv[2])\n"
    )
    environment = os.environ | {faults.VARIABLE: crash, DATA_VARIABLE: str(tmp_path / "data")}
    run = tmp_path / "run"
    done = subprocess.run([sys.executable, "-c", program, recipe, run], env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    colocated.run(RECIPE, run, resume=True)
    assert outcome(run) == reference


def test_an_interrupted_run_raises_the_interrupt_and_can_be_resumed(reference: Outcome, tmp_path: Path) -> None:
    def interrupt(report: StepReport) -> None:
        if report.step == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        colocated.run(RECIPE, tmp_path, after_step=[interrupt])
    colocated.run(RECIPE, tmp_path, resume=True)
    assert outcome(tmp_path) == reference


class SlowTrainer(threading.Thread):
    """Trains a step only once sampling has gone as far ahead as it may, and has been held back there."""

    def __init__(self, shared: Runtime):
        super().__init__(daemon=True)
        self._shared = shared
        self._last_step = shared.recipe.trainer.steps - 1
        self.deferred = threading.Event()  # set by the source whenever it has to wait
        shared.after_step.append(lambda report: self._wait_before(report.step + 1))

    def run(self) -> None:
        self._wait_before(0)
        train_ready_steps(self._shared)

    def _wait_before(self, step: int) -> None:
        furthest = min(step + self._shared.recipe.rollout.max_lag, self._last_step)
        while not self._is_sampled(furthest):
            time.sleep(0.01)
        self.deferred.clear()
        if furthest < self._last_step:
            self.deferred.wait()

    def _is_sampled(self, step: int) -> bool:
        return all(self._shared.store.exists(run_layout.manifest(step, element)) for element in range(ELEMENTS))


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_sampling_is_never_further_ahead_of_a_slow_trainer_than_the_lag_bound(
    max_lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 6
    recipe = tiny_recipe(rollout={"max_lag": max_lag}, trainer={"steps": steps})
    shared = begin(tmp_path, recipe)
    trainer = SlowTrainer(shared)
    defer = source._AdmitPromptsFn._defer

    def defer_and_tell(source_fn: source._AdmitPromptsFn) -> None:
        assert trainer.is_alive(), "the source waits for a trainer that is gone"
        defer(source_fn)
        trainer.deferred.set()

    monkeypatch.setattr(source._AdmitPromptsFn, "_defer", defer_and_tell)
    trainer.start()
    sample_everything(tmp_path, recipe)
    trainer.join()
    release(tmp_path)
    consumed = {event.step: event.values for event in read_metrics(shared.store, "train")}
    assert [consumed[step]["trainer/lag_steps/max"] for step in range(steps)] == [min(s, max_lag) for s in range(steps)]
    assert all(values["trainer/too_old_groups"] == 0 for values in consumed.values())
    # No policy is published while this trainer has something sampled: all lag arose in the queue.
    assert [consumed[step]["trainer/lag_in_queue_steps/mean"] for step in range(steps)] == [
        min(s, max_lag) for s in range(steps)
    ]
    assert all(values["trainer/lag_in_flight_steps/max"] == 0 for values in consumed.values())
    admitted = [event.values for event in read_metrics(shared.store, "prompts")]
    assert max(values["prompts/lag_steps"] for values in admitted) == max_lag
    # The first policy lets max_lag steps in behind step 0; each later step is waited for, at its first element.
    waited = [values for values in admitted if values["prompts/deferrals"] > 0]
    assert len(waited) == steps - 1 - max_lag
    assert all(values["prompts/deferred_seconds"] > 0 for values in waited)


def test_sampling_waits_for_the_first_policy(tmp_path: Path) -> None:
    recipe = tiny_recipe(rollout={"max_lag": STEPS - 1})
    late = threading.Timer(0.2, begin, args=(tmp_path, recipe))
    late.start()
    sample_everything(tmp_path, recipe)
    late.join()
    assert len(list_manifests(RunStore.open(tmp_path))) == STEPS * ELEMENTS


def test_a_finished_run_that_is_resumed_does_nothing(tmp_path: Path) -> None:
    colocated.run(RECIPE, tmp_path)
    events = len(read_metrics(RunStore.open(tmp_path)))
    before = outcome(tmp_path)
    reports: list[StepReport] = []
    colocated.run(RECIPE, tmp_path, resume=True, after_step=[reports.append])
    assert reports == []
    assert outcome(tmp_path) == before
    assert len(read_metrics(RunStore.open(tmp_path))) == events


def test_hooks_hear_of_the_first_policy_and_then_of_every_step(tmp_path: Path) -> None:
    heard: list[int] = []
    colocated.run(
        RECIPE,
        tmp_path,
        after_warm_start=[lambda commit: heard.append(commit.version)],
        after_step=[lambda report: heard.append(report.policy_version)],
    )
    assert heard == list(range(STEPS + 1))


def test_a_stages_error_comes_out_as_the_stage_raised_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def tear_a_shard_of_the_next_step(report: StepReport) -> None:
        store = RunStore.open(tmp_path)
        manifest = list_manifests(store, report.step)[0]
        torn = manifest.model_copy(update={"step": report.step + 1, "element_index": 0})
        store.put_new(run_layout.manifest(report.step + 1, 0), torn.to_json())

    with pytest.raises(DamagedDataError) as error:
        colocated.run(RECIPE, tmp_path, after_step=[tear_a_shard_of_the_next_step])
    assert "while running" not in str(error.value)
    assert error.value.offender.startswith("trajectories/step-00000000/0000-")
    assert error.value.__cause__ is None and error.value.__suppress_context__
    assert not caplog.records


def test_a_fault_of_ours_keeps_beams_word_of_the_step_it_happened_in(tmp_path: Path) -> None:
    def fail(report: StepReport) -> None:
        raise KeyError("ours")

    with pytest.raises(KeyError, match="while running 'Train"):
        colocated.run(RECIPE, tmp_path, after_step=[fail])


def test_an_occupied_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt"):
        colocated.run(RECIPE, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_is_only_gone_on_with_when_that_is_asked_for_and_the_recipe_is_its_own(tmp_path: Path) -> None:
    store = RunStore.open(tmp_path)
    with pytest.raises(UserError, match="no run to resume"):
        colocated.prepare_run(store, RECIPE, resume=True)
    colocated.prepare_run(store, RECIPE, resume=False)
    colocated.prepare_run(store, RECIPE, resume=True)
    with pytest.raises(UserError, match="already holds a run"):
        colocated.prepare_run(store, RECIPE, resume=False)
    other = Recipe.model_validate(RECIPE.model_dump() | {"seed": 2})
    with pytest.raises(UserError, match="seed: 1 -> 2"):
        colocated.prepare_run(store, other, resume=True)


@pytest.mark.parametrize("flag", ["--direct_num_workers=2", "--direct_running_mode=multi_threading"])
def test_more_workers_than_one_are_refused(flag: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one worker in one process"):
        colocated.run(RECIPE, tmp_path / "run", beam_flags=[flag])
    assert not (tmp_path / "run").exists()
