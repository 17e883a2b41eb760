"""What the command line prints: errors, numbers for people, sparklines, and tables of results.

Everything here is a function from values to text or to something that rich can print; nothing reads a run.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from schemas.errors import UserError

if TYPE_CHECKING:  # its imports take seconds, and errors must print at once
    from pipelines.evaluate import Evaluation, Interval, RunResults, Summary
    from pipelines.replay import Replay

BLOCKS = "▁▂▃▄▅▆▇█"
_BEAM_STEP = re.compile(r" \[while running '[^']*'\]")


# Errors


def print_error(error: UserError, console: Console) -> None:
    """One panel on a terminal; plain, unwrapped lines elsewhere, so that they can be searched."""
    offender = _BEAM_STEP.sub("", error.offender)
    if not console.is_terminal:
        for line in filter(None, (f"error: {offender}: {error.reason}", error.way_out)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return
    body = Text.assemble((offender, "bold"), "\n", error.reason)
    if error.way_out:
        body.append(f"\n{error.way_out}", style="green")
    console.print(Panel(body, title="error", title_align="left", border_style="red", expand=False))


def user_error_behind(error: BaseException) -> UserError | None:
    """The UserError that `error` is, or was raised from: Beam wraps what a stage raises."""
    seen: set[int] = set()
    current: BaseException | None = error
    found: UserError | None = None
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, UserError):
            found = current  # the innermost has the message without Beam's additions
        current = current.__cause__ or current.__context__
    return found


def last_line(error: BaseException) -> str:
    """The exception's type and message, in one line."""
    return "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")


# Numbers for people


def count(value: float | None) -> str:
    """
    >>> count(1234567), count(1234), count(None)
    ('1.23 M', '1,234', '·')
    """
    if value is None or not math.isfinite(value):
        return "·"
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:,.0f}"


def size(bytes_: float | None) -> str:
    """
    >>> size(512), size(2048), size(5 * 2**20)
    ('512 B', '2.0 KiB', '5.0 MiB')
    """
    if bytes_ is None:
        return "·"
    value = float(bytes_)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def duration(seconds: float | None) -> str:
    """
    >>> duration(3.21), duration(75), duration(3700)
    ('3.2 s', '1 min 15 s', '1 h 01 min')
    """
    if seconds is None or not math.isfinite(seconds):
        return "·"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def number(value: float | None, digits: int = 3) -> str:
    """A measured value; very small and very large ones in powers of ten, a missing one as a dot.

    >>> number(0.12345), number(0.0), number(1.2e-7), number(None)
    ('0.123', '0.000', '1.2e-07', '·')
    """
    if value is None or not math.isfinite(value):
        return "·"
    if value != 0 and (abs(value) < 10**-digits or abs(value) >= 1e6):
        return f"{value:.1e}"
    return f"{value:.{digits}f}"


def share(value: float | None) -> str:
    """
    >>> share(0.123)
    '12.3 %'
    """
    return "·" if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def resample(values: Sequence[float | None], width: int) -> list[float | None]:
    """At most `width` values: means of equal stretches. A stretch without any value is None.

    >>> resample([1, 3, 5, 7], 2)
    [2.0, 6.0]
    """
    if len(values) <= width:
        return [None if v is None else float(v) for v in values]
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    stretches = [[v for v in values[a:b] if v is not None] for a, b in pairwise(edges)]
    return [sum(known) / len(known) if known else None for known in stretches]


def sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """A row of blocks from the least to the greatest value; a space where there is none.

    >>> sparkline([0, 1, 2, 3, None, 7])
    '▁▂▃▄ █'
    """
    finite = [v if v is not None and math.isfinite(v) else None for v in values]
    points = resample(finite, width)
    known = [v for v in points if v is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    if high == low:
        return "".join(" " if v is None else BLOCKS[3] for v in points)
    return "".join(" " if v is None else BLOCKS[min(7, int(8 * (v - low) / (high - low)))] for v in points)


# Tables


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
    """A light table: the first `left` columns to the left, the others (numbers) to the right. Cells are plain text."""
    result = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        header_style="dim",
        padding=(0, 1),
    )
    for index, name in enumerate(columns):
        result.add_column(name, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        result.add_row(*(escape(cell) for cell in row))
    return result


def interval_text(interval: Interval) -> str:
    """Both ends, in brackets."""
    return f"[{interval.low:.3f}, {interval.high:.3f}]"


def _summary_row(label: str, summary: Summary, ks: Sequence[int]) -> list[str]:
    pass_at = [number(summary.pass_at.get(k)) for k in ks]
    return [
        label,
        f"{summary.prompts} x {summary.samples}",
        number(summary.success),
        interval_text(summary.interval),
        number(summary.reward),
        *pass_at,
        str(summary.failed),
    ]


def evaluation_table(title: str, total: Summary, by_stratum: Mapping[str, Summary]) -> RenderableType:
    """Success, its interval and pass@k: one row a stratum, and all together."""
    ks = [k for k in sorted(total.pass_at) if k > 1]
    columns = ["", "prompts x samples", "success", "95 % interval", "reward", *(f"pass@{k}" for k in ks), "failed"]
    rows = [_summary_row(name, summary, ks) for name, summary in by_stratum.items()]
    rows.append(_summary_row("all", total, ks))
    note = Text(f"interval: {total.interval.method}", style="dim")
    return Group(table(title, columns, rows), note)


def evaluation_report(evaluation: Evaluation) -> RenderableType:
    """What `rollstream evaluate` prints."""
    head = Text.assemble(
        ("policy version ", ""),
        (str(evaluation.version), "bold"),
        f" of {evaluation.run}\nweights {evaluation.digest}\n"
        f"{evaluation.prompts} prompts of split {evaluation.split!r} ({evaluation.seconds:.1f} s)",
    )
    parts: list[RenderableType] = [head]
    for part in evaluation.parts:
        parts += ["", evaluation_table(part.title, part.total, part.by_stratum)]
    return Group(*parts)


def results_table(results: RunResults) -> RenderableType:
    """Before, between and after, with scripted rules beside: what `rollstream run` ends with."""
    first = results.results[0].total
    strata = list(results.results[0].by_stratum)
    rows = []
    for result in results.results:
        of_strata = [number(result.by_stratum[s].success) if s in result.by_stratum else "·" for s in strata]
        digest = result.digest[:12] if result.digest else ""
        rows.append(
            [result.label, number(result.total.success), interval_text(result.total.interval), *of_strata, digest]
        )
    title = f"Success on {first.prompts} prompts of {results.split!r}, {first.samples} samples each, {results.sampled}"
    shown = table(title, ("", "success", "95 % interval", *strata, "weights"), rows)
    return Group("", shown, Text(f"interval: {first.interval.method}", style="dim"))


def replay_report(replay: Replay) -> RenderableType:
    """What `rollstream replay` ends with: whether the weights are the same, and if not, what differs."""
    lines = Text()
    if replay.changes:
        lines.append("changed\n", style="bold")
        lines.append("".join(f"  {change}\n" for change in replay.changes))
    lines.append_text(_verdict(replay))
    if replay.distance is not None and not replay.identical:
        lines.append(f"\nthe last weights are {100 * replay.distance:.3g} % away from the run's (2-norm, relative)")
    kept = f"kept in {replay.to}" if replay.to else "not kept: --to DIR keeps the new weights and metrics"
    lines.append(f"\n{kept}", style="dim")
    return lines if replay.identical else Group(lines, "", _step_comparison(replay))


def _verdict(replay: Replay) -> Text:
    compared, last = replay.compared, replay.steps[-1]
    if replay.identical:
        said = (
            f"bit-identical: all {len(compared)} versions up to {last.version} have the digests that the run committed"
        )
        return Text.assemble((said, "bold green"), f"\nweights of version {last.version}: {last.digest}")
    first = replay.first_difference
    if first is None:
        return Text("nothing to compare: the run has committed none of these versions", style="bold")
    said = f"other weights from version {first.version} on"
    text = Text.assemble((said, "bold" if replay.changes else "bold red"))
    text.append(f"\n  run     {first.recorded}\n  replay  {first.digest}")
    if not replay.changes:
        text.append(
            "\nNothing was changed, so this machine, its libraries or this version of rollstream compute other bits "
            "than those that trained the run."
        )
    return text


def _step_comparison(replay: Replay) -> RenderableType:
    """The trainer's metrics of the last step, and over all steps, in the run and in the replay."""
    names = sorted({n for step in replay.steps for n in step.metrics} - {"trainer/update_seconds"})
    rows = []
    for name in names:
        both = [step for step in replay.steps if name in step.metrics and name in step.recorded_metrics]
        old, new = [step.recorded_metrics[name] for step in both], [step.metrics[name] for step in both]
        if old != new:
            rows.append([name, sparkline(old, 20), sparkline(new, 20), number(old[-1], 4), number(new[-1], 4)])
    return table("What differs", ("", "run", "replay", "last: run", "last: replay"), rows, left=3)
