"""Every number that a run records: its name, its unit, who records it, what it means; and the files they are kept in.

Names are `<part>/<quantity>_<unit>/<statistic>`. A name that is not in `METRICS` is refused when it is written, and
`docs/metrics.md` is made from the table, so neither can drift from the other.

Events are JSON lines, append-only, one log a stage (see `RunStore.append_line`). A stage that is run again for the same
step (a retry, a resume) appends again, and the last word counts. Each says which worker wrote it (`schemas.worker`), so
what every worker did can be read too, also where another's word counted. Left out on purpose: any other sink.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas import run_layout, worker
from schemas.store import RunStore
from schemas.text import to_json


@dataclass(frozen=True)
class Metric:
    name: str
    unit: str
    stage: str
    meaning: str


_TABLE: dict[str, tuple[tuple[str, str, str], ...]] = {
    "prompts": (
        ("prompts/groups", "groups", "prompts claimed for the step"),
        ("prompts/deferrals", "times", "the source waited because the newest policy was too old for the step"),
        ("prompts/deferred_seconds", "seconds", "time from the first deferral to the claim"),
        ("prompts/lag_steps", "steps", "the step minus the policy version that was pinned"),
    ),
    "rollout": (
        ("rollout/trajectories", "trajectories", "sampled, failed ones included"),
        ("rollout/failed_trajectories", "trajectories", "tombstones: the episode failed"),
        ("rollout/prompt_tokens", "tokens", "prompt tokens, computed and counted once a group"),
        ("rollout/sampled_tokens", "tokens", "tokens that the policy sampled"),
        ("rollout/environment_tokens", "tokens", "tokens that environments wrote after the prompt"),
        ("rollout/turns/mean", "turns", "answers of an episode"),
        ("rollout/branch_tokens/mean", "tokens", "tokens after the prompt, of one trajectory"),
        ("rollout/branch_tokens/max", "tokens", "tokens after the prompt, of the longest trajectory"),
        ("rollout/seconds", "seconds", "the whole rollout of the element"),
        ("rollout/decode_seconds", "seconds", "of which the engine sampled"),
        ("rollout/environment_seconds", "seconds", "of which environments stepped"),
        ("rollout/decode_calls", "calls", "calls of the engine that decoded for the element"),
        (
            "rollout/sessions_per_decode_call/mean",
            "sessions",
            "cohorts that such a call decoded together: above 1 where elements or cohorts share calls",
        ),
        ("rollout/sampled_tokens_per_second", "tokens/s", "sampled tokens over the rollout's seconds"),
        ("rollout/policy_version", "version", "policy version that sampled the element"),
    ),
    "reward": (
        ("reward/trajectories", "trajectories", "scored, failed ones included"),
        ("reward/failed_trajectories", "trajectories", "tombstones: scoring failed"),
        ("reward/total/mean", "reward", "mean reward of the trajectories that did not fail"),
        ("reward/total/std", "reward", "standard deviation of the same rewards"),
        (
            "reward/success/fraction",
            "fraction",
            'share that succeeded: component "success" if there is one, else reward > 0',
        ),
        ("reward/seconds", "seconds", "scoring of the element"),
    ),
    "group": (
        ("group/groups", "groups", "groups made"),
        ("group/duplicates", "trajectories", "came twice, recognised by identity, dropped"),
        ("group/tombstones", "trajectories", "failed or missing samples that complete their groups"),
        ("group/mixed/fraction", "fraction", "share of groups whose rewards differ: only these teach anything"),
        ("group/seconds", "seconds", "grouping of the element"),
    ),
    "pack": (
        ("pack/trajectories", "trajectories", "placed in a row"),
        ("pack/rows", "rows", "training rows"),
        ("pack/tokens", "tokens", "branch tokens placed"),
        ("pack/filled/fraction", "fraction", "share of the rows' tokens that is filled"),
        ("pack/unplaced_trajectories", "trajectories", "in no row: tombstones and those that fit none"),
        ("pack/seconds", "seconds", "packing of the element"),
    ),
    "shards": (
        ("shards/bytes", "bytes", "size of the shard's file"),
        ("shards/trajectories", "trajectories", "in the shard"),
        ("shards/tokens", "tokens", "in the shard, prompts included"),
        ("shards/already_committed", "shards", "the slot held the same content already"),
        ("shards/quarantined", "shards", "the slot held other content; the first stays, this one is set aside"),
        ("shards/dead_letters", "letters", "written for what failed"),
        ("shards/seconds", "seconds", "commit of the element"),
    ),
    "train": (
        ("trainer/loss", "loss", "the objective of the step before its update"),
        ("trainer/grad_norm", "norm", "global norm of the gradient before clipping"),
        ("trainer/learning_rate", "1", "learning rate of the step"),
        ("trainer/entropy_nats/mean", "nats", "entropy of the policy at trained tokens"),
        ("trainer/ratio/mean", "ratio", "trainer's over sampler's probability of a trained token"),
        ("trainer/ratio/max", "ratio", "the largest of them"),
        ("trainer/clipped/fraction", "fraction", "share of trained tokens whose ratio was clipped"),
        ("trainer/sampler_logprob_gap_nats/mean", "nats", "distance of trainer's and sampler's log-probability"),
        ("trainer/sampler_logprob_gap_nats/max", "nats", "the largest of them; at lag 0 an alarm if not about 0"),
        ("trainer/lag_steps/mean", "steps", "the step minus the oldest version that sampled, of trained trajectories"),
        ("trainer/lag_steps/max", "steps", "the largest of them"),
        ("trainer/lag_in_flight_steps/mean", "steps", "of which versions published before the shard's commit"),
        ("trainer/lag_in_flight_steps/max", "steps", "the largest of them"),
        ("trainer/lag_in_queue_steps/mean", "steps", "and those published since: while the shard waited for its step"),
        ("trainer/lag_in_queue_steps/max", "steps", "the largest of them"),
        ("trainer/trained_tokens", "tokens", "tokens in the loss that were computed"),
        ("trainer/trained_groups", "groups", "groups in the loss that were computed"),
        ("trainer/equal_groups", "groups", "groups whose rewards are all equal"),
        ("trainer/too_old_groups", "groups", "left out because their policy was older than max_lag allows"),
        ("trainer/micro_batches", "micro-batches", "the update was split into"),
        ("trainer/router_load/max", "ratio", "busiest expert's choices over the mean of its layer; mixtures only"),
        ("trainer/router_idle_experts/fraction", "fraction", "share of experts that no token chose"),
        ("trainer/router_entropy_nats/mean", "nats", "entropy of the routers over tokens and layers"),
        ("trainer/router_balance/mean", "loss", "load-balancing loss of the layers: 1 is even"),
        ("trainer/router_dropped_tokens", "tokens", "that did not reach an expert of theirs; always 0"),
        ("trainer/seconds", "seconds", "the whole step, from the frozen list to the commit"),
        ("trainer/update_seconds", "seconds", "of which gradients and the optimizer"),
        ("trainer/publish_seconds", "seconds", "of which publishing the policy and saving state"),
        ("trainer/idle_seconds", "seconds", "waiting for the step's shards"),
        ("trainer/trained_tokens_per_second", "tokens/s", "trained tokens over the update's seconds"),
        ("trainer/skipped_shards", "shards", "damaged shards that the step left out"),
    ),
    "evaluate": (
        ("evaluate/success/fraction", "fraction", "share of samples that succeeded; the step is the policy version"),
        ("evaluate/prompts", "prompts", "prompts evaluated"),
        ("evaluate/samples", "samples", "samples evaluated"),
        ("evaluate/seconds", "seconds", "the evaluation"),
    ),
    "warm_start": (
        ("warm_start/loss", "nats", "cross-entropy of a demonstrated token"),
        ("warm_start/tokens", "tokens", "demonstrated tokens in the loss"),
        ("warm_start/learning_rate", "1", "learning rate of the step"),
        ("warm_start/seconds", "seconds", "the optimizer step"),
    ),
}

METRICS: tuple[Metric, ...] = tuple(
    Metric(name, unit, stage, meaning) for stage, rows in _TABLE.items() for name, unit, meaning in rows
)
METRIC_BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}

_STAGE_NAME = re.compile(r"^[a-z][a-z0-9_]*$")
_OWN_KEYS = ("stage", "step", "time", "values", "worker", "process")


@dataclass(frozen=True)
class MetricEvent:
    """What one stage recorded for one step. `labels` tell events of one step apart ("element": its index)."""

    stage: str
    step: int
    time: float  # seconds since the epoch
    values: Mapping[str, float]  # NaN where the value was not finite
    labels: Mapping[str, Any] = field(default_factory=dict)
    worker: str = ""  # the writer's name in the run; "" in events of before there were names
    process: str = ""  # and its process, "host:pid"


@dataclass(frozen=True)
class MetricsWriter:
    """Appends one stage's events to `metrics/<stage>.jsonl`."""

    store: RunStore
    stage: str
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if not _STAGE_NAME.match(self.stage):
            raise ValueError(f"stage {self.stage!r} names a file: lower-case letters, digits and _")

    def write(self, step: int, values: Mapping[str, Any], **labels: Any) -> None:
        """Records `values` (Python, NumPy or JAX scalars) for `step`. What is not finite is stored as null.

        Label an event `element=<index>` where a step has several; events of one (stage, step, element) replace each
        other.

        Raises:
          ValueError: a name is not in METRICS, or a label has the name of one of the event's own keys.
          TypeError: a value is not one number.
        """
        taken = sorted(set(labels) & set(_OWN_KEYS))
        if taken:
            raise ValueError(f"label {taken[0]!r} is a key of every event; choose another name")
        numbers = {_known(name): _number(name, value) for name, value in values.items()}
        event = {**labels, "stage": self.stage, "step": int(step), "time": self.clock(), "values": numbers}
        event |= {"worker": worker.worker(), "process": worker.process()}
        self.store.append_line(run_layout.metrics(self.stage), to_json(event).encode())


