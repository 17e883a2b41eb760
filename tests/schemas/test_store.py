"""A run's store: complete or absent, first writer wins, and a full disk leaves nothing half-written.

The contract tests run on every kind of store; what only a local folder can suffer comes after them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas import local_files
from schemas.errors import UserError
from schemas.store import RunStore


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RunStore:
    return RunStore.open(tmp_path / "runs" / "a") if request.param == "local" else RunStore.in_memory()


@pytest.fixture
def local(tmp_path: Path) -> RunStore:
    return RunStore.open(tmp_path / "run")


def everything_under(root: Path) -> list[str]:
    """All files, staged ones too."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


# The contract of every store --------------------------------------------------------------------------------------


def test_what_was_put_is_there_and_what_was_not_is_not(store: RunStore) -> None:
    store.put("a/b.json", b"one")
    assert store.get("a/b.json") == b"one"
    assert store.exists("a/b.json")
    for missing in ("a", "a/c.json", "a/b.json/deeper", "z"):
        assert not store.exists(missing)
        with pytest.raises(FileNotFoundError):
            store.get(missing)


def test_put_replaces_and_put_new_does_not(store: RunStore) -> None:
    assert store.put_new("k", b"first") is True
    assert store.put_new("k", b"second") is False
    assert store.get("k") == b"first"
    store.put("k", b"third")
    assert store.get("k") == b"third"


def test_an_empty_value_is_a_value(store: RunStore) -> None:
    assert store.put_new("k", b"")
    assert store.exists("k") and store.get("k") == b""
    assert not store.put_new("k", b"later")


def test_list_is_sorted_recursive_and_by_whole_folders(store: RunStore) -> None:
    for key in ("b/2", "b/10/x", "b/1", "bb/1", "a"):
        store.put(key, b"")
    assert store.list("b/") == store.list("b") == ["b/1", "b/10/x", "b/2"]
    assert store.list() == ["a", "b/1", "b/10/x", "b/2", "bb/1"]
    assert store.list("a") == [] and store.list("nothing/here/") == []


def test_delete_removes_and_does_not_mind_what_is_absent(store: RunStore) -> None:
    store.put("a/b", b"x")
    store.delete("a/b")
    store.delete("a/b")
    store.delete("never/was")
    assert not store.exists("a/b")
    assert store.put_new("a/b", b"again")


