"""What a run did, read from its directory alone: each stage's records, tokens and time, and what was dropped and why;
and the same of each worker, with what of its time it worked and waited.

It reads live runs and broken ones. A file that cannot be read is a row that says so, never an end of the report; a file
that is missing is named. Nothing is written.

Left out on purpose: plots (`curve.png` has one), and following a run (`rollstream run` shows it live).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from runners.report import count, duration, number, share, size, sparkline, table
from runners.stage_report import STAGES, StageReport, stage_reports
from runners.workers import WorkerReport, stage_times, worker_reports
from schemas import run_layout
from schemas.errors import UserError
from schemas.manifest import PolicyCommit, ShardManifest, StepList, StoredRecord, TrainerCommit
from schemas.metrics import MetricEvent, MetricsTail
from schemas.recipe import Recipe
from schemas.recipe_io import recipe_from_json
from schemas.store import RunStore
from schemas.trajectory_columns import SCHEMA_VERSION

Record = TypeVar("Record", bound=StoredRecord)

# What a newcomer looks at first, in this order. (metric, what it is called in the table)
SERIES = (
    ("reward/total/mean", "reward"),
    ("reward/success/fraction", "success in training"),
    ("evaluate/success/fraction", "success on validation"),
    ("rollout/branch_tokens/mean", "tokens after the prompt, mean"),
    ("rollout/branch_tokens/max", "tokens after the prompt, max"),
    ("rollout/turns/mean", "turns"),
    ("group/mixed/fraction", "groups with mixed rewards"),
    ("trainer/lag_steps/max", "lag in steps, max"),
    ("trainer/lag_steps/mean", "lag in steps, mean"),
    ("trainer/lag_in_flight_steps/mean", "  of which in flight"),
    ("trainer/lag_in_queue_steps/mean", "  of which in the queue"),
    ("trainer/sampler_logprob_gap_nats/mean", "log-prob gap in nats, mean"),
    ("trainer/sampler_logprob_gap_nats/max", "log-prob gap in nats, max"),
    ("trainer/ratio/max", "importance ratio, max"),
    ("trainer/clipped/fraction", "clipped tokens"),
    ("trainer/entropy_nats/mean", "entropy in nats"),
    ("trainer/grad_norm", "gradient norm"),
    ("trainer/loss", "loss"),
)


# What a report holds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardReport:
    """A committed shard. `state` is "whole", or what is wrong with it."""

    step: int
    element: int
    manifest: str
    key: str = ""
    bytes: int = 0
    trajectories: int = 0
    tombstones: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    versions: tuple[int | None, int | None] = (None, None)
    sha256: str = ""
    content_sha256: str = ""
    use: str = ""  # "trained by step 3", "waits", ...
    state: str = "whole"


@dataclass(frozen=True)
class PolicyReport:
    """A committed policy version. `stored`: its weights are there (old ones are pruned, their commits stay)."""

    version: int
    commit: str
    source: str = ""
    parent: int | None = None
    digest: str = ""
    bytes: int = 0
    parameters: int = 0
    stored: bool = False
    state: str = "whole"


@dataclass(frozen=True)
class DeadLetter:
    key: str
    stage: str = ""
    error: str = ""


@dataclass(frozen=True)
class Inspection:
    """Everything that `rollstream inspect` shows."""

    run: str
    name: str
    replay_of: Mapping[str, Any] | None  # {"run", "changes"} of a directory that `rollstream replay --to` wrote
    steps_done: int
    steps: int | None
    first_event: float | None
    last_event: float | None
    stages: tuple[StageReport, ...]
    workers: tuple[WorkerReport, ...]
    series: Mapping[str, Sequence[tuple[int, float | None]]]  # metric -> (step, value), in order of step
    shards: tuple[ShardReport, ...]
    policies: tuple[PolicyReport, ...]
    checkpoints: tuple[int, ...]
    dead_letters: tuple[DeadLetter, ...]
    quarantine: tuple[str, ...]
    orphans: tuple[str, ...]
    torn_metric_lines: Mapping[str, int]  # file -> lines that are no whole event
    problems: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        stages, workers = [stage.to_json() for stage in self.stages], [worker.to_json() for worker in self.workers]
        return asdict(self) | {"stages": stages, "workers": workers}


# Reading -----------------------------------------------------------------------------------------------------------


def inspect_run(store: RunStore) -> Inspection:
    """Reads the run in `store`.

    Raises:
      UserError: there is no run.
    """
    if not store.list(""):
        raise UserError(store.location, "holds no run: the folder is empty or missing.", "Check the path.")
    problems: list[str] = []
    recipe = _recipe(store, problems)
    step_lists = _step_lists(store, problems)
    policies = _policies(store, problems)
    versions = [policy.version for policy in policies]
    shards = _shards(store, step_lists, versions, problems)
    metrics = MetricsTail(store)
    events, of_processes = metrics.read(), metrics.read_of_processes()
    times = [event.time for event in events]
    replay_of = _replay_of(store, problems)
    problems += _missing_weights(policies)
    if replay_of is None:
        problems += _missing(store, step_lists, versions, recipe, shards)
    return Inspection(
        run=store.location,
        name=recipe.name if recipe else "?",
        replay_of=replay_of,
        steps_done=max(versions, default=0),
        steps=recipe.trainer.steps if recipe else None,
        first_event=min(times, default=None),
        last_event=max(times, default=None),
        stages=tuple(stage_reports(events, stage_times(of_processes), recipe)),
        workers=tuple(worker_reports(of_processes, events, recipe)),
        series={name: points for name, _ in SERIES if (points := series_of(events, name))},
        shards=tuple(shards),
        policies=tuple(policies),
        checkpoints=tuple(_checkpoints(store, problems)),
        dead_letters=tuple(_dead_letters(store)),
        quarantine=tuple(store.list("quarantine")),
        orphans=tuple(_orphans(store, shards)),
        torn_metric_lines=_torn_lines(store),
        problems=tuple(problems),
    )


def read_or_note(read: Callable[[bytes, str], Record], store: RunStore, key: str, problems: list[str]) -> Record | None:
    """A stored record, or None with the reason noted: a report goes on where a run would stop."""
    try:
        return read(store.get(key), key)
    except FileNotFoundError:
        problems.append(f"{key}: is missing")
    except UserError as error:
        problems.append(str(error))
    return None


def _recipe(store: RunStore, problems: list[str]) -> Recipe | None:
    try:
        return recipe_from_json(store.get(run_layout.CONFIG), run_layout.CONFIG)
    except FileNotFoundError:
        problems.append(f"{run_layout.CONFIG}: is missing: this may be no run directory")
    except UserError as error:
        problems.append(str(error))
    return None


def _replay_of(store: RunStore, problems: list[str]) -> Mapping[str, Any] | None:
    try:
        fields = json.loads(store.get(run_layout.REPLAY))
        return {"run": str(fields["run"]), "changes": [str(change) for change in fields["changes"]]}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        problems.append(f"{run_layout.REPLAY}: is damaged")
        return {"run": "?", "changes": []}


def _step_lists(store: RunStore, problems: list[str]) -> dict[int, StepList]:
    read = (read_or_note(StepList.from_json, store, key, problems) for key in store.list("steps"))
    return {frozen.step: frozen for frozen in read if frozen is not None}


def _shards(
    store: RunStore, step_lists: Mapping[int, StepList], versions: Sequence[int], problems: list[str]
) -> list[ShardReport]:
    reports = []
    for key in store.list(run_layout.manifest_prefix()):
        manifest = read_or_note(ShardManifest.from_json, store, key, problems)
        if manifest is None:
            reports.append(ShardReport(step=-1, element=-1, manifest=key, state="manifest damaged"))
            continue
        state = shard_state(store, manifest)
        if state != "whole":
            problems.append(f"{manifest.key}: {state}")
        use = shard_use(manifest, step_lists.get(manifest.step), trained=manifest.step + 1 in versions)
        reports.append(_shard_report(key, manifest, state, use))
    return reports


def _shard_report(key: str, manifest: ShardManifest, state: str, use: str) -> ShardReport:
    return ShardReport(
        step=manifest.step,
        element=manifest.element_index,
        manifest=key,
        key=manifest.key,
        bytes=manifest.bytes,
        trajectories=manifest.trajectories,
        tombstones=manifest.tombstones,
        tokens=manifest.tokens,
        sampled_tokens=manifest.sampled_tokens,
        versions=(manifest.policy_version_min, manifest.policy_version_max),
        sha256=manifest.sha256,
        content_sha256=manifest.content_sha256,
        use=use,
        state=state,
    )


def shard_state(store: RunStore, manifest: ShardManifest) -> str:
    """ "whole", or what is wrong with the shard's file by its size, digest and version."""
    try:
        data = store.get(manifest.key)
    except FileNotFoundError:
        return "missing"
    except UserError as error:
        return f"unreadable: {error.reason}"
    if len(data) != manifest.bytes:
        return f"damaged: {len(data):,} of {manifest.bytes:,} bytes"
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        return "damaged: not the bytes that were committed"
    if manifest.version > SCHEMA_VERSION:
        return f"too new: of version {manifest.version}, and this program reads up to version {SCHEMA_VERSION}"
    return "whole"


