"""Who is at work on a run: each of its processes holds a file of its own in the run directory while it lives.

    workers/rollout-2-of-4-<host>-<pid>-<random>.json

The lock on the file ends with its process, however that ends, so a file that nobody holds belongs to the dead. Whoever
wants to remove leftovers has to know that nobody is writing: a living writer's half-made files look like a dead one's.

Left out on purpose: keeping anybody out. Two processes may have one share (whoever commits first has an element), and
the trainer's role is kept by a lock on the run's config.json.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from schemas import run_layout
from schemas.errors import UserError
from schemas.store import RunStore
from schemas.text import to_json

_SWEEPER = "sweeper"
_WAIT_SECONDS = 0.02


@contextmanager
def present(store: RunStore, role: str) -> Iterator[str]:
    """Tells everybody, while the context lasts, that this process works on the run; gives the key that says so.

    It begins once nobody is sweeping: who sweeps either sees this process, or this process waits.
    """
    key, holding = _register(store, role)
    with holding:
        try:
            if role != _SWEEPER:
                _wait_for_sweepers(store, key)
            yield key
        finally:
            store.delete(key)


@contextmanager
def alone(store: RunStore) -> Iterator[bool]:
    """Whether nobody else is at work on the run; if so, nobody begins to be while the context lasts."""
    with present(store, _SWEEPER) as own:
        yield not living(store, besides=own)


def living(store: RunStore, besides: str = "") -> list[str]:
    """Keys of the processes that are at work on the run. Those of dead ones are removed on the way."""
    return [key for key in store.list(run_layout.WORKERS) if key != besides and not _removed(store, key)]


def _register(store: RunStore, role: str) -> tuple[str, AbstractContextManager[None]]:
    facts = {"role": role, "host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
    while True:
        key = run_layout.worker(f"{role}-{facts['host']}-{facts['pid']}-{secrets.token_hex(4)}")
        store.put_new(key, to_json(facts).encode() + b"\n")
        holding = _Held(store, key)
        if holding.taken:
            return key, holding


class _Held(AbstractContextManager[None]):
    """A key that is held from now on; `taken` is False if somebody who looked for the dead was faster."""

    def __init__(self, store: RunStore, key: str):
        self._holding = store.held(key)
        try:
            self._holding.__enter__()
            self.taken = True
        except (UserError, FileNotFoundError):
            self.taken = False

    def __exit__(self, *error: object) -> None:
        self._holding.__exit__(None, None, None)


def _removed(store: RunStore, key: str) -> bool:
    try:
        with store.held(key):
            store.delete(key)
    except FileNotFoundError:  # it has just left
        return True
    except UserError:  # it lives
        return False
    return True


def _wait_for_sweepers(store: RunStore, own: str) -> None:
    prefix = run_layout.worker(_SWEEPER).removesuffix(".json")
    while any(key.startswith(prefix) for key in living(store, besides=own)):
        time.sleep(_WAIT_SECONDS)
