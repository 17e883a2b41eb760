"""Shares: how several pipelines divide one run's positions among themselves, without talking to each other.

Share i of n has the positions i, i + n, i + 2n, ... of the run. A source counts within its share, so that its
restriction is a plain range; this is where its count becomes a position and back.

Left out on purpose: who works on which share. Two pipelines may have the same one: whoever commits an element first has
it, and the other passes it over.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """The positions p of a run with p % of == index. The default is all of them.

    >>> [Share(1, 3).position(count) for count in range(4)]
    [1, 4, 7, 10]
    """

    index: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise ValueError(f"share {self.index} of {self.of}: shares are numbered from 0 and lie below their number")

    def position(self, count: int) -> int:
        """The share's position number `count`, from 0."""
        return self.index + count * self.of

    def below(self, position: int) -> int:
        """How many of the share's positions lie below `position`.

        >>> [Share(1, 3).below(position) for position in (0, 1, 2, 5)]
        [0, 0, 1, 2]
        """
        return max(0, -(-(position - self.index) // self.of))

    def __str__(self) -> str:
        """As people number them, from 1.

        >>> str(Share(1, 4))
        '2/4'
        """
        return f"{self.index + 1}/{self.of}"


WHOLE_RUN = Share()
