"""Calls in processes that are killed when late: what comes back, what is killed, and what is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from stages.killable import WORKERS_MAX, KillableFunction, RemoteError
from stages.limits import call_all

MODULE = "tests.stages.killable_functions"
AMPLE = 60.0


@pytest.fixture
def killable():
    made = []

    def make(function, seconds_limit=AMPLE):
        made.append(KillableFunction(f"{MODULE}:{function}", seconds_limit))
        return made[-1]

    yield make
    for function in made:
        function.close()


def gone(pid, seconds=10.0):
    """Whether the process ends, or is but a zombie, within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_a_call_returns_what_the_function_returns_and_keeps_its_process(killable):
    add, own_process = killable("add"), killable("own_process")
    assert [add(1, 2), add(30, 4)] == [3, 34]
    assert own_process() == own_process() != os.getpid()
    assert own_process.process_ids() == [own_process()]


def test_what_a_function_raises_is_one_line_and_ends_no_process(killable):
    fail = killable("fail")
    for message in ("first", "second"):
        with pytest.raises(RemoteError, match=f"^ValueError: two lines: {message}$"):
            fail(message)
    assert len(fail.process_ids()) == 1


def test_a_process_is_warm_before_its_first_call_and_the_warming_may_fail():
    slow_first = KillableFunction(f"{MODULE}:slow_at_first", 0.5, warm_up=["anything"])
    assert slow_first("called") == ["anything", "called"]
    slow_first.close()
    fail = KillableFunction(f"{MODULE}:fail", AMPLE, warm_up=["warming"])
    with pytest.raises(RemoteError, match="called"):
        fail("called")
    fail.close()


@pytest.mark.parametrize("function", ["hold_the_lock", "ignore_sigterm"])
def test_a_late_call_is_killed_whatever_it_does_and_the_next_one_has_a_new_process(killable, function):
    late = killable(function, 0.3)
    late.start()
    (pid,) = late.process_ids()
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"longer than 0.3 s"):
        late()
    assert time.monotonic() - started < 5
    assert gone(pid) and late.process_ids() == []
    late.start()
    assert late.process_ids() != [pid]


def test_what_a_late_function_started_is_killed_with_it(killable, tmp_path):
    with pytest.raises(TimeoutError):
        killable("start_a_sleeper", 2.0)(str(tmp_path / "pid"))
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_process_that_ends_itself_is_an_error_and_no_hang(killable):
    leave = killable("leave")
    for _ in range(2):
        with pytest.raises(RemoteError, match="its process has ended"):
            leave()


def test_memory_is_limited(killable):
    with pytest.raises(RemoteError, match="MemoryError"):
        killable("take_much_memory")()


def test_a_function_that_is_not_there_is_named(killable):
    with pytest.raises(RemoteError, match="no_such_function"):
        killable("no_such_function")()


def test_calls_of_many_threads_are_answered_each_with_its_own_result_by_few_processes(killable):
    add = killable("add")
    outcomes = call_all([partial(add, i, 1000) for i in range(200)], AMPLE)
    assert [outcome.result for outcome in outcomes] == list(range(1000, 1200))
    assert 1 <= len(add.process_ids()) <= WORKERS_MAX


def test_a_limit_works_off_the_main_thread_beside_other_calls(killable):
    late, add = killable("hold_the_lock", 0.3), killable("add")
    late.start()
    outcomes = []
    calls = [late, *(partial(add, i, 0) for i in range(20))]
    thread = threading.Thread(target=lambda: outcomes.extend(call_all(calls, AMPLE)))
    thread.start()
    thread.join()
    assert outcomes[0].error == "TimeoutError: took longer than 0.3 s"
    assert [outcome.result for outcome in outcomes[1:]] == list(range(20))


PARENT = f"""
import threading, time
from stages.killable import KillableFunction
idle, busy = KillableFunction("{MODULE}:add", 1.0), KillableFunction("{MODULE}:hold_the_lock", 2.0)
idle.start(); busy.start()
threading.Thread(target=busy, daemon=True).start()
time.sleep(0.2)
print(*idle.process_ids(), *busy.process_ids(), flush=True)
time.sleep(3600)
"""


def test_no_process_outlives_a_parent_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        idle, busy = map(int, parent.stdout.readline().split())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert gone(idle) and gone(busy)


HUNG = f"""
import threading
from stages.killable import KillableFunction
hung = KillableFunction("{MODULE}:hold_the_lock", 3600.0)
hung.start()
print(*hung.process_ids(), flush=True)
threading.Thread(target=hung, daemon=True).start()
"""


def test_a_call_that_hangs_keeps_no_process_from_ending():
    ended = subprocess.run([sys.executable, "-c", HUNG], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert gone(int(ended.stdout))


def test_closing_ends_the_processes_and_a_later_call_starts_a_new_one(killable):
    own_process = killable("own_process")
    first = own_process()
    own_process.close()
    assert gone(first) and own_process() != first
