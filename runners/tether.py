"""Processes that end with the one that started them, however that one ended.

A killed process cannot clean up, so its children have to notice. A tethered child notices in two ways: Linux sends it
SIGKILL when its parent dies; and anywhere else, its standard input is a pipe whose other end only the parent holds, and
which ends when the parent does. Then it kills its process group, which it leads, and so what it has started itself.

    python -m runners.tether PARENT COMMAND...     becomes COMMAND, which on Linux dies with process PARENT

Left out on purpose: Windows, and grandchildren of a parent and child that are killed at once on systems without the
Linux signal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

VARIABLE = "ROLLSTREAM_TETHERED_TO"  # in a child's environment: its parent's process id

_PR_SET_PDEATHSIG = 1


def start_tethered(
    command: Sequence[str], *, output: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts `command`, a program that calls `hold_tether`, as leader of a process group of its own.

    Call it on the main thread: Linux ends the child with the thread that started it.

    Args:
      output: where standard output and standard error go.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**environment, VARIABLE: str(os.getpid())},
        start_new_session=True,
    )


def hold_tether() -> None:
    """Ties this process to its parent, if that asked for it (`start_tethered`). Early: before anything can hang."""
    parent = os.environ.pop(VARIABLE, None)
    if parent is None:
        return
    _die_with_parent(int(parent))
    threading.Thread(target=_wait_for_the_end, name="tether", daemon=True).start()


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked to be told
        os._exit(128 + signal.SIGKILL)


def _wait_for_the_end() -> None:
    # Nobody writes to this pipe: a read returns when its other end is closed.
    while os.read(0, 1024):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def tethered_command(command: Sequence[str]) -> list[str]:
    """`command`, for a child of this process that is no program of ours."""
    return [sys.executable, "-m", "runners.tether", str(os.getpid()), *command]


def end_group(leader: subprocess.Popen[bytes], ending: signal.Signals) -> None:
    """Sends a signal to the process group of a child, of which some may still live when the child is dead."""
    with suppress(ProcessLookupError, PermissionError):  # macOS: not permitted where only zombies are left
        os.killpg(leader.pid, ending)


if __name__ == "__main__":
    _, parent, *command = sys.argv
    _die_with_parent(int(parent))
    os.execvp(command[0], command)
