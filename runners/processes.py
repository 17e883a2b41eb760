"""Generators and trainer as processes of this machine, started by one command, which is their launcher.

They meet only in the run directory, so the launcher passes nothing between them. It starts each as leader of a process
group with a log of its own, starts again what dies, and ends all of them when the run is over, on an error, and when it
is interrupted. If the launcher itself is killed they notice (`runners.tether`).

Left out on purpose: scheduling. Shares are fixed at the start; a share of another machine is started there by hand.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from runners.profiles import RunnerProfile
from runners.run_directory import clear_leftovers_of_generators, prepare_run
from runners.tether import end_group, start_tethered
from schemas import run_layout
from schemas.errors import UserError
from schemas.recipe import Recipe
from schemas.store import RunStore
from stages.prompts.shares import Share

MOST_RESTARTS = 10  # of one process, without the run getting any further
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 15.0  # before a restart; doubles with each
POLL_SECONDS = 0.05
# A generator looks for its next position and ends; an element that is trained already it may still have in hand.
SECONDS_TO_FINISH = 20.0
SECONDS_TO_OBEY = 3.0  # between asking to end and killing

TRAINER = "trainer"
ROLLSTREAM = (sys.executable, "-m", "runners.cli")
USER_CAN_MEND = 2  # exit code of our commands


@dataclass(frozen=True)
class Task:
    """One process of a run: a name, and the arguments of the `rollstream` command that it is."""

    name: str
    arguments: tuple[str, ...]


def tasks_of(
    location: str, profile: RunnerProfile, generators: int, generator_options: Sequence[str] = ()
) -> list[Task]:
    """The trainer, and generators that share the run's positions."""
    shares = [Share(index, generators) for index in range(generators)]
    return [Task(TRAINER, ("train", location))] + [
        Task(
            f"rollout-{share.index + 1}-of-{share.of}",
            ("rollout", location, "--runner", profile.name, "--share", str(share), *generator_options),
        )
        for share in shares
    ]


