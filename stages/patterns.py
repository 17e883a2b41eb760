"""Regular expressions on text that a model wrote, with a time limit.

Python holds its one lock while it matches, and some expressions take years on some texts; so the matching is done in a
process that is killed when late.
"""

from __future__ import annotations

import functools
import re

from stages.killable import KillableFunction

MATCHING_SECONDS = 1.0


def compiled(pattern: str) -> re.Pattern[str]:
    """The expression.

    Raises:
      ValueError: it is none.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression ({error})") from None


@functools.cache
def killable_pattern() -> KillableFunction:
    """`match`, in another process."""
    return KillableFunction("stages.patterns:match", MATCHING_SECONDS)


def match(how: str, pattern: str, text: str) -> str | None:
    """What matches: all of the text ("full"), the first place ("first") or the last one ("last"); None if nothing does.

    Of an expression with groups, what the first one holds.

    >>> match("last", "[0-9]+", "3 and 4"), match("full", "[0-9]+", "3 and 4")
    ('4', None)
    """
    expression = compiled(pattern)
    if how == "full":
        found = expression.fullmatch(text)
    elif how == "first":
        found = expression.search(text)
    else:
        found = None
        for found in expression.finditer(text):  # noqa: B007
            pass
    if found is None:
        return None
    return (found.group(1) or "") if expression.groups else found.group()
