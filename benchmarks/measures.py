"""What a run's own metrics say of its speed. Steps and elements are those of a stretch of the run: the first ones
compile, and would say nothing of the others."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

from schemas.metrics import MetricEvent

Interval = tuple[float, float]  # begin and end, seconds since the epoch


def steps_per_second(train: Sequence[MetricEvent], first: int) -> float:
    """Steps from `first` on, over the time that they took together."""
    ends = {event.step: event.time for event in train}
    last = max(ends)
    return (last - first + 1) / (ends[last] - ends[first - 1])


def typical_steps_per_second(train: Sequence[MetricEvent], first: int) -> float:
    """As `steps_per_second`, by the median step: what stops between some of them (the learning curve) is left out."""
    ends = sorted(event.time for event in train if event.step >= first - 1)
    return 1.0 / statistics.median(after - before for before, after in pairwise(ends))


def spent(event: MetricEvent) -> Interval:
    """When the work was done whose end wrote `event`."""
    stage = "trainer" if event.stage == "train" else event.stage
    return event.time - event.values[f"{stage}/seconds"], event.time


def within(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts of intervals that are in the window.

    >>> within([(0.0, 2.0), (3.0, 4.0)], (1.0, 3.0))
    [(1.0, 2.0)]
    """
    cut = ((max(begin, window[0]), min(end, window[1])) for begin, end in intervals)
    return [(begin, end) for begin, end in cut if begin < end]


def covered(intervals: Iterable[Interval]) -> float:
    """Seconds that are in at least one interval.

    >>> covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def total(intervals: Iterable[Interval]) -> float:
    """Seconds of all intervals together."""
    return sum(end - begin for begin, end in intervals)
