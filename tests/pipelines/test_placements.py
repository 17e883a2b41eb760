"""One recipe on every placement: it ends, its ledger adds up, the lag bound holds, and any kill is survived."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import pytest

from runners import colocated
from runners.inspect import inspect_run
from runners.ledger import TRAINED, Ledger, ledger_of
from runners.processes import Launcher, Task
from runners.profiles import PROFILES
from runners.run_directory import prepare_run
from schemas import run_layout
from schemas.errors import UserError
from schemas.metrics import read_metrics
from schemas.recipe import Recipe
from schemas.recipe_io import recipe_to_json
from schemas.store import RunStore
from stages.prompts.datasets import DATA_VARIABLE
from stages.train import StepReport
from tests.pipelines import placed
from tests.pipelines.placed import Placement, Process, processes_of, wait_until
from tests.pipelines.tiny_runs import ELEMENTS, begin, tiny_recipe

PLACEMENTS = ("colocated", "local", "prism", "flink")
OUTSIDE = ("local", "prism")  # those with the trainer in a process of its own
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(params=PLACEMENTS)
def placement(request: pytest.FixtureRequest) -> Placement:
    return placed.placement(request.param)


@pytest.fixture(params=OUTSIDE)
def placement_of_processes(request: pytest.FixtureRequest) -> Placement:
    return placed.placement(request.param)


@pytest.fixture(autouse=True)
def shared_data(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes of these tests write and read one copy of the prompts' files."""
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path_factory.getbasetemp() / "placements-data"))


def recipe_of(max_lag: int = 1, steps: int = 4) -> Recipe:
    return tiny_recipe(rollout={"max_lag": max_lag}, trainer={"steps": steps}, evaluation={"every": 0})


def whole_ledger(run: Path) -> Ledger:
    """The ledger of a run that is over. Nothing is in it twice, nothing is missing, and nothing was left out."""
    ledger = ledger_of(RunStore.open(run))
    assert ledger.problems == ()
    assert ledger.totals == {TRAINED: ledger.steps * ledger.prompts_per_step}
    return ledger


def leftovers(run: Path) -> list[str]:
    """What only a killed process leaves: staged, hidden and temporary files, and signs of who is at work."""
    paths = [path.relative_to(run) for path in run.rglob("*")]
    return [
        str(path)
        for path in paths
        if "#" in path.name or path.name.startswith(".") or path.parts[0] == "tmp" or path.suffix == ".tmp"
        if not path.name.startswith("._")
    ] + [str(path) for path in paths if path.parts[0] == "workers" and len(path.parts) > 1]


def assert_inspection_names_every_worker(placement: Placement, run: Path) -> None:
    """Each has its own time, which is work, waiting and the rest; and together they did what the run did."""
    inspection = inspect_run(RunStore.open(run))
    generators = [f"generator-{index + 1}/{placement.generators}" for index in range(placement.generators)]
    together = placement.name == "colocated"
    assert [(worker.worker, worker.part) for worker in inspection.workers] == (
        [("colocated", "generator"), ("colocated", "trainer")]
        if together
        else [*((name, "generator") for name in generators), ("trainer", "trainer")]
    )
    for worker in inspection.workers:
        assert worker.busy + worker.idle + worker.other == pytest.approx(worker.span)
        assert worker.busy > 0 and worker.idle >= 0
    for stage in inspection.stages:
        own = [mine for worker in inspection.workers for mine in worker.stages if mine.stage == stage.stage]
        assert sum(mine.records_out or 0 for mine in own) == stage.records_out
        assert sum(mine.records_in or 0 for mine in own) == (stage.records_in or 0)
        assert sum(mine.tokens_out or 0 for mine in own) == (stage.tokens_out or 0)
        assert sum(mine.seconds or 0 for mine in own) == pytest.approx(stage.seconds or 0)


def assert_nothing_is_left(run: Path) -> None:
    wait_until(lambda: processes_of(run) == [])
    assert leftovers(run) == []


