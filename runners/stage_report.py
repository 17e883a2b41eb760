"""What a stage did, from its metric events: records in and out, what was dropped and why, tokens, time.

Left out on purpose: whose events. They may be a whole run's, or one worker's (`runners.workers`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from runners.report import count, duration, size
from schemas.metrics import MetricEvent
from schemas.recipe import Recipe

STAGES = ("prompts", "rollout", "reward", "group", "pack", "shards", "train")


@dataclass(frozen=True)
class WorkTime:
    """How long a stage worked, in seconds of the processes that have it; `span` is how long those were there."""

    busy: float
    span: float


@dataclass(frozen=True)
class StageReport:
    """One stage. Counts are None where nothing was recorded; `dropped` is reason -> number."""

    stage: str
    events: int
    records_in: float | None
    records_out: float | None
    unit: str  # of records_out
    dropped: Mapping[str, float]
    tokens_in: float | None
    tokens_out: float | None
    seconds: float | None  # at work; elements that a process has at work side by side count once
    tokens_per_second: float | None  # tokens_out over seconds
    busy_share: float | None  # of the time that its processes were there
    notes: str = ""

    @property
    def idle_share(self) -> float | None:
        return None if self.busy_share is None else max(0.0, 1.0 - self.busy_share)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"idle_share": self.idle_share}


def total_of(events: Sequence[MetricEvent], name: str) -> float | None:
    """Sum of a metric; None if it was never recorded."""
    values = [event.values[name] for event in events if name in event.values and math.isfinite(event.values[name])]
    return sum(values) if values else None


def stage_reports(
    events: Sequence[MetricEvent], times: Mapping[str, WorkTime], recipe: Recipe | None
) -> list[StageReport]:
    """One report a stage, in the order of the flow. What goes in is what the stage before recorded as going out.

    Args:
      events: of all stages.
      times: by stage; one that is missing has recorded no time.
      recipe: the run's recipe, if it could be read.
    """
    total = lambda name: total_of(events, name)
    groups, sampled = total("prompts/groups"), total("rollout/sampled_tokens")
    trajectories, scored = total("rollout/trajectories"), total("reward/trajectories")
    placed, packed_tokens = total("pack/trajectories"), total("pack/tokens")
    skips_equal = recipe is None or recipe.algorithm.equal_groups != "train"
    make = _StageMaker(events, times)
    return [
        make("prompts", None, groups, "groups", {}, notes=_waited(events)),
        make(
            "rollout",
            groups,
            trajectories,
            "trajectories",
            {"failed": total("rollout/failed_trajectories")},
            tokens_in=total("rollout/prompt_tokens"),
            tokens_out=sampled,
            notes=_parts(events, "rollout", ("decode", "environment")),
        ),
        make("reward", trajectories, scored, "trajectories", {"failed": total("reward/failed_trajectories")}),
        make(
            "group",
            scored,
            total("group/groups"),
            "groups",
            {"came twice": total("group/duplicates")},
            notes=_counted(total("group/tombstones"), "tombstones kept"),
        ),
        make(
            "pack",
            scored,
            placed,
            "trajectories",
            {"in no row": total("pack/unplaced_trajectories")},
            tokens_out=packed_tokens,
            notes=_counted(total("pack/rows"), "rows"),
        ),
        make(
            "shards",
            scored,
            total("shards/trajectories"),
            "trajectories",
            {"quarantined shards": total("shards/quarantined"), "already committed": total("shards/already_committed")},
            tokens_out=total("shards/tokens"),
            notes=size(total("shards/bytes")) if total("shards/bytes") else "",
        ),
        make(
            "train",
            total("group/groups"),
            total("trainer/trained_groups"),
            "groups",
            {
                "equal rewards": total("trainer/equal_groups") if skips_equal else None,
                "too old": total("trainer/too_old_groups"),
                "damaged shards": total("trainer/skipped_shards"),
            },
            tokens_in=packed_tokens,
            tokens_out=total("trainer/trained_tokens"),
            notes=_parts(events, "trainer", ("update", "publish", "idle")),
        ),
    ]


class _StageMaker:
    """Fills in what all stages share."""

    def __init__(self, events: Sequence[MetricEvent], times: Mapping[str, WorkTime]):
        self._events = events
        self._times = times

    def __call__(
        self,
        stage: str,
        records_in: float | None,
        records_out: float | None,
        unit: str,
        dropped: Mapping[str, float | None],
        *,
        tokens_in: float | None = None,
        tokens_out: float | None = None,
        notes: str = "",
    ) -> StageReport:
        time = self._times.get(stage)
        return StageReport(
            stage=stage,
            events=sum(event.stage == stage for event in self._events),
            records_in=records_in,
            records_out=records_out,
            unit=unit,
            dropped={reason: number for reason, number in dropped.items() if number},
            tokens_in=tokens_in,
            tokens_out=tokens_out,
            seconds=time.busy if time else None,
            tokens_per_second=tokens_out / time.busy if tokens_out and time and time.busy else None,
            busy_share=min(1.0, time.busy / time.span) if time and time.span else None,
            notes=notes,
        )


def _parts(events: Sequence[MetricEvent], part: str, activities: Sequence[str]) -> str:
    seconds = [(activity, total_of(events, f"{part}/{activity}_seconds")) for activity in activities]
    return ", ".join(f"{activity} {duration(value)}" for activity, value in seconds if value is not None)


def _counted(value: float | None, what: str) -> str:
    return f"{count(value)} {what}" if value else ""


def _waited(events: Sequence[MetricEvent]) -> str:
    deferrals, seconds = total_of(events, "prompts/deferrals"), total_of(events, "prompts/deferred_seconds")
    return f"waited {duration(seconds)} for policies, {count(deferrals)} times" if deferrals else ""
