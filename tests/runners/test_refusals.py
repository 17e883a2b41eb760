"""What `rollstream` refuses, and what it leaves behind when it does: one message, exit code 2, nothing half-written.

Damaged shards, full disks, directories and recipes that cannot be. Where a run was stopped, it goes on once the cause
is gone, and ends in the same bits.
"""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jax_core import faults
from jax_core.policies import PolicyStore
from runners import colocated
from runners.cli import app
from runners.inspect import inspect_run
from schemas import run_layout, trajectory
from schemas.errors import UserError
from schemas.manifest import PolicyCommit, ShardManifest, ShardRef
from schemas.metrics import MetricsWriter
from schemas.recipe import Recipe
from schemas.recipe_io import load_recipe
from schemas.store import RunStore
from stages.prompts.datasets import DATA_VARIABLE, open_prompts
from stages.runtime import Runtime
from stages.shards import frozen_step, list_manifests
from tests.pipelines.tiny_runs import Outcome, copied, outcome, share_parts, untrained
from tests.runners.test_cli import RECIPE as RECIPE_TOML

STEPS = 2
# No evaluation on the way: it would be compiled, and is not what is refused here.
OVERRIDES = ("rollout.elements_per_step=2", "trainer.checkpoint_every=1", "evaluation.every=0")
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(RECIPE_TOML)
    return path


@pytest.fixture(scope="module")
def recipe(recipe_file: Path) -> Recipe:
    return load_recipe(recipe_file, OVERRIDES)


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    share_parts(monkeypatch)


