"""Live progress of a run, from the metrics files that its stages append to.

Because it reads files and asks nobody, it can show a run of this process or of another one. On a terminal it draws a
small panel that it updates in place; elsewhere it prints one plain line a step, at most one a second.

Left out on purpose: keys to press, and every metric that does not answer "does it learn, and when is it done".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runners.inspect import series_of
from runners.report import count, duration, last_line, number, sparkline
from schemas.metrics import MetricEvent, MetricsTail
from schemas.recipe import Recipe
from schemas.store import RunStore

# A step's pace is the median of this many: the first steps compile, and one slow step must not move the forecast.
PACE_STEPS = 20
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_LINES = 1.0


@dataclass(frozen=True)
class Snapshot:
    """What a run has got to. Values are those of the newest trained step; None where there is none yet.

    Tokens per second are tokens over the seconds of the stage that made them, median of the newest steps.
    """

    steps: int  # of the whole run
    steps_done: int
    warm_start_steps: int
    warm_start_done: int
    warm_start_loss: float | None
    reward: float | None
    success: float | None
    validation: float | None
    validation_version: int | None
    lag: float | None
    sampled_per_second: float | None
    trained_per_second: float | None
    seconds_left: float | None
    rewards: Sequence[float | None] = field(default=())  # of every step so far


def snapshot(events: Sequence[MetricEvent], recipe: Recipe) -> Snapshot:
    """What `events`, all of a run's so far, say of it. A step counts as done once its training was recorded."""
    trained = {event.step: event for event in events if event.stage == "train" and _is_whole(event)}
    done = max(trained, default=-1) + 1
    recent = [event for event in events if done - PACE_STEPS <= event.step < done]
    warm = [event for event in events if event.stage == "warm_start"]
    validation = _last(series_of(events, "evaluate/success/fraction"))
    newest = [event for event in events if event.step == done - 1]
    return Snapshot(
        steps=recipe.trainer.steps,
        steps_done=done,
        warm_start_steps=recipe.warm_start.steps,
        warm_start_done=max((event.step for event in warm), default=-1) + 1,
        warm_start_loss=_value(series_of(warm, "warm_start/loss")),
        reward=_value(series_of(newest, "reward/total/mean")),
        success=_value(series_of(newest, "reward/success/fraction")),
        validation=validation[1] if validation else None,
        validation_version=validation[0] if validation else None,
        lag=_value(series_of(newest, "trainer/lag_steps/max")),
        sampled_per_second=_rate(recent, "rollout/sampled_tokens", "rollout/seconds"),
        trained_per_second=_rate(recent, "trainer/trained_tokens", "trainer/update_seconds"),
        seconds_left=seconds_left([trained[step].time for step in sorted(trained)], recipe.trainer.steps - done),
        rewards=[value for step, value in series_of(events, "reward/total/mean") if step < done],
    )


def _is_whole(event: MetricEvent) -> bool:
    # A step is recorded before its policy is published, and again, with the time that took, afterwards.
    return "trainer/publish_seconds" in event.values


def _last(series: Sequence[tuple[int, float | None]]) -> tuple[int, float | None] | None:
    return series[-1] if series else None


def _value(series: Sequence[tuple[int, float | None]]) -> float | None:
    return series[-1][1] if series else None


def _rate(events: Sequence[MetricEvent], tokens: str, seconds: str) -> float | None:
    """Median over the steps of tokens over seconds: a step that compiled must not slow the display for 20 more."""
    made, took = dict(series_of(events, tokens)), dict(series_of(events, seconds))
    rates = [n / s for step, n in made.items() if n is not None and (s := took.get(step))]
    return median(rates) if rates else None