def _known(name: str) -> str:
    if name in METRIC_BY_NAME:
        return name
    near = difflib.get_close_matches(name, METRIC_BY_NAME, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name!r} is no metric of schemas.metrics.METRICS{guess}")


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: {value!r} is not one number") from error


def read_metrics(store: RunStore, stage: str | None = None) -> list[MetricEvent]:
    """All events of a run, or of one stage: by stage, then step, then element.

    A torn line is passed over: its writer died, and wrote or will write the event again. Of events with one stage, step
    and element the last counts.
    """
    return MetricsTail(store, stage).read()


_LastWords = dict[tuple[Any, ...], tuple[str, MetricEvent]]  # by identity; and the part of a log that it stands in


class MetricsTail:
    """Reads a run's metrics again and again while they grow, and parses each line once.

    Args:
      stage: of one stage only; None: of all.
    """

    def __init__(self, store: RunStore, stage: str | None = None):
        self._store = store
        self._stage = stage
        self._parsed_bytes: dict[str, int] = {}  # by part of a log
        self._last: _LastWords = {}
        self._last_of_processes: _LastWords = {}

    def read(self) -> list[MetricEvent]:
        """As `read_metrics`, of now."""
        self._look()
        return _in_order(self._last)

    def read_of_processes(self) -> list[MetricEvent]:
        """The same, but the last word of each process: where two were at work on an element, both are there."""
        self._look()
        return _in_order(self._last_of_processes)

    def _look(self) -> None:
        logs = "metrics" if self._stage is None else run_layout.metrics(self._stage)
        for part, size in self._store.log_parts(logs).items():
            if size > self._parsed_bytes.get(part, 0):
                self._parse(part, self._store.get_part(part))

    def _parse(self, part: str, data: bytes) -> None:
        start = self._parsed_bytes.get(part, 0)
        for line in data[start:].split(b"\n"):
            event = _event(line)
            if event is not None:
                identity = (event.stage, event.step, _element(event))
                _take(self._last, identity, part, event)
                _take(self._last_of_processes, (*identity, event.process), part, event)
        # What stands behind the last line break may still be in the writing; it is looked at again.
        self._parsed_bytes[part] = data.rfind(b"\n") + 1