def shard_use(manifest: ShardManifest, frozen: StepList | None, *, trained: bool) -> str:
    """What training made of a shard.

    Args:
      frozen: the list of the shard's step; None if there is none yet.
      trained: the policy that the step makes is committed.
    """
    if frozen is None:
        return "waits"
    if any(ref.key == manifest.key for ref in frozen.shards):
        return "trained" if trained else "listed"
    reasons = [skipped.reason for skipped in frozen.skipped if skipped.key == manifest.key]
    return f"left out: {reasons[0]}" if reasons else "left out"


def _policies(store: RunStore, problems: list[str]) -> list[PolicyReport]:
    keys = store.list("policies")
    commits = [key for key in keys if key.count("/") == 2 and key.endswith("/COMMIT.json")]
    folders_with_weights = {key.split("/")[1] for key in keys if key.count("/") > 2}
    reports = []
    for key in commits:
        commit = read_or_note(PolicyCommit.from_json, store, key, problems)
        folder = key.split("/")[1]
        if commit is None:
            version = int(folder) if folder.isdigit() else -1
            reports.append(PolicyReport(version=version, commit=key, state="commit damaged"))
            continue
        facts = commit.model_dump(include={"version", "source", "parent", "digest", "bytes", "parameters"})
        reports.append(PolicyReport(commit=key, stored=folder in folders_with_weights, **facts))
    return sorted(reports, key=lambda policy: policy.version)