def test_of_sixteen_writers_of_one_name_exactly_one_wins_and_its_bytes_are_there(store: RunStore) -> None:
    values = [bytes([65 + index]) * 4096 for index in range(16)]
    start, won = threading.Barrier(16), [False] * 16

    def write(index: int) -> None:
        start.wait()
        won[index] = store.put_new("slot/0.json", values[index])

    threads = [threading.Thread(target=write, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(won) == 1
    assert store.get("slot/0.json") == values[won.index(True)]
    assert store.list() == ["slot/0.json"]


def test_lines_are_appended_whole_and_in_order(store: RunStore) -> None:
    store.append_line("metrics/a.jsonl", b"one")
    store.append_line("metrics/a.jsonl", b"two\n")
    assert store.get("metrics/a.jsonl") == b"one\ntwo\n"
    with pytest.raises(ValueError, match="newline"):
        store.append_line("metrics/a.jsonl", b"two\nlines")


def test_parts_of_logs_hold_all_lines_and_only_they(store: RunStore) -> None:
    store.append_line("metrics/a.jsonl", b"one")
    store.append_line("metrics/b.jsonl", b"three")
    store.put("metrics/c.json", b"no log")
    for logs, size in (("metrics/a.jsonl", 4), ("metrics/b.jsonl", 6), ("metrics", 10), ("", 10), ("nothing", 0)):
        parts = store.log_parts(logs)
        assert sum(parts.values()) == sum(len(store.get_part(part)) for part in parts) == size
    with pytest.raises(ValueError, match=r"end in \.jsonl"):
        store.append_line("metrics/c.json", b"a line")


def test_a_key_that_is_not_there_cannot_be_held(store: RunStore) -> None:
    with pytest.raises(FileNotFoundError), store.held("nothing"):
        raise AssertionError("it is held")


def test_who_holds_a_key_keeps_others_out_at_once(store: RunStore) -> None:
    store.put("config.json", b"")
    with store.held("config.json"), pytest.raises(UserError, match="another process is at work on it"):
        began = time.monotonic()
        with store.held("config.json"):
            raise AssertionError("two hold it")
    assert time.monotonic() - began < 3


def test_folders_are_named_one_level_deep(store: RunStore) -> None:
    for key in ("a/1/x", "a/2/y/z", "a/file", "b/3/x"):
        store.put(key, b"")
    assert store.folders("a") == store.folders("a/") == ["1", "2"]
    assert store.folders("") == ["a", "b"] and store.folders("nothing") == []


def test_lines_of_many_threads_never_mix(store: RunStore) -> None:
    lines = [[f"{writer}:{index}:".encode() + b"x" * 500 for index in range(20)] for writer in range(4)]

    def write(mine: list[bytes]) -> None:
        for line in mine:
            store.append_line("log.jsonl", line)

    threads = [threading.Thread(target=write, args=(mine,)) for mine in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(store.get("log.jsonl").splitlines()) == sorted(line for mine in lines for line in mine)


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".", "a/b#12", "a\0b"])
def test_what_is_no_key_is_refused(store: RunStore, key: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.put(key, b""),
        lambda: store.put_new(key, b""),
        lambda: store.get(key),
        lambda: store.append_line(key, b""),
        lambda: store.delete(key),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="is not a key"):
            call()


# A local folder ---------------------------------------------------------------------------------------------------


def test_opening_makes_nothing_and_the_first_write_makes_the_folder(tmp_path: Path) -> None:
    store = RunStore.open(tmp_path / "runs" / "a")
    assert store.list() == [] and not store.exists("k")
    assert list(tmp_path.iterdir()) == []
    store.put("k", b"1")
    assert (tmp_path / "runs" / "a" / "k").read_bytes() == b"1"


def test_a_location_may_be_a_path_a_string_or_a_file_url(tmp_path: Path) -> None:
    RunStore.open(tmp_path / "a b").put("k", b"1")
    for location in (str(tmp_path / "a b"), (tmp_path / "a b").as_uri()):
        assert RunStore.open(location).get("k") == b"1"


def test_a_relative_location_stays_where_it_was_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = RunStore.open("run")
    monkeypatch.chdir("/")
    store.put("k", b"1")
    assert (tmp_path / "run" / "k").exists()


def test_a_location_that_cannot_hold_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="is a file"):
        RunStore.open(tmp_path / "file")
    for address in ("ftp://host/run", "https://host/run", Path("s3://bucket/run")):
        with pytest.raises(UserError, match="addresses of this form"):
            RunStore.open(address)


def test_only_a_local_store_has_local_paths(local: RunStore, tmp_path: Path) -> None:
    assert local.local_path("policies/1") == tmp_path / "run" / "policies" / "1"
    with pytest.raises(UserError, match="policies/1 must be one"):
        RunStore.in_memory().local_path("policies/1")
    with pytest.raises(ValueError, match="is not a key"):
        local.local_path("../outside")


def test_what_a_killed_writer_left_is_neither_listed_nor_in_the_way(local: RunStore, tmp_path: Path) -> None:
    local.put("a/other", b"1")
    (tmp_path / "run" / "a" / "k#123456").write_bytes(b"hal")
    assert local.list() == ["a/other"]
    assert local.put_new("a/k", b"whole")
    assert local.get("a/k") == b"whole"


def test_what_a_killed_writer_left_can_be_swept_away(local: RunStore, tmp_path: Path) -> None:
    local.put("a/k", b"1")
    for staged in ("a/k#123456", "top#7"):
        (tmp_path / "run" / staged).write_bytes(b"hal")
    local.sweep_staged()
    assert everything_under(tmp_path / "run") == ["a/k"]


