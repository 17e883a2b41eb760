"""What dies is started again, within bounds; what ends ends everything; nothing outlives its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runners import processes
from runners.processes import TRAINER, Launcher, Task, tasks_of
from runners.profiles import PROFILES
from schemas.errors import UserError
from tests.pipelines.placed import processes_of, wait_until

PYTHON = (sys.executable, "-c")
WAIT_FOR_EVER = "import time; time.sleep(600)"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SHORTEST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(processes, "LONGEST_PAUSE_SECONDS", 0.02)


def launch(
    folder: Path, programs: dict[str, str], said: list[str] | None = None, progress: Callable[[], int] = lambda: 0
) -> None:
    tasks = [Task(name, (program, str(folder))) for name, program in programs.items()]
    Launcher(tasks, folder, (said if said is not None else []).append, progress, PYTHON).run()


def test_generators_share_the_positions_and_one_trainer_trains() -> None:
    tasks = tasks_of("runs/lake", PROFILES["local"], 2, ["--prism-location", "p"])
    assert [task.name for task in tasks] == ["trainer", "rollout-1-of-2", "rollout-2-of-2"]
    assert tasks[0].arguments == ("train", "runs/lake")
    assert tasks[2].arguments == (
        *("rollout", "runs/lake", "--runner", "local", "--share", "2/2", "--prism-location", "p"),
    )


def test_it_is_over_when_every_task_is_done_and_each_has_a_log_of_its_own(tmp_path: Path) -> None:
    launch(tmp_path, {TRAINER: "print('trained')", "rollout": "print('sampled')"})
    assert {log.name: log.read_text() for log in (tmp_path / "logs").iterdir()} == {
        "trainer.log": "trained\n",
        "rollout.log": "sampled\n",
    }
    assert not (tmp_path / "tmp").exists()


def test_what_dies_is_started_again_and_that_is_said(tmp_path: Path) -> None:
    die_twice = (
        "import os, pathlib, signal, sys\n"
        "lives = pathlib.Path(sys.argv[1], 'lives')\n"
        "lives.touch()\n"
        "lives.write_text(lives.read_text() + 'x')\n"
        "if len(lives.read_text()) == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if len(lives.read_text()) == 2: sys.exit(7)\n"
    )
    said: list[str] = []
    launch(tmp_path, {TRAINER: die_twice}, said)
    assert (tmp_path / "lives").read_text() == "xxx"
    assert len(said) == 2
    assert said[0].startswith("trainer was killed by SIGKILL") and "1 of at most 10" in said[0]
    assert said[1].startswith("trainer ended with exit code 7") and "2 of at most 10" in said[1]


def test_restarts_that_bring_the_run_no_further_are_bounded(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(UserError) as error:
        launch(tmp_path, {TRAINER: "import sys; sys.exit(3)", "rollout": WAIT_FOR_EVER}, said)
    assert error.value.offender == "trainer" and "10 restarts" in error.value.reason
    assert str(tmp_path / "logs/trainer.log") in error.value.way_out
    assert len(said) == processes.MOST_RESTARTS
    assert processes_of(tmp_path) == []


def test_restarts_are_counted_anew_when_the_run_gets_further(tmp_path: Path) -> None:
    steps = iter(range(1000))
    die_often = (
        "import pathlib, sys\n"
        "lives = pathlib.Path(sys.argv[1], 'lives')\n"
        "lives.touch()\n"
        "lives.write_text(lives.read_text() + 'x')\n"
        f"sys.exit(len(lives.read_text()) <= {processes.MOST_RESTARTS + 2})\n"
    )
    said: list[str] = []
    launch(tmp_path, {TRAINER: die_often}, said, lambda: next(steps))
    assert len(said) == processes.MOST_RESTARTS + 2
    assert all("1 of at most" in line for line in said)


def test_what_the_user_can_mend_is_not_tried_again_and_ends_everything(tmp_path: Path) -> None:
    refuse = "import sys; print('error: the shard: is torn.'); print('Restore it.'); sys.exit(2)"
    said: list[str] = []
    with pytest.raises(UserError, match=r"the shard: is torn\. Restore it\."):
        launch(tmp_path, {TRAINER: refuse, "rollout": WAIT_FOR_EVER}, said)
    assert said == []
    assert processes_of(tmp_path) == []


def test_a_real_part_of_a_run_says_what_the_user_can_mend(tmp_path: Path) -> None:
    tasks = [Task(TRAINER, ("train", str(tmp_path / "nowhere")))]
    with pytest.raises(UserError, match="holds no run"):
        Launcher(tasks, tmp_path, print, lambda: 0).run()


def test_a_generator_that_does_not_notice_the_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SECONDS_TO_FINISH", 0.2)
    monkeypatch.setattr(processes, "SECONDS_TO_OBEY", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    launch(tmp_path, {TRAINER: "pass", "rollout": deaf})
    assert processes_of(tmp_path) == []


def test_what_a_dead_process_had_started_dies_too(tmp_path: Path) -> None:
    leave_a_child = (
        "import pathlib, subprocess, sys\n"
        "mark = pathlib.Path(sys.argv[1], 'mark')\n"
        "if not mark.exists():\n"
        "    mark.touch()\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]])\n"
        "    sys.exit(1)\n"
    )
    launch(tmp_path, {TRAINER: leave_a_child})
    assert processes_of(tmp_path) == []


LAUNCHER = """
import pathlib, sys
from runners.processes import Launcher, Task
folder = pathlib.Path(sys.argv[1])
task = Task("trainer", ("-c", sys.argv[2], str(folder)))
Launcher([task], folder, print, lambda: 0, [sys.executable]).run()
"""
TETHERED = """
import pathlib, subprocess, sys, threading
from runners.tether import hold_tether, tethered_command
hold_tether()
subprocess.Popen(tethered_command([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]]))
pathlib.Path(sys.argv[1], "ready").touch()
threading.Event().wait()
"""
TETHERED_BY_ITS_INPUT_ALONE = TETHERED.replace(
    "\nhold_tether()", "\nimport runners.tether; runners.tether._die_with_parent = lambda parent: None\nhold_tether()"
)


@pytest.mark.parametrize("child", [TETHERED, TETHERED_BY_ITS_INPUT_ALONE], ids=["linux", "elsewhere"])
def test_when_the_launcher_is_killed_nothing_it_started_lives_on(tmp_path: Path, child: str) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path), child])
    wait_until(lambda: (tmp_path / "ready").exists() and len(processes_of(tmp_path)) == 3)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: processes_of(tmp_path) == [])


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_child_that_is_asked_to_end_ends(tmp_path: Path, ending: signal.Signals) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path), TETHERED], stderr=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "ready").exists())
    os.kill(launcher.pid, ending)
    launcher.wait(timeout=60)
    wait_until(lambda: processes_of(tmp_path) == [])


def test_a_process_that_nobody_tethered_is_left_alone() -> None:
    code = "from runners.tether import hold_tether; hold_tether(); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.stdout == "lives\n"


def test_a_wait_that_never_ends_fails() -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError):
        wait_until(lambda: False, seconds=0.05)
    assert time.monotonic() - started < 10