def _checkpoints(store: RunStore, problems: list[str]) -> list[int]:
    """Versions whose optimizer state is there: its commit is readable and its files are not pruned."""
    keys = store.list("trainer")
    folders_with_files = {key.split("/")[1] for key in keys if key.count("/") > 2}
    commits = [key for key in keys if key.endswith("/COMMIT.json") and key.split("/")[1] in folders_with_files]
    read = [read_or_note(TrainerCommit.from_json, store, key, problems) for key in commits]
    return sorted(commit.version for commit in read if commit is not None)


def _missing_weights(policies: Sequence[PolicyReport]) -> list[str]:
    """Versions whose weights are never pruned, and are not there: the first and the newest."""
    ends = [policies[0], policies[-1]] if policies else []
    gone = {policy.version for policy in ends if not policy.stored and policy.state == "whole"}
    return [f"{run_layout.policy(version)}: is committed, and its weights are missing" for version in sorted(gone)]


def _missing(
    store: RunStore,
    step_lists: Mapping[int, StepList],
    versions: Sequence[int],
    recipe: Recipe | None,
    shards: Sequence[ShardReport],
) -> list[str]:
    """What should be there and is not, as far as the rest of the run tells."""
    newest = max(versions, default=0)
    elements = recipe.rollout.elements_per_step if recipe else 0
    found = {*store.list("metrics"), *(shard.manifest for shard in shards)}
    expected = [run_layout.manifest(step, element) for step in range(newest) for element in range(elements)]
    if newest:
        expected += [run_layout.metrics(stage) for stage in STAGES]
    problems = [f"{run_layout.policy_commit(v)}: is missing" for v in range(newest) if v not in versions]
    problems += [f"{run_layout.step_list(s)}: is missing" for s in range(newest) if s not in step_lists]
    return problems + [f"{key}: is missing" for key in expected if key not in found]


