"""Calls into code that may hang, in processes that are killed when late: a time limit that works from any thread.

    verify = KillableFunction("stages.reward.mathematics:verified", seconds_limit=2.0)
    verify("42", "6 * 7")        # JSON in, JSON out; TimeoutError after 2 s, and the process is gone

Python holds one lock while it multiplies huge numbers or matches a regular expression, so neither a thread nor a signal
handler can stop that; only the end of its process can. `stages.limits.call_all` may make such calls from its threads.

A process serves one call at a time, and is kept for the next one. It ends when this one closes the pipe (so when this
one dies, too), and by an alarm of its own if it is busy then. Left out: a sandbox. The code runs with the user's
rights; what is limited is its time and its memory.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

STARTING_SECONDS = 120.0  # imports of a busy machine; no part of the limit
MEMORY_BYTES = 4 * 2**30  # address space of one process
ALARM_FACTOR = 2.0  # a process whose parent was killed ends itself after so many times the limit
WORKERS_MAX = max(2, min(4, os.cpu_count() or 1))


class RemoteError(Exception):
    """What the function raised, in one line."""


class KillableFunction:
    """`module:function`, called in another process. Safe from many threads: up to `WORKERS_MAX` calls run side by side.

    Args:
      function: "package.module:name" of a function of JSON values that returns a JSON value. Its module is imported in
        the other process only.
      seconds_limit: wall time of one call, without its wait for a free process or for a new process to start.
      warm_up: arguments of a call that is part of a process's start, for what the function imports or opens when it is
        first called; what comes of it does not matter.
    """

    def __init__(self, function: str, seconds_limit: float, warm_up: Sequence[Any] | None = None):
        self._function = function
        self._warm_up = warm_up
        self._limit = seconds_limit
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(WORKERS_MAX)
        atexit.register(self.close)

    def __call__(self, *arguments: Any) -> Any:
        """What the function returns.

        Raises:
          TimeoutError: it took longer than the limit.
          RemoteError: it raised, or its process ended (for want of memory, say).
        """
        with self._free:
            worker = self._take()
            try:
                answer = worker.call(arguments, self._limit)
            except BaseException:
                self._end(worker)
                raise
            with self._lock:
                self._idle.append(worker)
        if "error" in answer:
            raise RemoteError(answer["error"])
        return answer["value"]

    def start(self) -> None:
        """Has one process ready, so that the first call need not wait for its imports."""
        with self._free:
            worker = self._take()
            with self._lock:
                self._idle.append(worker)

    def close(self) -> None:
        """Ends all processes. A later call starts new ones."""
        with self._lock:
            workers, self._idle = list(self._all), []
        for worker in workers:
            self._end(worker)

    def process_ids(self) -> list[int]:
        """Of the processes that are there now."""
        with self._lock:
            return [worker.pid for worker in self._all]

    def _take(self) -> _Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        worker = _Worker(self._function, self._limit, self._warm_up)
        with self._lock:
            self._all.add(worker)
        try:
            worker.wait_until_ready()
        except BaseException:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: _Worker) -> None:
        with self._lock:
            self._all.discard(worker)
        worker.kill()


class _Worker:
    """One process, and the pipes to it: a line of JSON there, a line of JSON back."""

    def __init__(self, function: str, seconds_limit: float, warm_up: Sequence[Any] | None):
        # Not multiprocessing: its children import the parent's main module again, whatever that does.
        alarm = seconds_limit * ALARM_FACTOR
        command = [sys.executable, "-m", "stages.killable", function, str(alarm), json.dumps(warm_up)]
        # One thread for linear algebra: each would reserve address space, which is limited.
        ours = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
        environment = {**os.environ, **ours, "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # a group of its own, which is killed with all that it started
        )
        self._read = b""
        self.pid = self._process.pid

    def wait_until_ready(self) -> None:
        ready = self._line(STARTING_SECONDS)
        if "error" in ready:
            raise RemoteError(ready["error"])

    def call(self, arguments: tuple[Any, ...], seconds: float) -> dict[str, Any]:
        request = json.dumps(arguments).encode() + b"\n"
        try:
            _pipe(self._process.stdin).write(request)
            _pipe(self._process.stdin).flush()
        except BrokenPipeError:
            raise RemoteError("its process has ended") from None
        return self._line(seconds)

    def _line(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        pipe = _pipe(self._process.stdout).fileno()
        while b"\n" not in self._read:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise TimeoutError(f"took longer than {seconds:g} s")
            received = os.read(pipe, 65536)
            if not received:
                raise RemoteError("its process has ended")
            self._read += received
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def kill(self) -> None:
        if self._process.returncode is None:  # not waited for, so the number is still that of our group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                _pipe(pipe).close()
        self._process.wait()


def _pipe(pipe: Any) -> BinaryIO:
    assert pipe is not None
    return pipe


# In the other process ---------------------------------------------------------------------------------------------


def serve(function: str, alarm_seconds: float, warm_up: Sequence[Any] | None) -> None:
    """Answers calls of `function` until the input ends."""
    with contextlib.suppress(ValueError, OSError):  # a system without that limit, or with a lower one
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what the function prints is no answer
    module, _, name = function.partition(":")
    try:
        called = getattr(importlib.import_module(module), name)
    except Exception as error:
        _send(output, {"error": _line_of(error)})
        return
    if warm_up is not None:
        with contextlib.suppress(Exception):
            called(*warm_up)
    _send(output, {"value": None})
    for line in sys.stdin.buffer:
        # The default action of SIGALRM ends the process, also within C code that no Python handler interrupts.
        signal.setitimer(signal.ITIMER_REAL, alarm_seconds)
        try:
            answer = {"value": called(*json.loads(line))}
        except Exception as error:
            answer = {"error": _line_of(error)}
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        _send(output, answer)


def _send(output: BinaryIO, answer: dict[str, Any]) -> None:
    output.write(json.dumps(answer).encode() + b"\n")
    output.flush()


def _line_of(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]))
