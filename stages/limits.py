"""Calls into code that is not ours (environments, reward functions), each with a time limit; none can end the run.

    outcomes = call_all([partial(environment.step, answer) for ...], seconds_limit=10.0)

One worker thread makes the calls one after another, which is all that a thousand calls of ten microseconds need. The
caller's thread watches which call each worker is in and since when. Where calls turn out slow it adds workers, so that
they wait side by side; where one takes longer than the limit it is given up: its thread is abandoned, and the calls
after it go on in another thread. Outcomes are in order of the calls, so that threads decide nothing but the time.

Left out on purpose: signals (they only work in a main thread, and pipelines run in others) and killing. A thread cannot
be killed: an abandoned call keeps its thread until it returns, and one that never lets go of the interpreter's lock
stops everything. Code that may do either belongs into a process of its own, behind an environment that talks to it.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from schemas.text import storable_text

T = TypeVar("T")

WORKERS_MAX = 32  # calls in flight at once, at most
PROBE_SECONDS = 0.01  # between looks at whether more workers would help
SLOW_CALL_SECONDS = 0.001  # calls slower than this are mostly waiting: they get more workers
CANCEL_POLL_SECONDS = 0.1  # how late a cancellation may be noticed
ERROR_CHARACTERS = 500


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of a call: its value, or one line of `error` with a traceback. `seconds` is how long it took."""

    value: T | None
    error: str | None
    traceback: str
    seconds: float

    @property
    def result(self) -> T:
        """The value of a call that did not fail."""
        return cast(T, self.value)


class CancelledError(Exception):
    """The caller asked to stop; the calls that were still to come were not made."""


def call_all(
    calls: Sequence[Callable[[], T]],
    seconds_limit: float,
    *,
    cancelled: threading.Event | None = None,
) -> list[Outcome[T]]:
    """Makes every call, whatever the others do.

    Args:
      calls: [N], independent of each other; any of them may run beside any other.
      seconds_limit: wall time of one call.
      cancelled: once set, no further call is made.

    Returns:
      [N] outcomes in order of the calls. Whatever a call raises is its outcome, `SystemExit` too.

    Raises:
      CancelledError: `cancelled` was set before all calls had ended.
    """
    if not calls:
        return []
    return _Round(calls, seconds_limit, cancelled or threading.Event()).run()


def describe_error(error: BaseException) -> str:
    """One line, of bounded length, that is valid UTF-8 whatever the exception says."""
    text = "".join(traceback.format_exception_only(error))
    return storable_text(" ".join(text.split()))[:ERROR_CHARACTERS]


def attempt(call: Callable[[], T]) -> Outcome[T]:
    """Makes one call, here and now, without a limit; what it raises is its outcome."""
    started = time.perf_counter()
    try:
        value = call()
    except BaseException as error:  # an environment's sys.exit() must not end a worker, let alone the run
        seconds = time.perf_counter() - started
        return Outcome(None, describe_error(error), storable_text("".join(traceback.format_exception(error))), seconds)
    return Outcome(value, None, "", time.perf_counter() - started)


@dataclass(eq=False)
class _Worker:
    """A thread and the call that it is in. Guarded by the round's lock."""

    thread: threading.Thread | None = None
    index: int = -1
    since: float = 0.0
    abandoned: bool = False


class _Round(Generic[T]):
    """One `call_all`. The lock guards everything but the calls themselves."""

    def __init__(self, calls: Sequence[Callable[[], T]], seconds_limit: float, cancelled: threading.Event):
        self._calls = calls
        self._limit = seconds_limit
        self._cancelled = cancelled
        self._changed = threading.Condition()
        self._outcomes: list[Outcome[T] | None] = [None] * len(calls)
        self._next = 0  # the first call that no worker has taken
        self._left = len(calls)
        self._workers: set[_Worker] = set()

    def run(self) -> list[Outcome[T]]:
        try:
            with self._changed:
                self._add_workers(1)
                self._watch()
        finally:  # KeyboardInterrupt comes this way too
            with self._changed:
                self._stop()
        return [outcome for outcome in self._outcomes if outcome is not None]

    # In the caller's thread, with the lock held.

    def _watch(self) -> None:
        while self._left:
            left_before = self._left
            self._changed.wait(self._pause())
            if self._left and self._cancelled.is_set():
                raise CancelledError
            self._give_up_overdue()
            self._add_workers(self._more_workers(left_before - self._left))

    def _pause(self) -> float:
        if self._next < len(self._calls):
            return PROBE_SECONDS
        oldest = min(worker.since for worker in self._workers)
        return min(max(oldest + self._limit - time.monotonic(), 0.0), CANCEL_POLL_SECONDS)

    def _give_up_overdue(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers if now - worker.since > self._limit]:
            self._finish(worker.index, _overdue(worker, now - worker.since, self._limit))
            self._abandon(worker)

    def _more_workers(self, finished: int) -> int:
        """How many to add after a look in which `finished` calls ended: as many again, if they are slow."""
        if not self._workers:
            return 1
        slow = finished < len(self._workers) * PROBE_SECONDS / SLOW_CALL_SECONDS
        return min(len(self._workers), WORKERS_MAX - len(self._workers)) if slow else 0

    def _add_workers(self, number: int) -> None:
        for _ in range(min(number, len(self._calls) - self._next)):
            worker = _Worker()
            # The call is taken here, not in the new thread, so that a worker in the set is always in a call.
            self._take(worker)
            worker.thread = threading.Thread(target=self._work, args=(worker,), name="limited-call", daemon=True)
            self._workers.add(worker)
            try:
                worker.thread.start()
            except RuntimeError as error:  # no more threads: enough calls that hang for ever use them up
                self._abandon(worker)
                self._finish(worker.index, Outcome(None, describe_error(error), "", 0.0))

    def _stop(self) -> None:
        self._next = len(self._calls)
        for worker in list(self._workers):
            self._abandon(worker)

    def _abandon(self, worker: _Worker) -> None:
        worker.abandoned = True
        self._workers.discard(worker)

    def _take(self, worker: _Worker) -> None:
        worker.index, worker.since = self._next, time.monotonic()
        self._next += 1

    def _finish(self, index: int, outcome: Outcome[T]) -> None:
        self._outcomes[index] = outcome
        self._left -= 1
        if not self._left:
            self._changed.notify()

    # In the workers' threads.

    def _work(self, worker: _Worker) -> None:
        while True:
            outcome = attempt(self._calls[worker.index])
            with self._changed:
                if worker.abandoned:
                    return
                self._finish(worker.index, outcome)
                if self._next == len(self._calls):
                    self._workers.discard(worker)
                    return
                self._take(worker)


def _overdue(worker: _Worker, seconds: float, limit: float) -> Outcome:
    """The outcome of a call that is still running, with where it hangs."""
    frame = sys._current_frames().get(worker.thread.ident or -1) if worker.thread else None
    stack = "".join(traceback.format_stack(frame)) if frame else ""
    return Outcome(None, f"TimeoutError: took longer than {limit:g} s", storable_text(stack), seconds)
