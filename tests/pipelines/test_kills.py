"""SIGKILL at many moments of real processes, and a resume by the same command: the run ends as if nothing had been.

The moments are drawn with a seed: before some change to a file, at some time on the clock, and at the gaps that have a
name. A run is killed and resumed, again and again, until it is through, and then the next one begins.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from jax_core import faults
from runners import colocated
from runners.inspect import inspect_run
from schemas import run_layout
from schemas.errors import UserError
from schemas.identity import TrajectoryId
from schemas.metrics import read_metrics
from schemas.recipe_io import recipe_to_json
from schemas.store import RunStore
from stages.prompts.datasets import DATA_VARIABLE
from stages.shards import list_manifests, read_shard
from tests.pipelines.tiny_runs import ELEMENTS, STEPS, outcome, share_parts, tiny_recipe

RECIPE = tiny_recipe()
REPOSITORY = Path(__file__).parents[2]
CHAINS = 2  # runs side by side: one for each core

NAMED = [
    "shard-before-data:1",
    "shard-before-manifest:1",
    "shard-before-manifest:3",
    "after-manifest:2",
    "after-step-list:1",
    "policy-before-rename:1",
    "policy-before-commit:1",
    "after-commit:2",
    "trainer-before-commit:1",
    "after-trainer-commit:1",
]
BY_CHANGE, BY_CLOCK = 8, 6


@dataclass(frozen=True)
class Moment:
    """When to kill: at a named gap, before the n-th change to a file, or some seconds after the run began."""

    point: str | None = None
    change: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Machine:
    """Starts runs of one recipe, all with one cache of compiled functions, which makes restarts cheap."""

    folder: Path

    def start(self, run: Path | str, moment: Moment | None = None) -> subprocess.Popen[str]:
        recipe = self.folder / "recipe.json"
        recipe.write_bytes(recipe_to_json(RECIPE))
        command = [sys.executable, "-m", "tests.pipelines.dying_run", str(recipe), str(run)]
        environment = os.environ | {
            DATA_VARIABLE: str(self.folder / "data"),
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        if moment and moment.point:
            environment[faults.VARIABLE] = moment.point
        if moment and moment.change:
            command.append(str(moment.change))
        return subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def finish(self, run: Path | str) -> int:
        """Runs to the end; returns how often it changed a file."""
        said, errors = self.start(run).communicate()
        assert said.startswith("ready\n"), errors
        return int(said.split()[-1])

    def is_killed(self, run: Path | str, moment: Moment) -> bool:
        """Starts or resumes the run; False if it was through before the moment came."""
        process = self.start(run, moment)
        assert process.stdout is not None
        if process.stdout.readline() == "ready\n" and moment.seconds is not None:
            time.sleep(moment.seconds)
            process.kill()
        _, errors = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), errors
        return process.returncode != 0

    def kill_at_each(self, moments: Sequence[Moment], name: str) -> list[Path]:
        """Every moment kills a run once. Returns the runs, all of them through."""
        runs = [self.folder / f"{name}-0"]
        for moment in moments:
            if not self.is_killed(runs[-1], moment):
                runs.append(self.folder / f"{name}-{len(runs)}")
                assert self.is_killed(runs[-1], moment), f"{moment} never came"
        self.finish(runs[-1])
        return runs


def draw_moments(changes: int) -> list[Moment]:
    """In an order of their own. A run makes `changes` changes to files; half of them leaves something to resume."""
    draw = random.Random(20)
    moments = [Moment(point=point) for point in NAMED]
    moments += [Moment(change=draw.randint(1, changes // 2)) for _ in range(BY_CHANGE)]
    moments += [Moment(seconds=draw.uniform(0.0, 1.5)) for _ in range(BY_CLOCK)]
    draw.shuffle(moments)
    return moments


def shape_of(run: Path) -> Counter[str]:
    """Every file, staged and hidden ones too. "*" stands for a shard's digest, which is over clocks, and for what is in
    the folder of a tree, which Orbax names and divides at will."""
    files = (path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file())
    names = {re.sub(r"(?<=/[0-9a-f]{64}/).*", "*", file) for file in files}
    return Counter(re.sub(r"(?<=-)[0-9a-f]{64}(?=\.arrow)", "*", name) for name in names)


def measured(run: Path | str) -> Mapping[tuple[str, int, int | None], Mapping[str, float]]:
    """What every stage recorded of every step and element, without clocks and without what a file's bytes depend on."""
    return {
        (event.stage, event.step, event.labels.get("element")): {
            name: value for name, value in event.values.items() if "second" not in name and name != "shards/bytes"
        }
        for event in read_metrics(RunStore.open(run))
    }


