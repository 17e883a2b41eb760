"""Who is who: the identity of a trajectory, and every random seed that derives from it.

A seed is a hash of *what the draw is for* and *whose draw it is*. So a retry anywhere draws the same numbers, no draw
depends on the order of work, and two purposes never share a stream.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class TrajectoryId:
    """One sample of one prompt of one training step.

    >>> TrajectoryId(step=12, group_index=3, sample_index=0).path
    '12/3/0'
    """

    step: int
    group_index: int
    sample_index: int

    @property
    def path(self) -> str:
        return f"{self.step}/{self.group_index}/{self.sample_index}"


def seed_words(purpose: str, *parts: int | str) -> tuple[int, int]:
    """Two uint32 words for `purpose` and `parts`: the raw data of a JAX threefry key.

    >>> seed_words("tokens", 0, 1, 2, 3) == seed_words("tokens", 0, 1, 2, 3)
    True
    >>> seed_words("tokens", 0, 1, 2, 3) == seed_words("environment", 0, 1, 2, 3)
    False
    """
    text = "\x1f".join([purpose, *map(str, parts)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def seed_int(purpose: str, *parts: int | str) -> int:
    """A non-negative seed below 2**63 for numpy, gymnasium and friends."""
    high, low = seed_words(purpose, *parts)
    return ((high << 32) | low) & (2**63 - 1)
