"""What each worker of a run did, and what of its time it worked, waited, or did neither; from metric events alone.

A stage records, when it has done something, how long that took; the source, how long it waited for a policy; the
trainer, how long it waited for shards. So every event says of an interval of its process that it was work or waiting:

    generator   work: rollout, reward, group, pack, shards     waiting: a position was deferred
    trainer     work: train                                    waiting: the step's shards were not there

Where both are one process they take turns, and the generator also waits while the trainer works. Intervals that overlap
count once (a runner may work on several elements at once), and what a process works in meanwhile is no waiting:

    busy + idle + other = span          `other` is neither: starting, loading weights, Beam, evaluation

The span of a process is from the begin of its first interval to its last event; that of a worker is the sum over its
processes, since one that was started again was not there in between.

Left out on purpose: waiting that is going on (it is recorded when it ends), and clocks of different hosts: each process
is measured by its own.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from runners.stage_report import STAGES, StageReport, WorkTime, stage_reports
from schemas.metrics import MetricEvent
from schemas.recipe import Recipe

Part = Literal["generator", "trainer"]
PART_OF: Mapping[str, Part] = {stage: "trainer" if stage == "train" else "generator" for stage in STAGES}
UNKNOWN = "?"  # the worker of events of before they had names

_SECONDS = {stage: f"{stage}/seconds" for stage in STAGES} | {"train": "trainer/seconds"}

Interval = tuple[float, float]  # begin and end, seconds


# Intervals ---------------------------------------------------------------------------------------------------------


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that do not touch, in order.

    >>> merged([(4, 6), (0, 2), (1, 3)])
    [(0, 3), (4, 6)]
    """
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((begin, end))
    return result


def covered(intervals: Iterable[Interval]) -> float:
    """Seconds that are in any of the intervals.

    >>> covered([(4, 6), (0, 2), (1, 3)])
    5
    """
    return sum(end - begin for begin, end in merged(intervals))


# One process -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartTime:
    """Where the time of a generator or a trainer went, in seconds."""

    span: float
    busy: float
    idle: float

    @property
    def other(self) -> float:
        return max(0.0, self.span - self.busy - self.idle)


class ProcessTime:
    """The intervals of one process.

    Args:
      events: all that it wrote.
    """

    def __init__(self, events: Sequence[MetricEvent]):
        self.work = {stage: [i for e in events if e.stage == stage if (i := _work(e))] for stage in STAGES}
        trains = self.work["train"]
        self._waits: dict[Part, list[Interval]] = {
            "generator": [*(i for event in events if (i := _deferral(event))), *trains],
            "trainer": [i for event in events if (i := _starvation(event))],
        }
        self.parts: list[Part] = [part for part in _parts() if any(PART_OF[event.stage] == part for event in events)]
        begins = [begin for some in (*self.work.values(), *self._waits.values()) for begin, _ in some]
        end = max(event.time for event in events)
        self.span = end - min([*begins, *(event.time for event in events)])

    def stage(self, stage: str) -> WorkTime:
        return WorkTime(covered(self.work[stage]), self.span)

    def part(self, part: Part) -> PartTime:
        work = [interval for stage, some in self.work.items() if PART_OF[stage] == part for interval in some]
        busy = covered(work)
        return PartTime(self.span, busy, idle=covered([*work, *self._waits[part]]) - busy)


def _parts() -> tuple[Part, ...]:
    return "generator", "trainer"


def _work(event: MetricEvent) -> Interval | None:
    return _until(event.time, event.values.get(_SECONDS[event.stage]))


def _deferral(event: MetricEvent) -> Interval | None:
    """Until the claim, which is when the event was written."""
    return _until(event.time, event.values.get("prompts/deferred_seconds"))


def _starvation(event: MetricEvent) -> Interval | None:
    """Until the step began."""
    took = event.values.get("trainer/seconds")
    return None if took is None else _until(event.time - took, event.values.get("trainer/idle_seconds"))


def _until(end: float, seconds: float | None) -> Interval | None:
    """None where there is no such interval, or its length is not known."""
    known = seconds is not None and math.isfinite(seconds) and math.isfinite(end) and seconds > 0
    return (end - seconds, end) if known and seconds is not None else None


# Workers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerReport:
    """A worker as generator or as trainer: the time of its processes, and what each of its stages did.

    `stages` are of all that its processes did: where two workers sampled one element, both have it.
    """

    worker: str
    part: Part
    processes: tuple[str, ...]  # "host:pid"
    first_event: float  # seconds since the epoch
    last_event: float
    span: float  # seconds, as the module says
    busy: float
    idle: float
    other: float
    stages: tuple[StageReport, ...]

    @property
    def shares(self) -> tuple[float | None, float | None, float | None]:
        """Of the span: busy, idle, other. They add up to 1; None where the span is 0."""
        if not self.span:
            return None, None, None
        return self.busy / self.span, self.idle / self.span, self.other / self.span

    def to_json(self) -> dict[str, Any]:
        shares = dict(zip(("busy_share", "idle_share", "other_share"), self.shares, strict=True))
        return asdict(self) | shares | {"stages": [stage.to_json() for stage in self.stages]}