# Undisturbed


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_run_ends_with_every_prompt_trained_once_and_none_older_than_the_bound(
    placement: Placement, max_lag: int, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    recipe = recipe_of(max_lag)
    placement.run(recipe, run)
    ledger = whole_ledger(run)
    assert ledger.largest_lag is not None and ledger.largest_lag <= max_lag
    consumed = [event.values for event in read_metrics(RunStore.open(run), "train")]
    assert len(consumed) == recipe.trainer.steps
    # The trainer saw nothing too old either: the bound held where the data was made, not by dropping it.
    assert all(values["trainer/lag_steps/max"] <= max_lag for values in consumed)
    assert all(values["trainer/too_old_groups"] == 0 for values in consumed)
    for values in consumed:
        in_flight, in_queue = (values[f"trainer/lag_in_{part}_steps/mean"] for part in ("flight", "queue"))
        assert in_flight >= 0 and in_queue >= 0
        assert in_flight + in_queue == pytest.approx(values["trainer/lag_steps/mean"])
    assert_inspection_names_every_worker(placement, run)
    assert not RunStore.open(run).list("quarantine")
    assert_nothing_is_left(run)


def test_a_run_that_was_begun_on_one_placement_is_finished_on_another(
    placement_of_processes: Placement, tmp_path: Path
) -> None:
    def interrupt(report: StepReport) -> None:
        if report.step == 1:
            raise KeyboardInterrupt

    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        colocated.run(recipe_of(), run, after_step=[interrupt])
    placement_of_processes.run(recipe_of(), run, resume=True)
    whole_ledger(run)
    assert_nothing_is_left(run)


@pytest.mark.slow
def test_prism_works_on_several_elements_of_a_generator_at_once_and_decodes_them_together(tmp_path: Path) -> None:
    recipe = tiny_recipe(rollout={"max_lag": 1, "elements_per_step": 4}, evaluation={"every": 0})
    placed.placement("prism").run(recipe, tmp_path / "run")
    whole_ledger(tmp_path / "run")
    events = read_metrics(RunStore.open(tmp_path / "run"), "rollout")
    begins = [(event.time - event.values["rollout/seconds"], 1) for event in events]
    ends = [(event.time, -1) for event in events]
    in_flight = list(accumulate(change for _, change in sorted(begins + ends)))
    assert 1 < max(in_flight) <= PROFILES["prism"].elements_at_once
    assert max(event.values["rollout/sessions_per_decode_call/mean"] for event in events) > 1


def test_what_the_user_can_mend_ends_a_generator_with_its_own_words(
    placement_of_processes: Placement, tmp_path: Path
) -> None:
    """Also where the runner passes on the text of an error alone."""
    run = tmp_path / "run"
    prepare_run(RunStore.open(run), recipe_of(), resume=False)
    begin(run, recipe_of())
    RunStore.open(run).put_new(run_layout.pin(0, 0), b"torn")
    task = Task(
        "rollout", ("rollout", str(run), "--runner", placement_of_processes.name, *placement_of_processes.options())
    )
    said: list[str] = []
    with pytest.raises(UserError, match=r"^rollout: pins/step-00000000/0000\.json: is not whole JSON"):
        Launcher([task], run, said.append, lambda: 0).run()
    assert said == []
    assert processes_of(run) == []


@pytest.mark.slow
def test_a_share_that_two_generators_have_is_sampled_once(tmp_path: Path) -> None:
    """As where a host is given up and its share started elsewhere, while the lost one still lives."""
    run = tmp_path / "run"
    prepare_run(RunStore.open(run), recipe_of(), resume=False)
    rollout = ("rollout", str(run), "--share")
    tasks = [
        Task("trainer", ("train", str(run))),
        Task("first", (*rollout, "1/2")),
        Task("other", (*rollout, "2/2")),
        Task("other-elsewhere", (*rollout, "2/2")),
    ]
    Launcher(tasks, run, pytest.fail, lambda: 0).run()
    whole_ledger(run)
    assert not RunStore.open(run).list("quarantine")
    assert_nothing_is_left(run)


# Killed


class Started:
    """A run whose launcher is a process, so that any process of the run can be killed, the launcher included."""

    def __init__(self, placement: Placement, recipe: Recipe, folder: Path):
        self.run = folder / "run"
        self._log = folder / "launcher.log"
        self._recipe = folder / "recipe.json"
        self._recipe.write_bytes(recipe_to_json(recipe))
        self._placement = placement
        self.launcher: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begins the run, or resumes it: it is the same command."""
        prism = [self._placement.prism, *self._placement.beam_flags] if self._placement.prism else []
        command = [sys.executable, "-m", "tests.pipelines.placed", self._placement.name, self._recipe, self.run, *prism]
        with open(self._log, "ab") as log:
            self.launcher = subprocess.Popen(
                command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def is_over(self) -> bool:
        assert self.launcher is not None
        return self.launcher.poll() is not None

    def end(self) -> None:
        """Waits for the end of the run."""
        assert self.launcher is not None
        wait_until(lambda: self.is_over)
        assert self.launcher.returncode == 0, self.said

    def shards(self) -> int:
        return len(list(self.run.glob("trajectories/manifests/*/*.json")))

    def process(self, part: str) -> Process | None:
        """The process of the run whose command holds `part`, if it is there now."""
        return next((found for found in processes_of(self.run) if part in found.command), None)

    def kill(self, part: str) -> None:
        """Waits for that process of the run and kills it."""
        found: list[Process] = []

        def is_there() -> bool:
            found.extend(filter(None, [self.process(part)]))
            return bool(found) or self.is_over

        wait_until(is_there)
        assert found, f"{part} never came: {self.said}"
        os.kill(found[0].pid, signal.SIGKILL)

    def kill_one(self, victim: Process) -> bool:
        """Kills a process of the run, and starts the run again if that was its launcher; False if it had just ended."""
        with suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
            if self.is_launcher(victim):
                assert self.launcher is not None
                self.launcher.wait()
                wait_until(lambda: processes_of(self.run) == [])
                self.start()
            return True
        return False

    def is_launcher(self, process: Process) -> bool:
        return "tests.pipelines.placed" in process.command

    def kill_launcher(self) -> None:
        assert self.launcher is not None
        self.launcher.kill()
        self.launcher.wait()

    def clean_up(self) -> None:
        if self.launcher is not None and self.launcher.poll() is None:
            self.kill_launcher()


Start = Callable[[Placement, Recipe], Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Started] = []

    def begin(placement: Placement, recipe: Recipe) -> Started:
        folder = tmp_path / f"{len(started)}"
        folder.mkdir()
        started.append(Started(placement, recipe, folder))
        started[-1].start()
        return started[-1]

    yield begin
    for one in started:
        one.clean_up()


PARTS = {"local": ("runners.cli train", "--share 1/2", "--share 2/2"), "prism": ("runners.cli train", "--job_port")}


@pytest.mark.slow
def test_whatever_process_of_a_run_is_killed_the_run_ends_by_itself(
    placement_of_processes: Placement, start: Start
) -> None:
    run = start(placement_of_processes, recipe_of(steps=6))
    parts = PARTS[placement_of_processes.name]
    for killed, part in enumerate(parts):
        # Each in the midst of work: some shards after the last kill.
        wait_until(lambda killed=killed: run.shards() > 2 * killed or run.is_over)  # type: ignore[misc]
        run.kill(part)
    run.end()
    assert run.said.count("started again") >= len(parts)
    whole_ledger(run.run)
    assert_nothing_is_left(run.run)


@pytest.mark.slow
def test_a_run_whose_launcher_is_killed_leaves_no_process_and_is_resumed_by_the_same_command(
    placement_of_processes: Placement, start: Start
) -> None:
    run = start(placement_of_processes, recipe_of())
    wait_until(lambda: run.shards() >= 1 or run.is_over)
    run.kill_launcher()
    wait_until(lambda: processes_of(run.run) == [])
    run.start()
    run.end()
    whole_ledger(run.run)
    assert_nothing_is_left(run.run)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_all_its_processes_and_is_resumed(
    placement_of_processes: Placement, start: Start, ending: signal.Signals
) -> None:
    run = start(placement_of_processes, recipe_of())
    wait_until(lambda: run.shards() >= 1 or run.is_over)
    assert run.launcher is not None
    run.launcher.send_signal(ending)
    wait_until(lambda: run.is_over)
    assert_nothing_is_left(run.run)
    run.start()
    run.end()
    whole_ledger(run.run)


BURSTS, KILLS_IN_A_BURST = 7, 3


@pytest.mark.slow
def test_runs_survive_twenty_kills_of_any_of_their_processes(placement_of_processes: Placement, start: Start) -> None:
    """At random moments, three at a time once a run has got further: in the midst of work, and of being started again.

    A run that is over before all kills have come is followed by the next.
    """
    draw = random.Random(5)
    runs = [start(placement_of_processes, recipe_of(steps=20))]
    kills = launchers_killed = 0
    while kills < BURSTS * KILLS_IN_A_BURST:
        run = runs[-1]
        seen = run.shards()
        wait_until(lambda run=run, seen=seen: run.shards() > seen or run.is_over)  # type: ignore[misc]
        for _ in range(KILLS_IN_A_BURST):
            time.sleep(draw.uniform(0.0, 1.0))
            victims = processes_of(run.run)
            if run.is_over or not victims:
                break
            victim = draw.choice(victims)
            kills += run.kill_one(victim)
            launchers_killed += run.is_launcher(victim)
        if run.is_over:
            run.end()
            runs.append(start(placement_of_processes, recipe_of(steps=20)))
    runs[-1].end()
    assert launchers_killed, "the launcher was never drawn"
    for run in runs:
        whole_ledger(run.run)
        assert not RunStore.open(run.run).list("quarantine")
        assert_nothing_is_left(run.run)
        assert len(list(run.run.glob("trajectories/*/*.arrow"))) == 20 * ELEMENTS