def sampled(run: Path | str) -> list[TrajectoryId]:
    store = RunStore.open(run)
    contents = [read_shard(store, manifest) for manifest in list_manifests(store)]
    return [sample.rollout.id for content in contents for group in content.groups for sample in group.samples]


@pytest.mark.slow
def test_a_run_killed_at_any_moment_and_resumed_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    machine, reference = Machine(tmp_path), tmp_path / "reference"
    moments = draw_moments(machine.finish(reference))
    assert len(moments) >= 20
    with ThreadPoolExecutor(CHAINS) as pool:
        chains = pool.map(machine.kill_at_each, [moments[i::CHAINS] for i in range(CHAINS)], ["left", "right"])
        runs = [run for chain in chains for run in chain]

    wanted = outcome(reference)
    assert len(set(wanted.policies)) == STEPS + 1 and len(wanted.shards) == STEPS * ELEMENTS
    rollout = RECIPE.rollout
    identities = [
        TrajectoryId(step, group, sample)
        for step in range(STEPS)
        for group in range(rollout.prompts_per_step)
        for sample in range(rollout.samples_per_prompt)
    ]
    for run in runs:
        # The same weights of every version, the same contents of every shard, each step trained on the same shards.
        assert outcome(run) == wanted
        # Nothing is in the shards twice, or missing: each manifest once, each trajectory once.
        store = RunStore.open(run)
        slots = [run_layout.manifest(step, element) for step in range(STEPS) for element in range(ELEMENTS)]
        assert store.list(run_layout.manifest_prefix()) == slots
        assert sampled(run) == identities
        # The ledger: every stage recorded every step and element once, with the same losses, rewards and counts.
        assert measured(run) == measured(reference)
        # And there is no file that the undisturbed run does not have, nor one less.
        assert shape_of(run) == shape_of(reference)
        report = inspect_run(store)
        assert (report.problems, report.orphans, report.quarantine) == ((), (), ())


def test_what_was_sampled_is_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger that the runs above are compared in adds up: every sampled token is in a shard, and trained once."""
    share_parts(monkeypatch)
    colocated.run(RECIPE, tmp_path)
    ledger = measured(tmp_path)
    assert set(ledger) == {
        *(("train", step, None) for step in range(STEPS)),
        *(
            (stage, step, element)
            for stage in ("prompts", "rollout", "reward", "group", "pack", "shards")
            for step in range(STEPS)
            for element in range(ELEMENTS)
        ),
    }
    for step in range(STEPS):
        tokens = sum(manifest.sampled_tokens for manifest in list_manifests(RunStore.open(tmp_path), step))
        of_rollout = sum(ledger["rollout", step, element]["rollout/sampled_tokens"] for element in range(ELEMENTS))
        assert tokens == of_rollout == ledger["train", step, None]["trainer/trained_tokens"] > 0


def test_two_processes_are_never_at_work_on_one_run(tmp_path: Path) -> None:
    """Else the one would sweep away what the other is about to commit."""
    store = RunStore.open(tmp_path)
    colocated.prepare_run(store, RECIPE, resume=False)
    (tmp_path / "policies#1").write_bytes(b"half a write of the other process")
    with store.held(run_layout.CONFIG), pytest.raises(UserError, match="another process is at work"):
        colocated.run(RECIPE, tmp_path, resume=True)
    assert (tmp_path / "policies#1").exists()
