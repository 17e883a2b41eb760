"""Runs of the tiny recipe on every placement, for the tests that hold on all of them.

    python -m tests.pipelines.placed PLACEMENT RECIPE.json RUN [PRISM [BEAM FLAG...]]

is the launcher of such a run: it starts it, or resumes it where there is one.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from runners import colocated, processes
from runners.profiles import PROFILES
from schemas.recipe import Recipe
from schemas.recipe_io import recipe_from_json
from schemas.run_layout import CONFIG

REQUIRED = "ROLLSTREAM_REQUIRE"  # names what must not be skipped, with commas between


@dataclass(frozen=True)
class Placement:
    name: str
    generators: int = 1
    prism: str | None = None
    beam_flags: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """Of `rollstream rollout`."""
        location = ["--prism-location", self.prism] if self.prism else []
        return location + [f"--beam-flag={flag}" for flag in self.beam_flags]

    def run(self, recipe: Recipe, run: Path, *, resume: bool = False) -> None:
        profile = PROFILES[self.name]
        if profile.trains_itself:
            colocated.run(recipe, run, resume=resume)
            return
        processes.run(
            recipe,
            run,
            profile,
            resume=resume,
            generators=self.generators,
            generator_options=self.options(),
            say=_say,
        )


def _say(line: str) -> None:
    print(line, flush=True)


def placement(name: str) -> Placement:
    """The placement as tests use it; skips a test whose runner is not here, unless it is required."""
    from runners import flink
    from runners.prism import HOW_TO_GET_IT, find_prism

    prism = find_prism() if name == "prism" else None
    if name == "prism" and prism is None:
        skip(name, f"Prism is not on this machine. Get it with Go, and put it on the PATH: {HOW_TO_GET_IT}")
    if name == "flink" and flink.job_server() is None:
        skip(name, f"There is no Flink here. To have one, {flink.HOW_TO_GET_IT}.")
    return Placement(name, generators=2 if name == "local" else 1, prism=prism)


def skip(name: str, reason: str) -> None:
    """Skips a test because of what is not here, or fails it where that is required."""
    if name in os.environ.get(REQUIRED, "").split(","):
        pytest.fail(reason)
    pytest.skip(reason)


def wait_until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    """Waits for a condition; `seconds` is what a test may take where something hangs, not what it takes."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, "waited in vain"
        time.sleep(0.02)


@dataclass(frozen=True)
class Process:
    pid: int
    command: str


def processes_of(folder: Path) -> list[Process]:
    """The processes, by the system's table, that name `folder` in their command or were given it in their environment;
    this one is not among them."""
    if not Path("/proc/self/environ").exists():
        pytest.skip("this system has no process table in /proc")
    mark = re.compile(re.escape(os.fsencode(folder)) + rb"(?![\w-])")
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:  # it has just ended
            continue
        if not dead and (mark.search(command) or mark.search(environment)):
            found.append(Process(int(entry.name), command.replace(b"\0", b" ").decode(errors="replace")))
    return sorted(found, key=lambda process: process.pid)


if __name__ == "__main__":
    name, recipe, run, *rest = sys.argv[1:]
    Placement(name, 2 if name == "local" else 1, rest[0] if rest else None, tuple(rest[1:])).run(
        recipe_from_json(Path(recipe).read_bytes(), recipe), Path(run), resume=Path(run, CONFIG).exists()
    )