def _dead_letters(store: RunStore) -> list[DeadLetter]:
    letters = []
    for key in store.list("dead_letters"):
        try:
            fields = json.loads(store.get(key))
            letters.append(DeadLetter(key, str(fields["stage"]), str(fields["error"])))
        except (ValueError, KeyError, TypeError, FileNotFoundError, UserError):
            letters.append(DeadLetter(key, "?", "the file is damaged"))
    return letters


def _orphans(store: RunStore, shards: Iterable[ShardReport]) -> list[str]:
    """Data files that no manifest names: a killed writer's, or a writer's that has not committed yet."""
    committed = {shard.key for shard in shards}
    return [key for key in store.list("trajectories") if key.endswith(".arrow") and key not in committed]


def _torn_lines(store: RunStore) -> dict[str, int]:
    torn = {key: sum(not _is_event(line) for line in _lines(store, key)) for key in store.list("metrics")}
    return {key: lines for key, lines in torn.items() if lines}


def _lines(store: RunStore, key: str) -> list[bytes]:
    return [line for line in store.get(key).split(b"\n") if line]


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


# Numbers over steps ------------------------------------------------------------------------------------------------


def merge_values(name: str, values: Sequence[float]) -> float | None:
    """One number from those of a step's elements: counts and seconds add up, extremes stay extremes, others average."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return None
    if name.endswith("/max"):
        return max(known)
    if is_count(name):
        return sum(known)
    return sum(known) / len(known)


def is_count(name: str) -> bool:
    """Whether a metric of several elements adds up.

    >>> is_count("rollout/sampled_tokens"), is_count("rollout/sampled_tokens_per_second"), is_count("trainer/loss")
    (True, False, False)
    """
    averaged = ("_per_second", "/mean", "/std", "/fraction", "_rate", "_norm", "/loss", "_version", "lag_steps")
    return not name.endswith(averaged)


def series_of(events: Sequence[MetricEvent], name: str) -> list[tuple[int, float | None]]:
    """(step, value) of a metric, elements merged, in order of step."""
    by_step: dict[int, list[float]] = {}
    for event in events:
        if name in event.values:
            by_step.setdefault(event.step, []).append(event.values[name])
    return [(step, merge_values(name, values)) for step, values in sorted(by_step.items())]


# On the terminal ---------------------------------------------------------------------------------------------------


STAGE_COLUMNS = ("stage", "in", "out", "dropped", "tokens out", "seconds", "tokens/s", "idle")


def render(inspection: Inspection, *, every_row: bool = False) -> RenderableType:
    """The report for a terminal. Long tables show their ends and all that is damaged, unless `every_row`."""
    parts: list[RenderableType] = [_head(inspection), "", _stage_table(inspection.stages)]
    if inspection.workers:
        parts += ["", _worker_table(inspection, every_row)]
    if inspection.series:
        parts += ["", _series_table(inspection.series)]
    parts += ["", _shard_table(inspection.shards, every_row), "", _policy_table(inspection, every_row)]
    parts += ["", _leftovers(inspection, every_row)]
    if inspection.problems:
        parts += ["", _problem_list(inspection.problems, every_row)]
    return Group(*parts)


def _head(inspection: Inspection) -> RenderableType:
    steps = f"{inspection.steps_done} of {inspection.steps if inspection.steps is not None else '?'} steps"
    begin, end = inspection.first_event, inspection.last_event
    took = f", {duration(end - begin)} from first to last event" if begin is not None and end is not None else ""
    head = Text.assemble((inspection.name, "bold"), f"  {steps}{took}\n{inspection.run}")
    if inspection.replay_of is not None:
        changes = "; ".join(inspection.replay_of["changes"]) or "nothing changed"
        head.append(f"\nreplay of {inspection.replay_of['run']}: {changes}")
    return head


def _stage_table(stages: Sequence[StageReport]) -> RenderableType:
    notes = [f"  {stage.stage}: {stage.notes}" for stage in stages if stage.notes]
    rows = [_stage_row(stage) for stage in stages if stage.events]
    if not rows:
        return Text("Stages: nothing recorded yet")
    return Group(table("Stages", STAGE_COLUMNS, rows), Text("\n".join(notes), style="dim"))


def _stage_row(stage: StageReport, indent: str = "", unit: str | None = None) -> list[str]:
    dropped = ", ".join(f"{count(number)} {reason}" for reason, number in stage.dropped.items())
    return [
        f"{indent}{stage.stage}",
        count(stage.records_in),
        f"{count(stage.records_out)} {stage.unit if unit is None else unit}".rstrip(),
        dropped or "0",
        count(stage.tokens_out),
        "·" if stage.seconds is None else f"{stage.seconds:,.2f}",
        count(stage.tokens_per_second),
        share(stage.idle_share),
    ]


def _worker_table(inspection: Inspection, every_row: bool) -> RenderableType:
    """What became of the workers' time; and what each did, where that says more than the table of stages."""
    workers = inspection.workers
    shown, hidden = _ends(workers, every_row, lambda worker: False)
    columns = ("worker", "as", "processes", "seconds", "busy", "idle", "other", "last event")
    newest = max(worker.last_event for worker in workers)
    times = table("Workers", columns, [_worker_row(worker, newest) for worker in shown], left=2)
    note = Text("  idle: generators for a policy, trainers for shards; last event: before the run's last", style="dim")
    parts: list[RenderableType] = [_with_hidden(Group(times, note), hidden)]
    if len({worker.worker for worker in workers}) > 1:
        rows = [row for worker in shown for row in _worker_stage_rows(worker)]
        parts += ["", table("Stages of each worker", STAGE_COLUMNS, rows)]
    return Group(*parts)


