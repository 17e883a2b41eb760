"""Calls with a time limit: what each call's outcome is, whatever the others do."""

import threading
from functools import partial

import pytest

from stages import limits
from stages.limits import CancelledError, attempt, call_all, describe_error

LIMIT = 0.2
AMPLE = 60.0  # a limit that only a broken test reaches


@pytest.fixture
def gate():
    """What hanging calls wait for; opened at the end, so that no thread outlives its test."""
    gate = threading.Event()
    yield gate
    gate.set()


def raise_(error):
    raise error


def test_outcomes_are_in_order_of_the_calls():
    assert [outcome.value for outcome in call_all([partial(pow, i, 2) for i in range(1000)], AMPLE)] == [
        i * i for i in range(1000)
    ]


def test_no_call_needs_no_thread():
    assert call_all([], AMPLE) == []


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_whatever_a_call_raises_is_its_outcome_alone(error):
    before, failed, after = call_all([lambda: 1, partial(raise_, error), lambda: 3], AMPLE)
    assert (before.value, after.value) == (1, 3)
    assert type(error).__name__ in failed.error and "raise error" in failed.traceback


def test_a_call_over_the_limit_fails_alone(gate):
    before, hung, after = call_all([lambda: 1, gate.wait, lambda: 3], LIMIT)
    assert (before.value, after.value) == (1, 3)
    assert hung.value is None and hung.error == "TimeoutError: took longer than 0.2 s"


def test_a_call_over_the_limit_says_where_it_hangs(gate):
    def waits_for_a_reply():
        gate.wait()

    (hung,) = call_all([waits_for_a_reply], LIMIT)
    assert "waits_for_a_reply" in hung.traceback


def test_a_call_that_comes_back_after_its_limit_changes_nothing(gate):
    back = threading.Event()

    def late():
        gate.wait()
        back.set()
        return "too late"

    outcomes = call_all([late, lambda: 2], LIMIT)
    gate.set()
    assert back.wait(AMPLE)
    assert [outcome.value for outcome in outcomes] == [None, 2]


def test_more_calls_than_workers_may_hang(gate):
    calls = [gate.wait if i % 2 else partial(int, i) for i in range(3 * limits.WORKERS_MAX)]
    outcomes = call_all(calls, LIMIT)
    assert [outcome.value for outcome in outcomes] == [None if i % 2 else i for i in range(3 * limits.WORKERS_MAX)]


def test_fast_calls_share_one_thread(monkeypatch):
    monkeypatch.setattr(limits, "PROBE_SECONDS", AMPLE)
    assert len({outcome.value for outcome in call_all([threading.get_ident] * 1000, AMPLE)}) == 1


def test_slow_calls_wait_side_by_side():
    meeting = threading.Barrier(limits.WORKERS_MAX)  # passed only when so many calls are in flight at once
    outcomes = call_all([lambda: meeting.wait(AMPLE)] * limits.WORKERS_MAX, AMPLE)
    assert sorted(outcome.value for outcome in outcomes) == list(range(limits.WORKERS_MAX))


def test_limits_hold_outside_the_main_thread(gate):
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.extend(call_all([gate.wait, lambda: 2], LIMIT)))
    thread.start()
    thread.join()
    assert [outcome.value for outcome in outcomes] == [None, 2]


def test_once_cancelled_no_further_call_is_made(gate):
    cancelled, made = threading.Event(), []

    def cancel_and_hang():
        cancelled.set()
        gate.wait()
        return made.append("the call in flight")

    with pytest.raises(CancelledError):
        call_all([cancel_and_hang], AMPLE, cancelled=cancelled)
    assert made == []


def test_without_a_thread_to_be_had_calls_fail_and_the_caller_lives(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda self: raise_(RuntimeError("can't start new thread")))
    outcomes = call_all([lambda: 1, lambda: 2], AMPLE)
    assert [outcome.error for outcome in outcomes] == ["RuntimeError: can't start new thread"] * 2


def test_an_error_is_one_line_that_can_be_stored():
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError

    assert (
        describe_error(ValueError("two\nlines, half an emoji \ud83d")) == "ValueError: two lines, half an emoji \\ud83d"
    )
    assert describe_error(Unprintable()).endswith("Unprintable: <exception str() failed>")
    assert len(describe_error(ValueError("x" * 10_000))) == limits.ERROR_CHARACTERS
    attempt(partial(raise_, ValueError("\ud83d"))).traceback.encode()
