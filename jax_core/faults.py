"""Where a test may kill the process: the gaps between two steps of a commit.

`ROLLSTREAM_CRASH_AT=policy-before-commit:3` sends SIGKILL to this process when it passes `policy-before-commit` for the
third time. A killed process is the one fault that no `except` or `finally` can soften, and so the one that a commit has
to survive. Left out on purpose: exceptions, delays and lost writes.

The points, in the order in which a step passes them:

shard-before-data, shard-before-manifest, after-manifest             a shard and its manifest
before-step-list, after-step-list                                    the frozen list of a step's shards
policy-before-rename, policy-before-commit, after-commit             weights and their COMMIT
before-checkpoint                                                    around the optimizer state
trainer-before-rename, trainer-before-commit, after-trainer-commit   the optimizer state and its COMMIT
after-checkpoint
"""

from __future__ import annotations

import collections
import os
import signal
import threading

VARIABLE = "ROLLSTREAM_CRASH_AT"

_lock = threading.Lock()
_passings: collections.Counter[str] = collections.Counter()


def crash_point(name: str) -> None:
    """Kills this process if the environment asks for it here; otherwise does nothing.

    Args:
      name: the point, as in the module's list. Passings are counted per process and name, from 1, while the variable
        is set.

    Raises:
      ValueError: the variable is set, but is not `<name>:<n>`.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    wanted_name, wanted_passing = _parse(wanted)
    with _lock:
        _passings[name] += 1
        if name == wanted_name and _passings[name] == wanted_passing:
            os.kill(os.getpid(), signal.SIGKILL)


def _parse(text: str) -> tuple[str, int]:
    """`"after-commit:2"` -> `("after-commit", 2)`."""
    name, colon, passing = text.rpartition(":")
    # A misspelt request that never fires would make a crash test pass for nothing.
    if not colon or not name or not passing.isascii() or not passing.isdigit() or int(passing) < 1:
        raise ValueError(f"{VARIABLE}={text!r} is not <name>:<n> with n >= 1, for example policy-before-commit:1.")
    return name, int(passing)
