"""Who may do what only one process at a time may do with a run: holds, by name, on stores that have no locks.

A hold is the newest of a chain of records, each created only if absent, whose numbers are fencing tokens:

    locks/<name>/00000000.json, 00000001.json, ...      {"holder", "nonce", "renewals", "released", ...}

Who creates number n + 1 has taken the name over from number n, whatever number n thinks. So a holder learns that it
lost by one question (is there a number n + 1?), which `Hold.check` asks, and it asks right before it publishes. A
holder renews its record now and then. Others take a name over that was released, or whose process is dead on this
machine, or whose record, of another machine, has not changed for a whole lease while they watched: nobody compares
clocks of two machines.

What remains: a process that stops for a whole lease exactly between its check and the creation of a commit. That commit
is then first or not, like any other, and one version is still made once.

Left out on purpose: waiting in line (who finds a name held gives up), and removing old records (a listing that is late
could then hide the newest, and the chain would begin again).
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, Protocol

from schemas import run_layout
from schemas.errors import UserError

LEASE_SECONDS = 30.0
_RENEWALS_A_LEASE = 3
_LOOKS_A_LEASE = 15

_LOGGER = logging.getLogger(__name__)


class LostHoldError(UserError):
    """Another process has taken over what this one held: it must stop, and publish nothing more."""


@dataclass(frozen=True)
class Hold:
    """A name that this process holds. `token` is larger than that of every earlier holder of the name."""

    name: str
    token: int
    is_lost: Callable[[], bool] = field(default=lambda: False, repr=False)

    def check(self) -> None:
        """Raises LostHoldError if another process has taken the name over."""
        if self.is_lost():
            raise LostHoldError(
                f"hold {self.token} of {self.name!r}",
                "was taken over by another process, because this one gave no sign of life for too long.",
                "Let that process go on, or stop it and start this one again.",
            )


def refuse_second_holder(location: str, holder: str = "") -> NoReturn:
    who = f" ({holder})" if holder else ""
    raise UserError(location, f"another process is at work on it{who}.", "Wait until it ends, or stop it.")


class Records(Protocol):
    """What a chain needs of its store."""

    def put_new(self, key: str, data: bytes) -> bool: ...
    def put(self, key: str, data: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def exists(self, key: str) -> bool: ...
    def list(self, prefix: str) -> list[str]: ...


@dataclass(frozen=True)
class Lease:
    """One name in one store, and how long its holder may be silent.

    Args:
      records: the store.
      location: the run, for messages.
      name: what is held.
      seconds: how long a holder may go without renewing.
    """

    records: Records
    location: str
    name: str
    seconds: float = LEASE_SECONDS

    @contextmanager
    def held(self) -> Iterator[Hold]:
        """Holds the name until the context ends or the process does.

        Raises:
          UserError: on entering, if a living process holds it. It takes up to one lease to find that one is not.
        """
        token, record = self._take()
        ended = threading.Event()
        renewing = threading.Thread(
            target=self._renew, args=(token, record, ended), name=f"lease-{self.name}", daemon=True
        )
        renewing.start()
        try:
            yield self._hold(token)
        finally:
            ended.set()
            renewing.join()
            with suppress(UserError):  # it expires by itself; what happened inside matters more
                self.records.put(self._key(token), _to_bytes(record | {"released": True}))

    def _take(self) -> tuple[int, dict[str, Any]]:
        newest = self._newest()
        if newest >= 0:
            self._wait_until_free(newest)
        record = _own_record()
        if not self.records.put_new(self._key(newest + 1), _to_bytes(record)):
            refuse_second_holder(self.location)
        return newest + 1, record

    def _hold(self, token: int) -> Hold:
        return Hold(self.name, token, lambda: self.records.exists(self._key(token + 1)))

    def _newest(self) -> int:
        """The newest record's number; -1: there is none. The listing may be late, so it is only where to begin."""
        listed = [int(key.rsplit("/", 1)[1].removesuffix(".json")) for key in self.records.list(self._folder)]
        newest = max(listed, default=-1)
        while self.records.exists(self._key(newest + 1)):
            newest += 1
        return newest

    def _wait_until_free(self, token: int) -> None:
        """Returns once the holder is known to be gone; refuses at its first sign of life."""
        first = self._record(token)
        if _is_gone(first):
            return
        if first.get("machine") == _machine() != "":  # it lives, and as long as it does the name is its own
            refuse_second_holder(self.location, first["holder"])
        _LOGGER.warning(
            "%s is held by %s; waiting up to %.0f s for a sign of life", self.location, first["holder"], self.seconds
        )
        deadline = time.monotonic() + self.seconds
        while time.monotonic() < deadline:
            time.sleep(self.seconds / _LOOKS_A_LEASE)
            now = self._record(token)
            if _is_gone(now):
                return
            if now["renewals"] != first["renewals"] or self.records.exists(self._key(token + 1)):
                refuse_second_holder(self.location, now["holder"])

    def _renew(self, token: int, record: dict[str, Any], ended: threading.Event) -> None:
        while not ended.wait(self.seconds / _RENEWALS_A_LEASE):
            record["renewals"] += 1
            try:
                self.records.put(self._key(token), _to_bytes(record))
            except UserError as error:  # the next may succeed; if none does, others take over
                _LOGGER.warning("the hold of %s could not be renewed: %s", self.name, error)

    def _record(self, token: int) -> dict[str, Any]:
        key = self._key(token)
        try:
            record = json.loads(self.records.get(key))
            return {"holder": str(record["holder"]), "renewals": int(record["renewals"])} | record
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.location}/{key}", "does not say who holds the run.", "Remove it if nobody does."
            ) from error

    @property
    def _folder(self) -> str:
        return run_layout.lock(self.name)

    def _key(self, token: int) -> str:
        return f"{self._folder}/{token:08d}.json"


def _to_bytes(record: dict[str, Any]) -> bytes:
    return json.dumps(record, indent=1).encode()


def _own_record() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "holder": f"process {pid} on {socket.gethostname()}",
        "nonce": secrets.token_hex(8),  # so that of two records one is known as one's own
        "machine": _machine(),
        "pid": pid,
        "began": _began(pid),
        "renewals": 0,
        "released": False,
    }


def _is_gone(record: dict[str, Any]) -> bool:
    """Whether the holder said goodbye, or was a process of this machine that is no more."""
    if record.get("released"):
        return True
    return record.get("machine") == _machine() != "" and record.get("began") != _began(int(record["pid"]))


@cache
def _machine() -> str:
    """Names this boot of this machine and the namespace of its process numbers; "" where that cannot be told."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _began(pid: int) -> str:
    """When a process of this machine began, in ticks since the boot; "" if there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