HOLDING = """
import sys
from schemas.store import RunStore
with RunStore.open(sys.argv[1]).held("config"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_key_is_held_by_one_process_until_it_lets_go_or_dies(local: RunStore, tmp_path: Path) -> None:
    local.put("config", b"1")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING, local.location],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another process is at work on it"), local.held("config"):
            raise AssertionError("two hold it")
        assert local.get("config") == b"1", "readers do not ask"
        holder.kill()
    for _ in range(2):
        with local.held("config"):
            pass


def test_a_written_key_leaves_no_staged_file(local: RunStore, tmp_path: Path) -> None:
    local.put_new("a/k", b"1")
    local.put_new("a/k", b"2")
    local.put("a/k", b"3")
    assert everything_under(tmp_path / "run") == ["a/k"]


def test_a_commit_is_synced_before_its_name_appears_and_its_folder_after(
    local: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power failure may take is decided by this order."""
    done: list[str] = []
    fsync, link = os.fsync, os.link

    def record_fsync(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name.split('#')[0]}")
        fsync(descriptor)

    def record_link(source: Path, target: Path) -> None:
        done.append(f"link {Path(target).name}")
        link(source, target)

    monkeypatch.setattr(local_files.os, "fsync", record_fsync)
    monkeypatch.setattr(local_files.os, "link", record_link)
    local.put_new("manifests/0.json", b"{}")
    assert done == [f"sync {tmp_path.name}", "sync run", "sync 0.json", "link 0.json", "sync manifests"]
    done.clear()
    assert not local.put_new("manifests/0.json", b"{}")
    assert done == ["sync manifests"], "the loser, too, is told only of what is durable"


def test_a_line_torn_by_a_dead_writer_spoils_no_other_line(local: RunStore, tmp_path: Path) -> None:
    local.append_line("log.jsonl", b"one")
    with open(tmp_path / "run" / "log.jsonl", "ab") as file:
        file.write(b"tor")
    local.append_line("log.jsonl", b"two")
    assert local.get("log.jsonl") == b"one\ntor\ntwo\n"


# Trouble with the disk --------------------------------------------------------------------------------------------

LIMITED = """
import resource, sys
from schemas.errors import UserError
from schemas.store import RunStore

store = RunStore.open(sys.argv[1])
store.put("old", b"o" * 3000)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # the disk takes 4096 bytes of a file, and no more
for write in (store.put_new, store.put):
    for key in ("new", "folder/new", "old"):
        if key == "old" and write == store.put_new:
            continue
        try:
            write(key, b"n" * 5000)
        except UserError as error:
            print(error)
        else:
            print("written", key)
for _ in range(3):
    try:
        store.append_line("log.jsonl", b"l" * 1999)
    except UserError as error:
        print(error)
"""


def test_a_disk_that_takes_no_more_leaves_nothing_half_written(local: RunStore, tmp_path: Path) -> None:
    """A real limit, in a process of its own: writes stop in the middle, as on a full disk."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [line.split(":")[0] for line in said] == ["new", "folder/new", "new", "folder/new", "old", "log.jsonl"]
    assert all("could not be written" in line and "Free some space" in line for line in said)
    assert everything_under(tmp_path / "run") == ["log.jsonl", "old"]
    assert local.get("old") == b"o" * 3000, "what was there before is whole"
    assert local.get("log.jsonl") == (b"l" * 1999 + b"\n") * 2, "the line that did not fit was taken back"
    assert local.put_new("new", b"n" * 5000), "and the name is free for the next attempt"


@pytest.mark.parametrize("failing", ["fsync", "link", "replace"])
def test_a_write_that_fails_at_any_point_leaves_the_key_as_it_was(
    local: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    local.put("old", b"before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_files.os, failing, full)
    if failing != "replace":
        with pytest.raises(UserError, match="new: could not be written: No space left on device"):
            local.put_new("new", b"after")
    if failing != "link":
        with pytest.raises(UserError, match="old: could not be written: No space left on device"):
            local.put("old", b"after")
    assert everything_under(tmp_path / "run") == ["old"]
    assert local.get("old") == b"before"


def test_a_file_system_without_hard_links_is_named_as_the_reason(
    local: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(local_files.os, "link", no_links)
    with pytest.raises(UserError, match=r"k: the file system of .* has no hard links"):
        local.put_new("k", b"1")
    assert everything_under(tmp_path / "run") == []


def test_a_folder_that_may_not_be_written_is_named(
    local: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is injected: root may write everywhere, and tests may run as root."""

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/run/k")

    monkeypatch.setattr(local_files.Path, "mkdir", forbidden)
    with pytest.raises(UserError, match=r"a/k: is not accessible: Permission denied"):
        local.put_new("a/k", b"1")


def test_a_file_in_the_way_of_a_folder_is_named(local: RunStore) -> None:
    local.put("a", b"a file")
    with pytest.raises(UserError, match=r"a/k: a file is in the way"):
        local.put_new("a/k", b"1")
    assert local.list("a/k") == []
