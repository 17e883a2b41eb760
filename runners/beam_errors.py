"""What a stage raised, out of what Beam makes of it.

Beam makes an error of a stage new, with its own words in it, and logs it; some runners pass on its text alone. What the
user can mend has to come out as the stage raised it, so of a worker that is another process it is read from the text.

Left out on purpose: where the way out begins in that text. It ends the reason.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.errors import UserError

# They log what a stage raised, from within the handling of it, on the thread that ran the stage.
_LOGGERS = ("apache_beam.runners.common", "apache_beam.runners.worker.sdk_worker")
_BEAM_STEP = re.compile(r" \[while running '[^']*'\]")


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
        original = next(filter(_is_told, [original_error(error), *raised]), told_in(str(error)) or error)
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


def told_in(text: str) -> UserError | None:
    """The UserError that a traceback in `text` ends with, the last of several; None if there is none.

    >>> print(told_in("Traceback ...\\nschemas.errors.UserError: a.toml: is not TOML. [while running 'A/B']\\n"))
    a.toml: is not TOML.
    """
    names = "|".join(f"{re.escape(kind.__module__)}\\.{kind.__name__}" for kind in _kinds(UserError))
    told = re.findall(rf"^(?:{names}): (.+?): (.+)$", text, re.MULTILINE)
    if not told:
        return None
    offender, reason = (_BEAM_STEP.sub("", part) for part in told[-1])
    return UserError(offender, reason, "")


def _kinds(kind: type[UserError]) -> list[type[UserError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _kinds(child))]