def _take(last: _LastWords, identity: tuple[Any, ...], part: str, event: MetricEvent) -> None:
    """The last word counts: in one part by the order of lines, between parts, which grow side by side, by time."""
    known_part, known = last.get(identity, (part, event))
    if known_part == part or event.time >= known.time:
        last[identity] = part, event


def _in_order(last: _LastWords) -> list[MetricEvent]:
    events = [event for _, event in last.values()]
    return sorted(events, key=lambda event: (event.stage, event.step, _element(event), event.process))


def _element(event: MetricEvent) -> str:
    element = event.labels.get("element")
    return "" if element is None else f"{element:>8}"


def _event(line: bytes) -> MetricEvent | None:
    try:
        record = json.loads(line)
        values = {name: math.nan if value is None else float(value) for name, value in record["values"].items()}
        labels = {key: value for key, value in record.items() if key not in _OWN_KEYS}
        who = str(record.get("worker", "")), str(record.get("process", ""))
        return MetricEvent(str(record["stage"]), int(record["step"]), float(record["time"]), values, labels, *who)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def markdown_table() -> str:
    """All metrics as a Markdown table, for docs/metrics.md."""
    lines = ["| stage | metric | unit | meaning |", "|---|---|---|---|"]
    lines += [f"| {m.stage} | `{m.name}` | {m.unit} | {m.meaning} |" for m in METRICS]
    return "\n".join(lines) + "\n"