def _worker_stage_rows(worker: WorkerReport) -> list[list[str]]:
    """The worker's name on a line of its own, and no units: a terminal of 80 columns has no room for them."""
    heading = [worker.worker, *[""] * (len(STAGE_COLUMNS) - 1)]
    return [heading, *(_stage_row(stage, indent="  ", unit="") for stage in worker.stages)]


def _worker_row(worker: WorkerReport, newest: float) -> list[str]:
    return [
        worker.worker,
        worker.part,
        count(len(worker.processes)),
        f"{worker.span:,.1f}",
        *(share(part) for part in worker.shares),
        duration(newest - worker.last_event),
    ]


def _series_table(series: Mapping[str, Sequence[tuple[int, float | None]]]) -> RenderableType:
    rows = []
    for name, title in SERIES:
        if name not in series:
            continue
        values = [value for _, value in series[name]]
        known = [value for value in values if value is not None]
        ends = [known[0], known[-1], min(known), max(known)] if known else [None] * 4
        rows.append([title, sparkline(values, 32), *(number(value) for value in ends)])
    return table("Over steps", ("", "", "first", "last", "least", "most"), rows, left=2)


Row = TypeVar("Row")


def _ends(rows: Sequence[Row], every_row: bool, must_show: Callable[[Row], bool]) -> tuple[list[Row], int]:
    """The first and last three rows and those that must be shown; and how many are left out."""
    if every_row or len(rows) <= 8:
        return list(rows), 0
    kept = [row for i, row in enumerate(rows) if i < 3 or i >= len(rows) - 3 or must_show(row)]
    return kept, len(rows) - len(kept)