def seconds_left(times: Sequence[float], steps_left: int) -> float | None:
    """Steps left times the median pace of the newest steps; None before two steps are done.

    Args:
      times: when each step was done, ascending, seconds.

    >>> seconds_left([0.0, 50.0, 52.0, 54.0], 10)
    20.0
    """
    recent = times[-PACE_STEPS - 1 :]
    paces = sorted(after - before for before, after in pairwise(recent))
    if not paces:
        return 0.0 if steps_left == 0 and times else None
    return paces[len(paces) // 2] * max(0, steps_left)


# Showing it --------------------------------------------------------------------------------------------------------


def plain_line(now: Snapshot) -> str:
    """One line for a log. Empty before anything happened."""
    if now.steps_done:
        parts = [
            f"step {now.steps_done}/{now.steps}",
            f"reward {number(now.reward)}",
            f"success {number(now.success)}",
            f"lag {number(now.lag, 0)}",
            f"sampled {count(now.sampled_per_second)} tokens/s",
            f"trained {count(now.trained_per_second)} tokens/s",
            f"left {duration(now.seconds_left)}",
        ]
        if now.validation is not None:
            parts.insert(3, f"validation {number(now.validation)} (version {now.validation_version})")
        return "  ".join(parts)
    if now.warm_start_done:
        return f"warm start {now.warm_start_done}/{now.warm_start_steps}  loss {number(now.warm_start_loss)}"
    return ""


def panel(now: Snapshot, title: str, elapsed: float) -> RenderableType:
    """The display on a terminal. `elapsed` seconds count from when the display began."""
    if not now.steps_done:
        return Panel(_before_training(now, elapsed), title=title, title_align="left")
    facts = Table.grid(padding=(0, 2))
    for _ in range(4):
        facts.add_column()
    validation = number(now.validation)
    if now.validation_version is not None:
        validation += f" (version {now.validation_version})"
    rows = (
        ("reward", number(now.reward), "sampled", f"{count(now.sampled_per_second)} tokens/s"),
        ("success", number(now.success), "trained", f"{count(now.trained_per_second)} tokens/s"),
        ("validation", validation, "lag", f"{number(now.lag, 0)} steps"),
        ("elapsed", duration(elapsed), "left", duration(now.seconds_left)),
    )
    for name, value, other_name, other_value in rows:
        facts.add_row(Text(name, style="dim"), Text(value), Text(other_name, style="dim"), Text(other_value))
    curve = Text.assemble(("reward by step  ", "dim"), (sparkline(now.rewards, 50), "cyan"))
    head = _bar("step", now.steps_done, now.steps)
    return Panel(Group(head, facts, curve), title=title, title_align="left")


def _before_training(now: Snapshot, elapsed: float) -> RenderableType:
    if not now.warm_start_done:
        return Text(f"getting ready: reading prompts, compiling   elapsed {duration(elapsed)}", style="dim")
    facts = Text(f"loss {number(now.warm_start_loss)}   elapsed {duration(elapsed)}")
    return Group(_bar("warm start", now.warm_start_done, now.warm_start_steps), facts)


def _bar(name: str, done: int, total: int) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    row.add_row(
        Text(f"{name} {done}/{total}", style="bold"), ProgressBar(total=max(total, 1), completed=done, width=40)
    )
    return row


class Progress:
    """Shows a run's progress from a thread of its own while the `with` block lasts.

    >>> with Progress(store, recipe, console):  # doctest: +SKIP
    ...     run(recipe, location)

    A fault in showing progress never stops the run: the display ends and the run goes on.

    Args:
      store: the run.
      recipe: the run's recipe.
      console: where to; a panel if it is a terminal, else lines.
    """

    def __init__(self, store: RunStore, recipe: Recipe, console: Console, clock: Callable[[], float] = time.monotonic):
        self._store = store
        self._metrics = MetricsTail(store)
        self._recipe = recipe
        self._console = console
        self._clock = clock
        self._started = clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)
        self._last_line = ""
        self._last_line_at = -SECONDS_BETWEEN_LINES

    def __enter__(self) -> Progress:
        self._started = self._clock()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _show(self) -> None:
        try:
            self._show_panel() if self._console.is_terminal else self._show_lines()
        except Exception as error:
            text = f"progress is no longer shown ({last_line(error)}); the run goes on"
            with suppress(Exception):  # the output itself may be what is gone
                self._console.print(text, markup=False, highlight=False)

    def _now(self) -> Snapshot:
        return snapshot(self._metrics.read(), self._recipe)

    def _show_panel(self) -> None:
        title = f"{self._recipe.name}  {self._store.location}"
        draw = lambda: panel(self._now(), title, self._clock() - self._started)
        with Live(draw(), console=self._console, auto_refresh=False, redirect_stdout=False) as live:
            while not self._ended.wait(SECONDS_BETWEEN_LOOKS):
                live.update(draw(), refresh=True)
            live.update(draw(), refresh=True)

    def _show_lines(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LOOKS):
            if self._clock() - self._last_line_at >= SECONDS_BETWEEN_LINES:
                self._print_news()
        self._print_news()

    def _print_news(self) -> None:
        line = plain_line(self._now())
        # The forecast alone is no news.
        if line.split("  left ")[0] == self._last_line.split("  left ")[0]:
            return
        self._last_line, self._last_line_at = line, self._clock()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