def worker_reports(
    of_processes: Sequence[MetricEvent], ledger: Sequence[MetricEvent], recipe: Recipe | None
) -> list[WorkerReport]:
    """One report for each worker and part, in order of part and name.

    Args:
      of_processes: the last words of each process (`MetricsTail.read_of_processes`).
      ledger: the last words of the run (`read_metrics`): what a stage was given is what the one before said there.
      recipe: the run's recipe, if it could be read.
    """
    upstream = _Upstream(ledger)
    reports = [
        _report(worker, part, events, upstream, recipe)
        for worker, events in _by_worker(of_processes).items()
        for part in _parts()
        if any(PART_OF[event.stage] == part for event in events)
    ]
    return sorted(reports, key=lambda report: (report.part, _natural(report.worker)))


def stage_times(of_processes: Sequence[MetricEvent]) -> dict[str, WorkTime]:
    """How long each stage worked, over all processes that have it."""
    times = [ProcessTime(events) for events in _by_process(of_processes).values()]
    result = {}
    for stage in STAGES:
        found = [time.stage(stage) for time in times if time.work[stage]]
        if found:
            result[stage] = WorkTime(sum(t.busy for t in found), sum(t.span for t in found))
    return result


def _report(
    worker: str, part: Part, events: Sequence[MetricEvent], upstream: _Upstream, recipe: Recipe | None
) -> WorkerReport:
    processes = {name: ProcessTime(own) for name, own in _by_process(events).items()}
    times = [process.part(part) for process in processes.values() if part in process.parts]
    own = [event for event in events if PART_OF[event.stage] == part]
    seconds = stage_times(events)
    return WorkerReport(
        worker=worker or UNKNOWN,
        part=part,
        processes=tuple(sorted(name or UNKNOWN for name, process in processes.items() if part in process.parts)),
        first_event=min(event.time for event in own),
        last_event=max(event.time for event in own),
        span=sum(time.span for time in times),
        busy=sum(time.busy for time in times),
        idle=sum(time.idle for time in times),
        other=sum(time.other for time in times),
        stages=tuple(_stages(own, upstream, seconds, recipe)),
    )


def _stages(
    own: Sequence[MetricEvent], upstream: _Upstream, seconds: Mapping[str, WorkTime], recipe: Recipe | None
) -> Iterable[StageReport]:
    for stage in STAGES:
        events = [event for event in own if event.stage == stage]
        if events:
            reports = stage_reports([*events, *upstream.of(stage, events)], seconds, recipe)
            yield next(report for report in reports if report.stage == stage)


class _Upstream:
    """What the stages before said of the elements that a stage worked on."""

    def __init__(self, ledger: Sequence[MetricEvent]):
        self._by_element: dict[tuple[str, int, Any], list[MetricEvent]] = defaultdict(list)
        self._by_step: dict[tuple[str, int], list[MetricEvent]] = defaultdict(list)
        for event in ledger:
            self._by_element[event.stage, event.step, event.labels.get("element")].append(event)
            self._by_step[event.stage, event.step].append(event)

    def of(self, stage: str, events: Sequence[MetricEvent]) -> list[MetricEvent]:
        before = STAGES[: STAGES.index(stage)]
        return [found for event in events for name in before for found in self._said(name, event)]

    def _said(self, stage: str, event: MetricEvent) -> list[MetricEvent]:
        if event.stage == "train":  # of all the step's elements
            return self._by_step[stage, event.step]
        return self._by_element[stage, event.step, event.labels.get("element")]


def _by_worker(events: Sequence[MetricEvent]) -> dict[str, list[MetricEvent]]:
    return _grouped((event.worker, event) for event in events)


def _by_process(events: Sequence[MetricEvent]) -> dict[str, list[MetricEvent]]:
    return _grouped((event.process, event) for event in events)


def _grouped(pairs: Iterable[tuple[str, MetricEvent]]) -> dict[str, list[MetricEvent]]:
    """Of the stages of the loop alone: warm start and evaluation are neither sampling nor training."""
    groups: dict[str, list[MetricEvent]] = {}
    for name, event in pairs:
        if event.stage in PART_OF:
            groups.setdefault(name, []).append(event)
    return groups


def _natural(name: str) -> list[tuple[int, str]]:
    """
    >>> sorted(["generator-10/16", "generator-9/16"], key=_natural)
    ['generator-9/16', 'generator-10/16']
    """
    return [(int(digits or -1), text) for digits, text in re.findall(r"(\d+)|(\D+)", name)]
