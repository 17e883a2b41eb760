"""Calls to an object store that may be slow, throttled or down: tried again for a while, then one clear error.

An error is looked at once, here, and is one of three: an answer (the key is missing, or is there already), something
that only the user can mend (no credentials, no such bucket, a wrong region, no access), or a passing trouble (a
time-out, 429, 5xx, a broken connection), after which the call is made again. The waits double, with full jitter: each
is drawn evenly from zero up to its bound, so that many workers who were refused together do not come back together.

obstore's own retries are switched off: they would multiply with these, and say nothing of a call that was made twice.
What a call did that never answered is unknown, so `Calls.make` says how many attempts it took.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from urllib.parse import urlparse

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import from_url

from schemas.errors import UserError

T = TypeVar("T")

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")

_STATUS = re.compile(r"status code: (\d{3})")
_NO_BUCKET = re.compile(r"NoSuchBucket|bucket does not exist|ContainerNotFound|container does not exist")
_METADATA_SERVICES = re.compile(
    r"169\.254\.\d+\.\d+|/latest/api/token|/latest/meta-data|metadata\.google|token request|credential", re.IGNORECASE
)
_BRIEFLY_REFUSED = {408, 425, 429}  # the other 4xx say that the call itself is wrong


class Objects(Protocol):
    """What is used of an obstore store. Tests wrap one in another that fails, is slow, or lists late."""

    def put(self, path: str, file: Any, *, mode: Any = None) -> Any: ...
    def get(self, path: str) -> Any: ...
    def get_range(self, path: str, *, start: int, length: int) -> Any: ...
    def head(self, path: str) -> Any: ...
    def list(self, prefix: str | None = None, *, offset: str | None = None) -> Iterable[Any]: ...
    def list_with_delimiter(self, prefix: str | None = None) -> Any: ...
    def delete(self, paths: str) -> Any: ...


@dataclass(frozen=True)
class Patience:
    """How long to wait for one call, how often to make it, and how long to wait in between."""

    call_seconds: float = 60.0  # for one answer, bodies included: a shard goes up in one call
    connect_seconds: float = 5.0
    attempts: int = 8
    first_attempts: int = 3  # until the store has answered once: an address that was never right will not become so
    first_wait_seconds: float = 0.2
    longest_wait_seconds: float = 10.0
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    def wait(self, attempt: int) -> None:
        """Sleeps before attempt `attempt` + 1, the first being 1."""
        bound = min(self.longest_wait_seconds, self.first_wait_seconds * 2 ** (attempt - 1))
        self.sleep(random.uniform(0.0, bound))


def open_objects(url: str, patience: Patience, environment: Mapping[str, str] = os.environ) -> Objects:
    """The store and prefix at `url`, with the options that obstore reads from the environment. Asks nobody anything.

    Raises:
      UserError: `url` names no store, or an option that it needs is missing.
    """
    parts = urlparse(url)
    if parts.scheme.lower() not in SCHEMES or not parts.netloc:
        raise UserError(
            url, "names no object store.", "Give s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX."
        )
    if parts.query or parts.fragment:
        raise UserError(url, "has a query or fragment, and runs have none.", "Leave out what follows ? or #.")
    endpoints = [value for name, value in environment.items() if "ENDPOINT" in name]
    try:
        return from_url(
            url,
            client_options={
                "timeout": timedelta(seconds=patience.call_seconds),
                "connect_timeout": timedelta(seconds=patience.connect_seconds),
                "allow_http": any(endpoint.startswith("http://") for endpoint in endpoints),
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=patience.call_seconds)},
        )
    except (BaseError, ValueError) as error:
        raise UserError(
            url, f"cannot be opened: {_first_line(error)}.", "Check the address, and the options in the environment."
        ) from error


@dataclass
class Calls:
    """Makes calls to one store. Safe from many threads.

    Args:
      location: of the run, for messages.
      patience: see there.
    """

    location: str
    patience: Patience
    has_answered: bool = False

    def make(self, name: str, call: Callable[[], T]) -> tuple[T, int]:
        """What `call` returns, and how many attempts it took: after the second, an earlier one may have had its effect.

        Raises:
          FileNotFoundError, AlreadyExistsError: the store's answers; the latter has `attempts`, as above.
          UserError: the store cannot be used, or gave no answer for as long as patience lasts.
        """
        attempt = 1
        while True:
            try:
                answer = call()
            except (FileNotFoundError, AlreadyExistsError) as error:
                refuse_missing_bucket(self.location, error)
                self.has_answered = True
                error.attempts = attempt  # type: ignore[union-attr]
                raise
            except BaseError as error:
                self._refuse_for_good(name, error)
                allowed = self.patience.attempts if self.has_answered else self.patience.first_attempts
                if attempt >= allowed:
                    raise self._out_of_patience(name, attempt, error) from error
                self.patience.wait(attempt)
                attempt += 1
            else:
                self.has_answered = True
                return answer, attempt

    def _refuse_for_good(self, name: str, error: BaseError) -> None:
        """Raises a UserError if no further attempt would help."""
        text, status = str(error), _status(error)
        refuse_missing_bucket(self.location, error)
        if _is_about_credentials(error):
            raise UserError(
                self.location,
                f"no usable credentials for it were found ({_first_line(error)}).",
                "Set them in the environment (such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "GOOGLE_APPLICATION_CREDENTIALS, or AZURE_STORAGE_ACCOUNT_NAME and a key).",
            ) from error
        if isinstance(error, PermissionDeniedError):
            raise UserError(
                self.location,
                f"{name} is not accessible ({_first_line(error)}).",
                "Give these credentials access to read, list, write and delete there.",
            ) from error
        if "redirect" in text:
            raise UserError(self.location, "lies in another region.", "Set AWS_REGION to the bucket's.") from error
        refused = status is not None and 400 <= status < 500 and status not in _BRIEFLY_REFUSED
        if refused or status == 501 or isinstance(error, NotSupportedError):
            raise UserError(
                self.location,
                f"refused a call for {name} ({_first_line(error)}).",
                "Check the address, and the options in the environment; the store must have create-if-absent.",
            ) from error

    def _out_of_patience(self, name: str, attempts: int, error: BaseError) -> UserError:
        return UserError(
            self.location,
            f"does not answer: {attempts} attempts for {name} failed, the last with: {_first_line(error)}.",
            "Check the address and the network (AWS_ENDPOINT_URL, AWS_REGION and the like), then start again: "
            "what is committed stays.",
        )


def refuse_missing_bucket(location: str, error: Exception) -> None:
    if _NO_BUCKET.search(str(error)):
        raise UserError(location, "its bucket does not exist.", "Make the bucket, or correct its name.") from error


def _is_about_credentials(error: BaseError) -> bool:
    if isinstance(error, UnauthenticatedError):
        return True
    # Without credentials in the environment obstore asks the machine's metadata service for them, where one is.
    brief = (_status(error) or 0) >= 500 or _status(error) in _BRIEFLY_REFUSED
    return bool(_METADATA_SERVICES.search(_first_line(error))) and not brief


def _status(error: Exception) -> int | None:
    found = _STATUS.search(str(error))
    return int(found.group(1)) if found else None


def _first_line(error: Exception) -> str:
    text = (str(error).splitlines() or [type(error).__name__])[0].strip().rstrip(".")
    return text if len(text) <= 300 else text[:300] + "..."
