"""The commands with a run directory in an object store: a whole tour, and one clear message for what is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jax_core.tree_places import CACHE_VARIABLE
from schemas.run_layout import CONFIG, CURVE, RESULTS
from schemas.store import RunStore
from stages.runtime import release
from tests.pipelines.tiny_runs import share_parts
from tests.runners.test_cli import RECIPE, invoke, refused
from tests.s3_server import BUCKET, s3_server

NOBODY = "http://127.0.0.1:9"  # the discard port, where nothing listens


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    # A machine in a cloud would find credentials of its own there.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", NOBODY)


@pytest.fixture
def s3(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


@pytest.mark.slow
def test_a_run_on_s3_is_trained_resumed_evaluated_replayed_and_inspected(
    s3: None, recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    share_parts(monkeypatch)
    monkeypatch.chdir(tmp_path)
    run = f"s3://{BUCKET}/tour/tiny"
    trained = invoke("run", recipe, "--dir", run)
    assert trained.exit_code == 0, trained.output
    assert f"run directory   {run}" in trained.output and f"rollstream inspect {run}" in trained.output
    store = RunStore.open(run)
    assert store.get(CURVE).startswith(b"\x89PNG") and json.loads(store.get(RESULTS))
    assert "already holds a run" in refused(invoke("run", recipe, "--dir", run))
    assert "another recipe" in refused(invoke("run", recipe, "seed=2", "--dir", run, "--resume"))
    assert invoke("run", recipe, "--dir", run, "--resume").exit_code == 0

    evaluated = invoke("evaluate", run, "--prompts", "2", "--samples", "1", "--json")
    assert evaluated.exit_code == 0 and json.loads(evaluated.stdout)["version"] == 2
    replayed = invoke("replay", run, "--to", f"{run}-again", "--json")
    assert replayed.exit_code == 0 and json.loads(replayed.stdout)["identical"]
    inspected = json.loads(invoke("inspect", run, "--json").stdout)
    assert inspected["steps_done"] == 2 and inspected["problems"] == []
    shown = invoke("inspect", run, "--trajectory", "0/0/0")
    assert shown.exit_code == 0, shown.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "tiny.toml"], "nothing lies in a folder s3:"
    release(run)


def each_command(recipe: Path, run: str) -> list[tuple[str | Path, ...]]:
    return [("run", recipe, "--dir", run), ("evaluate", run), ("replay", run), ("inspect", run)]


@pytest.mark.parametrize("url", ["s3://", "s4://bucket/run", "s3://bucket/run?versions", "az://container/run"])
def test_an_address_that_names_no_store_is_refused(recipe: Path, url: str) -> None:
    for command in each_command(recipe, url):
        assert url in refused(invoke(*command))


def test_missing_credentials_are_said(recipe: Path) -> None:
    for command in each_command(recipe, "s3://bucket/run"):
        said = refused(invoke(*command))
        assert "s3://bucket/run" in said and "no usable credentials" in said and "AWS_ACCESS_KEY_ID" in said


def test_a_missing_bucket_is_said(recipe: Path, s3: None) -> None:
    for command in [
        *each_command(recipe, "s3://no-such-bucket/run"),
        ("run", recipe, "--resume", "--dir", "s3://no-such-bucket/run"),
    ]:
        said = refused(invoke(*command))
        assert "s3://no-such-bucket/run: its bucket does not exist. Make the bucket" in said


def test_a_server_that_is_not_there_is_said(recipe: Path, s3: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOBODY)
    said = refused(invoke("inspect", "s3://bucket/run"))
    assert "s3://bucket/run" in said and "does not answer" in said and "AWS_ENDPOINT_URL" in said


def test_a_bucket_without_a_run_is_said(recipe: Path, s3: None) -> None:
    run = f"s3://{BUCKET}/nothing"
    for command in ("evaluate", "replay", "inspect"):
        assert "holds no run" in refused(invoke(command, run))
    assert "no run to resume" in refused(invoke("run", recipe, "--dir", run, "--resume"))
    assert not RunStore.open(run).exists(CONFIG)