def run(
    recipe: Recipe,
    location: str | Path,
    profile: RunnerProfile,
    *,
    resume: bool = False,
    generators: int = 1,
    generator_options: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Runs `recipe` in the run directory at `location` to its last step, in processes that this one starts and watches.

    Call it on the main thread.

    Args:
      resume: whether to go on with the run that is there.
      generators: how many generators share the positions.
      generator_options: further options of `rollstream rollout`.
      say: told what happened to a process, a line each.

    Raises:
      UserError: the directory is occupied, holds another recipe's run, or another process is at work on it; or what one
        of the processes said that the user can mend; or one died again and again.
      KeyboardInterrupt: this process was asked to end (SIGINT, SIGTERM, SIGHUP). All others have ended.
    """
    location = str(location)
    store = RunStore.open(location)
    prepare_run(store, recipe, resume=resume)
    with store.held(run_layout.CONFIG):
        clear_leftovers_of_generators(store)
    tasks = tasks_of(location, profile, generators, generator_options)
    try:
        with _interrupted_by_signals():
            Launcher(tasks, folder_for_logs(store, recipe), say, lambda: _progress(store)).run()
    finally:
        # A UserError: a trainer of another machine is at work on the run.
        with suppress(UserError), store.held(run_layout.CONFIG):
            clear_leftovers_of_generators(store)


def _progress(store: RunStore) -> int:
    """A number that grows with each shard and each policy of the run."""
    return len(store.list(run_layout.manifest_prefix())) + len(
        [key for key in store.list("policies") if key.endswith("/COMMIT.json")]
    )


def folder_for_logs(store: RunStore, recipe: Recipe) -> Path:
    """A local folder: the run's own, or where that is in an object store, one of its name in this directory."""
    return store.root if store.root is not None else Path("runs") / recipe.name


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """A request to end, from whomever, is an interrupt."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(eq=False)
class _Child:
    """A task and the process that does it now."""

    task: Task
    log: Path
    process: subprocess.Popen[bytes] | None = None
    log_starts_at: int = 0  # bytes of the log that are of earlier processes
    start_at: float = field(default_factory=time.monotonic)  # where there is no process
    restarts: int = 0  # since the run last got further
    progress: int = -1  # of the run, when the process last died
    done: bool = False


class Launcher:
    """Starts tasks as processes, keeps them going, and ends them.

    Args:
      tasks: what to start. The run is over when the one called `TRAINER` is done.
      folder: where `logs/` and `tmp/` go.
      say: told what happened to a process.
      progress: a number that grows as the run gets further.
      command: what a task's arguments are arguments of.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        folder: Path,
        say: Callable[[str], None],
        progress: Callable[[], int],
        command: Sequence[str] = ROLLSTREAM,
    ):
        self._command = command
        self._logs = folder / run_layout.LOGS
        self._temporary = folder / run_layout.TEMPORARY
        self._children = [_Child(task, self._logs / f"{task.name}.log") for task in tasks]
        self._say = say
        self._progress = progress

    def run(self) -> None:
        """Returns when every task is done. Raises as `run` of this module says; then all processes have ended too."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._temporary.mkdir(exist_ok=True)
        try:
            finish_by = float("inf")
            while not all(child.done for child in self._children):
                for child in self._children:
                    self._look_after(child)
                if self._is_over():
                    finish_by = min(finish_by, time.monotonic() + SECONDS_TO_FINISH)
                    if time.monotonic() > finish_by:
                        break
                time.sleep(POLL_SECONDS)
        finally:
            self._end_all()
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _is_over(self) -> bool:
        return any(child.done for child in self._children if child.task.name == TRAINER)

    def _look_after(self, child: _Child) -> None:
        if child.done:
            return
        if child.process is None:
            if self._is_over():
                child.done = True
            elif time.monotonic() >= child.start_at:
                self._start(child)
        elif has_ended(child.process):
            code = _bury(child.process)
            child.process = None
            self._take_up(child, code)

    def _start(self, child: _Child) -> None:
        with open(child.log, "ab") as log:
            child.log_starts_at = log.tell()
            child.process = start_tethered(
                [*self._command, *child.task.arguments],
                output=log,
                environment={**os.environ, "TMPDIR": str(self._temporary.absolute())},
            )

    def _take_up(self, child: _Child, code: int) -> None:
        """Decides what becomes of a task whose process has ended."""
        if code == 0:
            child.done = True
        elif code == USER_CAN_MEND:
            raise _said_in(child)
        else:
            self._plan_restart(child, code)

    def _plan_restart(self, child: _Child, code: int) -> None:
        progress = self._progress()
        if progress > child.progress:
            child.restarts, child.progress = 0, progress
        how = _how_it_ended(code)
        if child.restarts == MOST_RESTARTS:
            raise UserError(
                child.task.name,
                f"{how}, after {MOST_RESTARTS} restarts that brought the run no further.",
                f"Its log says more: {child.log}",
            )
        pause = min(SHORTEST_PAUSE_SECONDS * 2**child.restarts, LONGEST_PAUSE_SECONDS)
        child.restarts += 1
        child.start_at = time.monotonic() + pause
        counted = f"{child.restarts} of at most {MOST_RESTARTS} restarts without progress"
        self._say(f"{child.task.name} {how}; it is started again in {pause:g} s ({counted}); log: {child.log}")

    def _end_all(self) -> None:
        processes = [child.process for child in self._children if child.process is not None]
        for process in processes:
            end_group(process, signal.SIGTERM)
        obey_by = time.monotonic() + SECONDS_TO_OBEY
        while time.monotonic() < obey_by and not all(map(has_ended, processes)):
            time.sleep(POLL_SECONDS)
        for process in processes:
            _bury(process)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a child has ended. It stays a zombie, so that its number cannot become another group's."""
    if process.returncode is not None:
        return True
    if not hasattr(os, "waitid"):  # macOS, before Python 3.13
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _bury(process: subprocess.Popen[bytes]) -> int:
    """Kills a child and what it has left in its group; returns its exit code."""
    end_group(process, signal.SIGKILL)
    code = process.wait()
    if process.stdin is not None:
        process.stdin.close()
    return code


def _how_it_ended(code: int) -> str:
    """
    >>> _how_it_ended(-9), _how_it_ended(1)
    ('was killed by SIGKILL', 'ended with exit code 1')
    """
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _said_in(child: _Child) -> UserError:
    """What a process said last that the user can mend."""
    with open(child.log, "rb") as log:
        log.seek(child.log_starts_at)
        lines = log.read().decode(errors="replace").rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    said = " ".join(lines[starts[-1] :]).removeprefix("error: ") if starts else "it does not say why."
    return UserError(child.task.name, said, f"Its log: {child.log}")
