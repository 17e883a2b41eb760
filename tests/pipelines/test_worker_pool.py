"""Prism with its stages in another process: an SDK process that a pool of Beam's starts (EXTERNAL)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from runners.processes import Launcher, Task
from runners.run_directory import prepare_run
from schemas import run_layout
from schemas.errors import UserError
from schemas.store import RunStore
from stages.prompts.datasets import DATA_VARIABLE
from tests.pipelines import placed
from tests.pipelines.placed import Placement, processes_of, wait_until
from tests.pipelines.test_placements import Start, assert_nothing_is_left, recipe_of, start, whole_ledger
from tests.pipelines.tiny_runs import begin

__all__ = ["start"]  # a fixture

REPOSITORY = Path(__file__).parents[2]


class Pool:
    """Beam's worker pool, as a user starts it. `folder` is in the environment of all its processes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.folder.mkdir()
        self.port = free_port()
        python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the pool starts "python"
        with open(self.folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "apache_beam.runners.worker.worker_pool_main", f"--service_port={self.port}"],
                cwd=REPOSITORY,
                env=os.environ | {"PATH": python, "TMPDIR": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self.answers)

    def answers(self) -> bool:
        assert self.process.poll() is None, self.said
        with closing(socket.socket()) as client:
            return client.connect_ex(("localhost", self.port)) == 0

    @property
    def said(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def flags(self) -> tuple[str, ...]:
        return "--environment_type=EXTERNAL", f"--environment_config=localhost:{self.port}"

    def workers(self) -> list[int]:
        return [process.pid for process in processes_of(self.folder) if process.pid != self.process.pid]

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        wait_until(lambda: self.process.poll() is not None)


def free_port() -> int:
    with closing(socket.socket()) as server:
        server.bind(("localhost", 0))
        return int(server.getsockname()[1])


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "data"))
    pool = Pool(tmp_path / "pool")
    yield pool
    pool.end()


@pytest.fixture
def placement(request: pytest.FixtureRequest) -> Placement:
    prism = placed.placement("prism")  # first: what is skipped needs no pool
    pool: Pool = request.getfixturevalue("pool")
    return replace(prism, beam_flags=pool.flags)


def test_a_run_is_sampled_in_a_process_of_the_pool(placement: Placement, pool: Pool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    placement.run(recipe_of(), run)
    whole_ledger(run)
    assert pool.said.count("Starting worker with command") == 1
    wait_until(lambda: not pool.workers())  # it ends with the job that it was started for
    assert_nothing_is_left(run)


def test_what_the_user_can_mend_is_told_from_the_pool_too(placement: Placement, tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepare_run(RunStore.open(run), recipe_of(), resume=False)
    begin(run, recipe_of())
    RunStore.open(run).put_new(run_layout.pin(0, 0), b"torn")
    task = Task("rollout", ("rollout", str(run), "--runner", "prism", *placement.options()))
    with pytest.raises(UserError, match=r"^rollout: pins/step-00000000/0000\.json: is not whole JSON"):
        Launcher([task], run, pytest.fail, lambda: 0).run()


@pytest.mark.slow
def test_a_killed_generator_takes_its_worker_with_it_and_the_run_ends(
    placement: Placement, pool: Pool, start: Start
) -> None:
    run = start(placement, recipe_of(steps=6))
    wait_until(lambda: run.shards() >= 2 or run.is_over)
    first = pool.workers()
    run.kill("--share 1/1")
    wait_until(lambda: not set(first) & set(pool.workers()))
    run.end()
    whole_ledger(run.run)
    wait_until(lambda: not pool.workers())
    assert_nothing_is_left(run.run)
