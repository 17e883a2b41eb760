"""What a stage raised, out of what Beam makes of it.

Beam makes an error of a stage new, with its own words in it, and logs it; some runners pass on its text alone. What the
user can mend has to come out as the stage raised it.

Left out on purpose: errors in workers that are other processes. Only their text arrives.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.errors import UserError

# They log what a stage raised, from within the handling of it, on the thread that ran the stage.
_LOGGERS = ("apache_beam.runners.common", "apache_beam.runners.worker.sdk_worker")


@contextmanager
def errors_as_raised() -> Iterator[None]:
    """Raises what a stage raised instead of what Beam made of it, where that was a UserError or an interrupt; and keeps
    Beam from logging each error."""
    raised: list[BaseException] = []

    def keep(record: logging.LogRecord) -> bool:
        handled = sys.exc_info()[1]
        if handled is not None:
            raised.append(original_error(handled))
        return False

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    except Exception as error:
        original = next(filter(_is_told, [original_error(error), *raised]), error)
        if original is error:
            raise
        raise original from None
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


def _is_told(error: BaseException) -> bool:
    return isinstance(error, UserError | KeyboardInterrupt | SystemExit)


def original_error(error: BaseException) -> BaseException:
    """What a stage raised, given what came out of Beam: the UserError or interrupt that Beam made anew, else `error`.

    Other errors are faults of ours: they keep Beam's words, which say in which step it was.
    """
    behind: BaseException | None = error
    while behind is not None and getattr(behind, "_tagged_with_step", False):
        behind = behind.__context__
    return behind if behind is not None and _is_told(behind) else error