@pytest.fixture(scope="module")
def finished(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        share_parts(patch)
        run = tmp_path_factory.mktemp("finished") / "run"
        colocated.run(recipe, run)
        return run


@pytest.fixture(scope="module")
def reference(finished: Path) -> Outcome:
    return outcome(finished)


def rollstream(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_command(recipe_file: Path, run: Path, *, resume: bool) -> list[str | Path]:
    return ["run", recipe_file, *OVERRIDES, "--dir", run, *(["--resume"] if resume else [])]


def refused(result: Result) -> str:
    """The one message: the problem in a line, perhaps the way out in another, and exit code 2."""
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ") and len(lines) <= 2, result.stderr
    return result.stderr


def assert_nothing_is_half_written(run: Path) -> None:
    """No staged and no hidden file; all that a reader would find is whole."""
    names = [path.relative_to(run).as_posix() for path in run.rglob("*")]
    assert not [name for name in names if "#" in name or "/." in name]
    report = inspect_run(RunStore.open(run))
    assert not [shard for shard in report.shards if shard.state != "whole"]
    assert not report.torn_metric_lines
    policies = Runtime(run, Recipe(name="any")).policies
    for version in policies.versions():
        policies.load(version)  # verified against its commit


def files(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


# Damaged shards


def with_zeros(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)


def with_a_flipped_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def commit_newer(store: RunStore, manifest: ShardManifest) -> None:
    """Puts into the manifest's place what a program of the next version would have committed, digests and all."""
    table = trajectory.from_bytes(store.get(manifest.key), name=manifest.key)
    newer = str(trajectory.SCHEMA_VERSION + 1).encode()
    data = trajectory.to_bytes(table.replace_schema_metadata({**table.schema.metadata, b"version": newer}))
    sha256 = hashlib.sha256(data).hexdigest()
    facts = {"version": int(newer), "bytes": len(data), "sha256": sha256}
    store.put(manifest.key, data)
    store.put(run_layout.manifest(manifest.step, manifest.element_index), manifest.model_copy(update=facts).to_json())
    if frozen := frozen_step(store, manifest.step):
        shards = [
            ShardRef(key=ref.key, sha256=sha256, content_sha256=ref.content_sha256) if ref.key == manifest.key else ref
            for ref in frozen.shards
        ]
        store.put(run_layout.step_list(manifest.step), frozen.model_copy(update={"shards": tuple(shards)}).to_json())


def damaging(change: Callable[[bytes], bytes]) -> Callable[[RunStore, ShardManifest], None]:
    return lambda store, manifest: store.put(manifest.key, change(store.get(manifest.key)))


DAMAGES = {
    "torn": (damaging(with_zeros), "altered", "damaged"),
    "truncated": (damaging(lambda data: data[:-1]), "bytes, and its manifest says", "damaged"),
    "bit-flipped": (damaging(with_a_flipped_bit), "altered", "damaged"),
    "too new": (commit_newer, "version 2", "too new: of version 2"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_shard_stops_a_resume_before_its_step_and_the_run_can_be_mended(
    kind: str, finished: Path, reference: Outcome, recipe_file: Path, recipe: Recipe, tmp_path: Path
) -> None:
    damage, reason, _ = DAMAGES[kind]
    run = untrained(copied(finished, tmp_path / "run"))
    store = RunStore.open(run)
    manifest = list_manifests(store, 1)[0]
    damage(store, manifest)
    before = {path: data for path, data in files(run).items() if path.parent.name != "metrics"}
    said = refused(rollstream(*run_command(recipe_file, run, resume=True)))
    assert said.startswith(f"error: {manifest.key}: ") and reason in said
    # Step 0 was trained, nothing of step 1 was decided on half of its data, and what was there is as it was.
    assert Runtime(run, recipe).policies.versions() == [0, 1]
    assert frozen_step(store, 1) is None
    assert before.items() <= files(run).items()

    # The way out that the message names.
    if kind != "too new":
        assert f"remove {run_layout.manifest(1, 0)} and resume" in said
    store.delete(run_layout.manifest(1, 0))
    colocated.run(recipe, run, resume=True)
    assert outcome(run) == reference
    assert not inspect_run(store).problems and not inspect_run(store).orphans


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_shard_is_named_by_replay_and_shown_by_inspect(kind: str, finished: Path, tmp_path: Path) -> None:
    damage, _, state = DAMAGES[kind]
    run = copied(finished, tmp_path / "run")
    store = RunStore.open(run)
    manifest = list_manifests(store, 1)[1]
    damage(store, manifest)
    before = files(run)
    said = refused(rollstream("replay", run, "--to", tmp_path / "to"))
    assert said.startswith(f"error: {manifest.key}: ")
    kept = Runtime(tmp_path / "to", Recipe(name="any")).policies
    assert kept.latest() == 1, "what was replayed before the damage is whole"

    shown = rollstream("inspect", run)
    assert shown.exit_code == 0
    assert "Shards: 4, 3 whole" in shown.output and state in " ".join(shown.output.split())
    assert manifest.key in refused(rollstream("inspect", run, "--trajectory", "1/2/0"))
    assert rollstream("inspect", run, "--trajectory", "1/0/0").exit_code == 0, "the other element is whole"
    assert files(run) == before


# A full disk. The kernel refuses what goes beyond a file's first 100 bytes: like a disk without space, in the middle.


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill_disk(*_: object) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextmanager
def disk_that_fills_at(point: str, passing: int) -> Iterator[None]:
    """From that passing of a crash point on there is no space."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        faults._passings.clear()
        patch.setattr(faults.os, "kill", fill_disk)
        patch.setenv(faults.VARIABLE, f"{point}:{passing}")
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


# (from when on, what cannot be written then)
FULL = [
    ("shard-before-data", 2, "trajectories/step-00000000/0001-"),
    ("shard-before-manifest", 3, "trajectories/manifests/step-00000001/0000.json"),
    ("after-manifest", 1, "metrics/shards.jsonl"),
    ("before-step-list", 2, "steps/00000001.json"),
    ("after-step-list", 1, "metrics/train.jsonl"),
    ("policy-before-commit", 3, "policies/00000002/COMMIT.json"),
    ("before-checkpoint", 1, "trainer/00000001"),
    ("trainer-before-commit", 2, "trainer/00000002/COMMIT.json"),
]


@pytest.mark.parametrize(("point", "passing", "offender"), FULL)
def test_a_full_disk_is_one_message_leaves_nothing_half_written_and_the_run_can_be_resumed(
    point: str, passing: int, offender: str, reference: Outcome, recipe_file: Path, recipe: Recipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with disk_that_fills_at(point, passing):
        result = rollstream(*run_command(recipe_file, run, resume=False))
    said = refused(result)
    assert offender in said.splitlines()[0] and "could not be written" in said and "Free" in said
    assert_nothing_is_half_written(run)
    colocated.run(recipe, run, resume=True)
    assert outcome(run) == reference


def test_a_disk_that_is_full_for_weights_leaves_no_policy(
    reference: Outcome, recipe_file: Path, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, run = PolicyStore.publish, tmp_path / "run"

    def publish_onto_a_full_disk(policies: PolicyStore, version: int, *arguments: Any, **named: Any) -> PolicyCommit:
        with limited_files(100 if version == 1 else resource.RLIM_INFINITY):
            return publish(policies, version, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(PolicyStore, "publish", publish_onto_a_full_disk)
        said = refused(rollstream(*run_command(recipe_file, run, resume=False)))
    assert "policies/00000001: could not be written" in said
    assert_nothing_is_half_written(run)
    assert Runtime(run, recipe).policies.versions() == [0]
    colocated.run(recipe, run, resume=True)
    assert outcome(run) == reference


def test_a_disk_that_is_full_from_the_start_leaves_a_directory_that_can_be_used(
    recipe_file: Path, recipe: Recipe, reference: Outcome, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with limited_files(100):
        said = refused(rollstream(*run_command(recipe_file, run, resume=False)))
    assert "config.json" in said and "could not be written" in said
    assert files(run) == {}
    colocated.run(recipe, run)
    assert outcome(run) == reference


def test_a_replay_onto_a_full_disk_is_one_message(finished: Path, tmp_path: Path) -> None:
    run = copied(finished, tmp_path / "run")
    with limited_files(40):  # less than the first file of a replay has, however short the paths in it
        said = refused(rollstream("replay", run, "--to", tmp_path / "to"))
    assert "could not be written" in said
    assert files(tmp_path / "to") == {}


@pytest.mark.slow
def test_the_command_itself_ends_with_2_on_a_full_disk_and_goes_on_when_there_is_room(
    finished: Path,
    reference: Outcome,
    recipe_file: Path,
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a process of its own: its standard error holds that message and nothing else."""
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "data"))
    open_prompts(recipe.data, recipe.task, recipe.data.train_split)  # while there is room for them
    # Room for every file but those of the optimizer's state, which is twice as large as the weights.
    shared = Runtime(finished, recipe)
    limit = int(1.9 * shared.policies.commit(0).bytes) + 16384
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
    code = "import sys; from runners.cli import main; sys.argv[0] = 'rollstream'; main()"
    run = tmp_path / "run"

    command = [sys.executable, "-c", limited + code, *map(str, run_command(recipe_file, run, resume=False))]
    # The limit is one on the cache of compiled functions too, which would warn of it: it is only read.
    environment = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}
    full = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert full.returncode == 2, full.stderr
    first, *others = full.stderr.splitlines()
    assert first.startswith("error: ") and "trainer/00000001" in first and "could not be written" in first
    assert len(others) == 1 and others[0].startswith("Free space")
    assert_nothing_is_half_written(run)

    again = rollstream(*run_command(recipe_file, run, resume=True))
    assert again.exit_code == 0, again.output
    assert outcome(run) == reference
    assert (run / run_layout.RESULTS).exists()


def test_a_metric_that_cannot_be_written_is_taken_back_whole(tmp_path: Path) -> None:
    store = RunStore.open(tmp_path)
    metrics = MetricsWriter(store, "train")
    metrics.write(0, {"trainer/loss": 1.0})
    before = files(tmp_path)
    with (
        limited_files(len(before[tmp_path / "metrics/train.jsonl"]) + 10),
        pytest.raises(UserError, match=r"train\.jsonl: could not be written"),
    ):
        metrics.write(1, {"trainer/loss": 2.0})
    assert files(tmp_path) == before


# Recipes and directories


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.stepz=3"], ["trainer.stepz", "Did you mean trainer.steps?"]),
        (["rollout.prompts_per_step='4'"], ["rollout.prompts_per_step", "integer", '"4" (string)']),
        (["trainer.row_tokens=8"], ["trainer.row_tokens=8 is below rollout.branch_tokens", "Set trainer.row_tokens"]),
        (["sampling.top_k=5"], ["truncate", "evaluate"]),
        (["rollout.samples_per_prompt=1"], ["a group of one has no baseline"]),
        (["trainer.steps"], ["is not an override", "section.key=value"]),
    ],
)
def test_a_recipe_that_cannot_be_is_refused_with_the_reason_and_no_directory_is_made(
    overrides: list[str], said: list[str], recipe_file: Path, tmp_path: Path
) -> None:
    result = rollstream("run", recipe_file, *overrides, "--dir", tmp_path / "run")
    message = refused(result)
    assert all(part in message for part in said), message
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_is_missing_or_no_toml_is_refused(tmp_path: Path) -> None:
    assert "there is no such recipe" in refused(rollstream("run", tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("name = \n")
    assert "is not TOML" in refused(rollstream("run", tmp_path / "bad.toml"))


def test_an_occupied_directory_is_left_as_it_was(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    before = files(tmp_path)
    assert "thesis.tex" in refused(rollstream(*run_command(recipe_file, tmp_path, resume=False)))
    assert "holds no run to resume" in refused(rollstream(*run_command(recipe_file, tmp_path, resume=True)))
    assert "is a file" in refused(rollstream(*run_command(recipe_file, tmp_path / "thesis.tex", resume=False)))
    assert files(tmp_path) == before


def test_another_runs_shard_in_the_directory_is_refused_by_name(
    finished: Path, recipe_file: Path, recipe: Recipe, tmp_path: Path
) -> None:
    run = untrained(copied(finished, tmp_path / "run"))
    store = RunStore.open(run)
    foreign = list_manifests(store, 0)[0].model_copy(update={"run_id": "other-123456789abc"})
    store.put(run_layout.manifest(0, 0), foreign.to_json())
    said = refused(rollstream(*run_command(recipe_file, run, resume=True)))
    assert "belongs to run 'other-123456789abc'" in said
    assert Runtime(run, recipe).policies.latest() == 0
