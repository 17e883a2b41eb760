"""Errors that a user can mend: the offender, the reason and the way out, on one screen.

The command line prints a `UserError` without a traceback and exits with code 2. Anything else that escapes is a
fault of ours, and keeps its traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """Something that the user can mend.

    Args:
      offender: what is wrong, as the user wrote it or would recognise it (a key, a path, a value).
      reason: why it cannot stand.
      way_out: what to do instead.
    """

    def __init__(self, offender: str, reason: str, way_out: str):
        super().__init__(offender, reason, way_out)
        self.offender = offender
        self.reason = reason
        self.way_out = way_out

    def __str__(self) -> str:
        return f"{self.offender}: {self.reason} {self.way_out}".rstrip()


class DamagedDataError(UserError):
    """A stored file is torn, truncated, altered or newer than this reader; nothing of it was used."""
