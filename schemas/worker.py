"""Who writes: the name of this process in a run, and which process it is. Every metric event carries both.

A name says what a process does, and stays the same when it is started again, here or elsewhere: "generator-2/4",
"trainer", "colocated". A process that nobody has named, such as one that a cluster has started, goes by what it is.

Left out on purpose: whether it lives (`runners.presence`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

_names: list[str] = []  # of this process; the last one counts


def process() -> str:
    """This process, as "host:pid"."""
    return f"{socket.gethostname()}:{os.getpid()}"


def worker() -> str:
    """The name of this process; what it is if it has none."""
    return _names[-1] if _names else process()


@contextmanager
def named(name: str) -> Iterator[None]:
    """Gives this process, all its threads, a name while the context lasts.

    >>> with named("generator-2/4"):
    ...     worker()
    'generator-2/4'
    """
    _names.append(name)
    try:
        yield
    finally:
        _names.remove(name)
