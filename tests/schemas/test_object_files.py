"""A run directory in an object store: calls that fail, lists that are late, logs in parts, and holds that expire."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, UnauthenticatedError
from obstore.store import MemoryStore

from schemas import holds, object_files
from schemas.errors import UserError
from schemas.holds import Hold, Lease, LostHoldError
from schemas.metrics import MetricsTail, MetricsWriter, read_metrics
from schemas.object_calls import Calls, Patience, open_objects
from schemas.object_files import ObjectFiles
from schemas.store import RunStore
from tests.faulty_store import QUICK, THROTTLED, FaultyStore


def over(objects: FaultyStore | MemoryStore, patience: Patience = QUICK) -> RunStore:
    return RunStore.over(objects, "s3://bucket/run", patience)


# Calls that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_store_that_fails_every_third_call_reads_and_writes_as_one_that_does_not(seed: int, tmp_path: Path) -> None:
    objects = FaultyStore(refused=0.2, unanswered=0.15, seed=seed)
    store = over(objects)
    for index in range(20):
        assert store.put_new(f"slots/{index:02d}", b"%d" % index), "whoever created it must be told so"
        assert not store.put_new(f"slots/{index:02d}", b"another")
        store.put("replaced", b"%d" % index)
        store.append_line("log.jsonl", b"%d" % index)
    assert store.list("slots") == [f"slots/{index:02d}" for index in range(20)]
    assert [store.get(key) for key in store.list("slots")] == [b"%d" % index for index in range(20)]
    assert store.get("replaced") == b"19"
    assert store.get("log.jsonl").split() == [b"%d" % index for index in range(20)]
    store.delete("replaced")
    assert not store.exists("replaced")
    assert objects.faults["refused"] > 10 and objects.faults["unanswered"] > 5


def test_of_sixteen_writers_who_are_often_not_answered_exactly_one_wins() -> None:
    store = over(FaultyStore(refused=0.2, unanswered=0.3))
    with ThreadPoolExecutor(16) as pool:
        for slot in range(5):
            won = list(pool.map(lambda writer, slot=slot: store.put_new(f"{slot}", b"%d" % writer), range(16)))
            assert sum(won) == 1 and store.get(f"{slot}") == b"%d" % won.index(True)


def test_a_creation_that_conflicts_with_one_that_failed_is_tried_again() -> None:
    class Conflicting(FaultyStore):
        def put(self, path: str, file: object, **kwargs: object) -> object:
            if not self.calls["put"]:
                self.calls["put"] += 1
                raise AlreadyExistsError("409 ConditionalRequestConflict")
            return super().put(path, file, **kwargs)

    assert over(Conflicting()).put_new("slot", b"ours")


def test_a_store_that_is_down_is_given_up_after_bounded_waits_with_jitter_and_one_clear_error() -> None:
    waits: list[float] = []
    patience = Patience(first_wait_seconds=0.5, longest_wait_seconds=4.0, attempts=9, sleep=waits.append)
    store = over(FaultyStore(), patience)
    assert not store.exists("k")  # it has answered once
    object_files_of(store)._objects = FaultyStore(refused=1.0)
    with pytest.raises(UserError, match=r"s3://bucket/run: does not answer: 9 attempts for k failed, .*503 .*SlowDown"):
        store.get("k")
    bounds = [0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0]
    assert len(waits) == 8 and all(0 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))
    assert len(set(waits)) == 8, "everybody would come back at the same time"


def test_an_address_that_never_answered_is_given_up_sooner() -> None:
    waits: list[float] = []
    with pytest.raises(UserError, match="3 attempts"):
        over(FaultyStore(refused=1.0), Patience(sleep=waits.append)).exists("k")
    assert len(waits) == 2


def object_files_of(store: RunStore) -> ObjectFiles:
    assert store.objects is not None
    return store.objects


STATUS = "Server returned non-2xx status code:"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionDeniedError("403 Forbidden"), "k is not accessible .*Give these credentials access"),
        (UnauthenticatedError("401 Unauthorized"), "no usable credentials .*AWS_ACCESS_KEY_ID"),
        (GenericError("PUT http://169.254.169.254/latest/api/token - error sending request"), "no usable credentials"),
        (GenericError(f"{STATUS} 404 Not Found: <Code>NoSuchBucket</Code>"), "its bucket does not exist.*Make the"),
        (FileNotFoundError(f"{STATUS} 404: The specified bucket does not exist."), "its bucket does not exist"),
        (GenericError("Received redirect without LOCATION"), "lies in another region.*AWS_REGION"),
        (GenericError(f"{STATUS} 400 Bad Request: no"), "refused a call for k"),
        (GenericError(f"{STATUS} 501 Not Implemented"), ".*create-if-absent"),
    ],
)
def test_what_only_the_user_can_mend_is_said_at_once(error: Exception, said: str) -> None:
    def call() -> None:
        raise error

    def never(seconds: float) -> None:
        raise AssertionError("it was tried again")

    with pytest.raises(UserError, match=rf"s3://bucket/run: {said}"):
        Calls("s3://bucket/run", Patience(sleep=never)).make("k", call)


@pytest.mark.parametrize(
    "status", ["408 Request Timeout", "429 Too Many Requests", "500 Internal Server Error", "503 x"]
)
def test_what_passes_is_tried_again(status: str) -> None:
    outcomes: Iterator[Exception | None] = iter([GenericError(f"{STATUS} {status}"), None])

    def call() -> str:
        if (error := next(outcomes)) is not None:
            raise error
        return "answer"

    assert Calls("s3://bucket/run", QUICK).make("k", call) == ("answer", 2)


def test_a_server_that_never_answers_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        patience = Patience(call_seconds=0.2, connect_seconds=0.2, first_attempts=2, sleep=lambda seconds: None)
        store = RunStore.over(open_objects("s3://bucket/run", patience), "s3://bucket/run", patience)
        began = time.monotonic()
        with pytest.raises(UserError, match=r"does not answer: 2 attempts for config\.json"):
            store.exists("config.json")
        assert time.monotonic() - began < 3


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "s3://bucket/run?x=1", "gs://b k/run", "az://container/run"])
def test_an_address_that_names_no_store_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE")]:
        monkeypatch.delenv(name)
    with pytest.raises(UserError) as refused:
        RunStore.open(url)
    assert refused.value.offender == url


# Lists that are late, and long ------------------------------------------------------------------------------------


def test_a_list_comes_in_pages_and_one_that_breaks_off_is_asked_for_again() -> None:
    objects = FaultyStore(refused=0.3, page=2)
    store = over(objects)
    keys = [f"k/{index:02d}" for index in range(9)]
    for key in keys:
        store.put(key, b"")
    assert [store.list("k") for _ in range(30)] == [keys] * 30
    assert objects.faults["torn list"] > 0


def test_what_the_list_does_not_name_yet_is_there_for_who_asks_by_name() -> None:
    store = over(FaultyStore(late=2))
    for index in range(4):
        store.put_new(f"k/{index}", b"")
    assert store.list("k") == ["k/0", "k/1"]
    assert store.exists("k/3") and store.get("k/3") == b"" and not store.put_new("k/3", b"again")


# Logs -------------------------------------------------------------------------------------------------------------


def test_a_log_is_one_key_however_many_parts_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_files, "_PART_BYTES", 30)
    objects = FaultyStore()
    writers = [over(objects), over(objects)]
    for index in range(12):
        writers[index % 2].append_line("metrics/a.jsonl", b"line %02d" % index)
    reader = over(objects)
    assert reader.list() == reader.list("metrics") == ["metrics/a.jsonl"] and reader.exists("metrics/a.jsonl")
    assert sorted(reader.get("metrics/a.jsonl").splitlines()) == [b"line %02d" % index for index in range(12)]
    parts = reader.log_parts("metrics/a.jsonl")
    assert len(parts) == 4 and sum(parts.values()) == 12 * 8
    reader.delete("metrics/a.jsonl")
    assert reader.list() == [] and not reader.exists("metrics/a.jsonl")
    with pytest.raises(FileNotFoundError):
        reader.get("metrics/a.jsonl")


def test_a_line_whose_put_was_in_doubt_is_never_taken_back_by_that_put_when_it_arrives() -> None:
    """A call that timed out may reach the store later, with the part as it was then."""

    class Delaying(FaultyStore):
        delayed: Callable[[], object] | None = None

        def put(self, path: str, file: object, **kwargs: object) -> object:
            if self.delayed is None:
                self.delayed = lambda: self.objects.put(path, file, **kwargs)
                raise GenericError(THROTTLED)
            return super().put(path, file, **kwargs)

    objects = Delaying()
    store = over(objects)
    store.append_line("a.jsonl", b"one")
    store.append_line("a.jsonl", b"two")
    assert objects.delayed is not None
    objects.delayed()
    assert store.get("a.jsonl") == b"one\ntwo\n"


def test_metrics_are_read_alike_from_a_file_from_parts_and_from_both(tmp_path: Path) -> None:
    local, remote = RunStore.open(tmp_path), over(MemoryStore())
    for store in (local, remote):
        for step in range(3):
            for attempt in range(2):
                clock = lambda step=step, attempt=attempt: 10.0 * attempt + step
                MetricsWriter(store, "train", clock).write(step, {"trainer/loss": step + attempt})
    assert read_metrics(local) == read_metrics(remote) and len(read_metrics(remote)) == 3

    copied = over(MemoryStore())  # a local run that was copied into a bucket and then resumed
    copied.put("metrics/train.jsonl", local.get("metrics/train.jsonl") + b'{"stage": "train", "st')
    tail = MetricsTail(copied)
    assert tail.read() == read_metrics(local)
    MetricsWriter(copied, "train", lambda: 100.0).write(2, {"trainer/loss": 7.0})
    assert [event.values["trainer/loss"] for event in tail.read()] == [1.0, 2.0, 7.0]
    assert tail.read() == read_metrics(copied)
    assert copied.get("metrics/train.jsonl").count(b"\n") == 6 + 1 + 1


def test_of_two_writers_words_on_one_event_the_later_counts_in_whatever_order_they_are_read() -> None:
    objects = MemoryStore()
    first, second = over(objects), over(objects)
    MetricsWriter(first, "train", lambda: 1.0).write(0, {"trainer/loss": 1.0})
    MetricsWriter(second, "train", lambda: 3.0).write(0, {"trainer/loss": 3.0})
    tail = MetricsTail(over(objects))
    tail.read()
    MetricsWriter(first, "train", lambda: 2.0).write(0, {"trainer/loss": 2.0})
    assert [event.values["trainer/loss"] for event in tail.read()] == [3.0]


# Holds ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared() -> RunStore:
    return over(FaultyStore(refused=0.2, unanswered=0.2, late=5))


def lease(store: RunStore, seconds: float = 0.6) -> Lease:
    return Lease(object_files_of(store), store.location, "trainer", seconds)


def test_a_name_is_held_by_one_at_a_time_and_each_holder_has_a_larger_token(shared: RunStore) -> None:
    for token in range(3):
        with lease(shared).held() as hold:
            assert hold.token == token
            hold.check()
            said = rf"another process is at work on it \(process {os.getpid()} on "
            with pytest.raises(UserError, match=said), lease(shared).held():
                raise AssertionError("two hold it")


def test_of_eight_who_ask_at_once_one_gets_the_name(shared: RunStore) -> None:
    start, done = threading.Barrier(8), threading.Barrier(8)

    def ask(_: int) -> bool:
        start.wait()
        try:
            with lease(shared).held():
                done.wait()
                return True
        except UserError:
            done.wait()
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(ask, range(8))) == 1


def fall_silent(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> Hold:
    """Takes the name and renews no more, as a process that hangs or whose machine is gone."""
    token, _ = lease(store)._take()
    monkeypatch.setattr("schemas.holds._machine", lambda: "another machine")  # of who asks next
    return lease(store)._hold(token)


def test_a_silent_holders_name_is_taken_over_after_a_lease_and_its_publishing_loses(
    shared: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = fall_silent(shared, monkeypatch)
    stale.check()
    began = time.monotonic()
    with lease(shared).held() as hold:
        assert 0.6 <= time.monotonic() - began < 5
        assert hold.token == stale.token + 1
        hold.check()
        with pytest.raises(LostHoldError, match="was taken over by another process"):
            stale.check()


def test_the_name_of_a_process_of_this_machine_that_is_dead_is_free_at_once(shared: RunStore) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        record = holds._own_record() | {"pid": other.pid, "began": holds._began(other.pid)}
        lock = lease(shared, 60.0)
        assert object_files_of(shared).put_new(lock._key(0), holds._to_bytes(record)) and not holds._is_gone(record)
        other.kill()
    began = time.monotonic()
    with lock.held() as hold:
        assert hold.token == 1 and time.monotonic() - began < 5


def test_a_name_that_was_let_go_is_free_at_once(shared: RunStore) -> None:
    for _ in range(2):
        began = time.monotonic()
        with lease(shared, 60.0).held():
            assert time.monotonic() - began < 5


def test_a_holder_that_lives_is_recognised_by_its_renewals_and_keeps_the_name(
    shared: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lease(shared).held() as hold:
        monkeypatch.setattr("schemas.holds._machine", lambda: "another machine")
        for _ in range(3):
            with pytest.raises(UserError, match="another process is at work"), lease(shared).held():
                raise AssertionError("it lives")
        hold.check()


@pytest.mark.parametrize("kind", ["local", "objects"])
def test_both_kinds_of_store_hold_names_with_growing_tokens_and_know_what_this_process_holds(
    kind: str, tmp_path: Path
) -> None:
    open_again = RunStore.open if kind == "local" else None
    store = RunStore.open(tmp_path) if open_again else RunStore.in_memory()
    other = open_again(tmp_path) if open_again else store
    for token in range(3):
        with store.hold("trainer") as hold, other.hold("share-1-of-2"):
            assert hold.token == token
            assert other.fencing_token == f"trainer:{token},share-1-of-2:{token}"
            other.check_holds()
    assert other.fencing_token == ""


def test_a_local_name_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    with RunStore.open(tmp_path).hold("trainer"):
        with pytest.raises(UserError, match="another process is at work"), RunStore.open(tmp_path).hold("trainer"):
            raise AssertionError("two hold it")
        with RunStore.open(tmp_path).hold("another"):
            pass
