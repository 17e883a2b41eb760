"""Functions that tests have called in another process: good ones, and ones that do what a verifier should not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time


def add(a: int, b: int) -> int:
    print("what a function prints is no answer")
    return a + b


def own_process() -> int:
    return os.getpid()


def fail(message: str) -> None:
    raise ValueError(f"two\nlines: {message}")


def leave() -> None:
    os._exit(3)


def hold_the_lock() -> bool:
    """Matching this keeps Python's lock for years: no other thread of the process runs."""
    return re.fullmatch(r"(a+)+b", "a" * 60) is None


def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)


def start_a_sleeper(file: str) -> None:
    with open(file, "w") as pid:
        pid.write(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid))
    time.sleep(3600)


def take_much_memory() -> int:
    return len(bytearray(64 * 2**30))


CALLS: list[str] = []


def slow_at_first(argument: str) -> list[str]:
    if not CALLS:
        time.sleep(1.0)
    CALLS.append(argument)
    return CALLS