def _shard_table(shards: Sequence[ShardReport], every_row: bool) -> RenderableType:
    if not shards:
        return Text("Shards: none yet")
    shown, hidden = _ends(shards, every_row, lambda shard: shard.state != "whole")
    rows = [_shard_row(shard) for shard in shown]
    whole = sum(shard.state == "whole" for shard in shards)
    title = (
        f"Shards: {len(shards)}, {whole} whole; {count(sum(s.trajectories for s in shards))} trajectories, "
        f"{count(sum(s.tombstones for s in shards))} tombstones, {count(sum(s.tokens for s in shards))} tokens, "
        f"{size(sum(s.bytes for s in shards))}"
    )
    columns = ("shard", "state", "training", "samples", "failed", "tokens", "policy", "size", "sha256", "content")
    return _with_hidden(table(title, columns, rows, left=3), hidden)


def _shard_row(shard: ShardReport) -> list[str]:
    if not shard.key:
        return [shard.manifest, shard.state, *[""] * 8]
    low, high = shard.versions
    versions = "·" if low is None else str(low) if low == high else f"{low}-{high}"
    return [
        f"{shard.step}/{shard.element}",
        shard.state,
        shard.use,
        count(shard.trajectories),
        count(shard.tombstones),
        count(shard.tokens),
        versions,
        size(shard.bytes),
        shard.sha256[:8],
        shard.content_sha256[:8],
    ]


def _policy_table(inspection: Inspection, every_row: bool) -> RenderableType:
    policies = inspection.policies
    if not policies:
        return Text("Policies: none yet")
    shown, hidden = _ends(policies, every_row, lambda policy: policy.state != "whole")
    rows = [_policy_row(policy, inspection.checkpoints) for policy in shown]
    title = f"Policies: {len(policies)} versions, weights of {sum(p.stored for p in policies)} stored"
    columns = ("version", "made by", "weights", "optimizer state", "parameters", "size", "digest")
    return _with_hidden(table(title, columns, rows, left=4), hidden)


def _policy_row(policy: PolicyReport, checkpoints: Sequence[int]) -> list[str]:
    if policy.state != "whole":
        return [str(policy.version), policy.state, *[""] * 5]
    return [
        str(policy.version),
        policy.source.replace("_", " "),
        "stored" if policy.stored else "pruned",
        "stored" if policy.version in checkpoints else "",
        count(policy.parameters),
        size(policy.bytes),
        policy.digest[:16],
    ]


def _with_hidden(shown: RenderableType, hidden: int) -> RenderableType:
    return Group(shown, Text(f"... {hidden} more rows: --all shows them", style="dim")) if hidden else shown


def _leftovers(inspection: Inspection, every_row: bool) -> RenderableType:
    lines = [
        _listed("Dead letters", [f"{letter.key}: {letter.error}" for letter in inspection.dead_letters], every_row)
    ]
    lines.append(_listed("Quarantine", inspection.quarantine, every_row))
    lines.append(_listed("Orphans (data that no manifest names)", inspection.orphans, every_row))
    torn = [f"{key}: {lines_} torn lines passed over" for key, lines_ in inspection.torn_metric_lines.items()]
    if torn:
        lines.append(_listed("Metrics", torn, every_row))
    return Group(*lines)


def _listed(title: str, items: Sequence[str], every_row: bool) -> Text:
    text = Text.assemble((title, "bold"), f": {len(items) or 'none'}")
    for item in items if every_row else items[:5]:
        text.append(f"\n  {item}")
    if not every_row and len(items) > 5:
        text.append(f"\n  ... {len(items) - 5} more: --all shows them", style="dim")
    return text


def _problem_list(problems: Sequence[str], every_row: bool) -> RenderableType:
    return Text.from_markup("[bold red]Problems[/]\n") + Text.from_markup(
        "\n".join(f"  {escape(problem)}" for problem in (problems if every_row else problems[:20]))
        + (f"\n  ... {len(problems) - 20} more: --all shows them" if not every_row and len(problems) > 20 else "")
    )
