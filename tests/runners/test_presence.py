"""Who is at work on a run is known, and what a dead process left is told from what a living one is making."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runners.presence import alone, living, present
from runners.run_directory import clear_leftovers_of_generators
from schemas import run_layout
from schemas.store import RunStore
from tests.pipelines.placed import wait_until

OTHER = """
import sys
from runners.presence import present
from schemas.store import RunStore
with present(RunStore.open(sys.argv[1]), "rollout-1-of-1"):
    print("here", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore.open(tmp_path)


@contextmanager
def another_process(store: RunStore) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OTHER, store.location]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "here\n"
        yield other
        assert other.stdin is not None
        other.stdin.close()


def test_who_is_at_work_is_there_until_it_ends(store: RunStore) -> None:
    with present(store, "rollout-1-of-2") as key:
        assert store.list(run_layout.WORKERS) == [key] and "rollout-1-of-2" in key
        assert living(store, besides=key) == []
        assert living(store) == [key]
    assert store.list(run_layout.WORKERS) == []


def test_a_process_that_was_killed_is_not_at_work(store: RunStore) -> None:
    with another_process(store) as other:
        assert len(living(store)) == 1
        other.kill()
        other.wait()
        assert len(store.list(run_layout.WORKERS)) == 1
        assert living(store) == []
        assert store.list(run_layout.WORKERS) == []


def test_one_is_alone_while_no_other_process_is_at_work(store: RunStore) -> None:
    with alone(store) as nobody_else:
        assert nobody_else
    with another_process(store), alone(store) as nobody_else:
        assert not nobody_else


def test_whoever_comes_while_leftovers_are_removed_waits(store: RunStore) -> None:
    came = threading.Event()

    def come() -> None:
        with present(store, "rollout-1-of-1"):
            came.set()

    with alone(store) as nobody_else:
        assert nobody_else
        thread = threading.Thread(target=come)
        thread.start()
        wait_until(lambda: len(store.list(run_layout.WORKERS)) == 2)
        assert not came.is_set()
    thread.join(60)
    assert came.is_set()


def test_leftovers_stay_while_somebody_who_may_be_making_them_lives(store: RunStore, tmp_path: Path) -> None:
    store.put_new("trajectories/step-00000000/0000-abc.arrow", b"not committed yet")
    (tmp_path / "config.json#123").write_bytes(b"staged")
    (tmp_path / "tmp/of-a-library").mkdir(parents=True)
    (tmp_path / "tmp/file").write_bytes(b"left")
    half_made = ("trajectories/step-00000000/0000-abc.arrow", "config.json#123", "tmp/of-a-library", "tmp/file")
    with another_process(store):
        clear_leftovers_of_generators(store)
        assert all((tmp_path / name).exists() for name in half_made)
    clear_leftovers_of_generators(store)
    assert not any((tmp_path / name).exists() for name in half_made)
    assert (tmp_path / "tmp").is_dir()  # where a process that is only starting puts its temporary files
