"""What overlapping is worth where rollouts mostly wait: steps a second with more and with less in flight.

    python -m benchmarks.waiting [--steps 24] [--only local|prism] [--prism-location PATH] [--dir FOLDER]

Environments sleep log-normally at each step (`benchmarks.sleepy_lake`), the model is tiny, so the processors are nearly
idle and the three comparisons show the pipeline's own ability to have several things under way:

    local, three generators: max_lag = 2 against max_lag = 0, where generators and the trainer have to take turns;
    local, max_lag = 2: two generators against one;
    prism, max_lag = 1, four elements a step: several elements in flight against one at a time, which is the same graph
      without its boundaries.

Printed for each side: steps a second over the last two thirds of the run, and how many elements were being sampled at
once, on average and at most. Six runs, of a minute or less each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measures import spent, steps_per_second, total, within
from runners.prism import find_prism
from runners.processes import ROLLSTREAM, Launcher, tasks_of
from runners.profiles import PROFILES
from runners.run_directory import prepare_run
from schemas.metrics import read_metrics
from schemas.recipe_io import load_recipe
from schemas.store import RunStore

ONE_AT_A_TIME = (sys.executable, "-m", "benchmarks.one_at_a_time")
PRISM_OVERRIDES = ("rollout.max_lag=1", "rollout.elements_per_step=4", "rollout.prompts_per_step=8")


@dataclass(frozen=True)
class Side:
    """One of the two runs of a comparison."""

    label: str
    overrides: tuple[str, ...]
    runner: str = "local"
    generators: int = 1
    command: tuple[str, ...] = ROLLSTREAM


LAG_0 = Side("max_lag = 0", ("rollout.max_lag=0",), generators=3)
LAG_2 = Side("max_lag = 2", ("rollout.max_lag=2",), generators=3)
ONE_GENERATOR = Side("one generator", ("rollout.max_lag=2",))
TWO_GENERATORS = Side("two generators", ("rollout.max_lag=2",), generators=2)
ONE_ELEMENT = Side("one element at a time", PRISM_OVERRIDES, runner="prism", command=ONE_AT_A_TIME)
SEVERAL_ELEMENTS = Side("several in flight", PRISM_OVERRIDES, runner="prism")

COMPARISONS = (
    ("local, three generators", LAG_0, LAG_2, 2.0),
    ("local, max_lag = 2", ONE_GENERATOR, TWO_GENERATORS, 1.6),
    ("prism, max_lag = 1", ONE_ELEMENT, SEVERAL_ELEMENTS, 2.0),
)


@dataclass(frozen=True)
class Speed:
    """Of one run."""

    steps_per_second: float
    in_flight: float  # elements that were being sampled, on average over time
    most_in_flight: int


def measure(side: Side, recipe: Path, steps: int, prism: str | None, folder: Path) -> Speed:
    resolved = load_recipe(recipe, [f"trainer.steps={steps}", *side.overrides])
    store = RunStore.open(folder)
    prepare_run(store, resolved, resume=False)
    options = ("--prism-location", prism) if side.runner == "prism" and prism else ()
    tasks = tasks_of(str(folder), PROFILES[side.runner], side.generators, options)
    Launcher(tasks, folder, print, lambda: 0, side.command).run()
    return speed_of(store, first=steps // 3)


def speed_of(store: RunStore, first: int) -> Speed:
    train, rollout = read_metrics(store, "train"), read_metrics(store, "rollout")
    ends = {event.step: event.time for event in train}
    window = ends[first - 1], max(ends.values())
    sampled = within(map(spent, rollout), window)
    changes = sorted([(begin, 1) for begin, _ in sampled] + [(end, -1) for _, end in sampled])
    most = max(accumulate(change for _, change in changes))
    return Speed(steps_per_second(train, first), total(sampled) / (window[1] - window[0]), most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("benchmarks/waiting.toml"))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", choices=["local", "prism"], help="these comparisons alone")
    parser.add_argument("--prism-location")
    parser.add_argument("--dir", type=Path, help="keep the run directories there")
    arguments = parser.parse_args()
    console = Console()
    prism = find_prism(arguments.prism_location)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for name, less, more, bar in COMPARISONS:
            if not name.startswith(arguments.only or ""):
                continue
            if more.runner == "prism" and prism is None:
                console.print("prism is left out: it is not on this machine (see rollstream runners)")
                continue
            speeds = []
            for side in (less, more):
                run = (arguments.dir or Path(temporary)) / f"{name}, {side.label}".replace(" ", "-").replace(",", "")
                speeds.append(measure(side, arguments.recipe, arguments.steps, prism, run))
                console.print(f"{name}: {side.label}: {speeds[-1].steps_per_second:.3f} steps/s")
            rows.append((name, less, more, bar, speeds))
    console.print(_table(rows))


def _table(rows: Sequence[tuple[str, Side, Side, float, Sequence[Speed]]]) -> Table:
    table = Table("", "", "steps/s", "in flight", "most", "ratio", title="Environments that sleep log-normally")
    for name, less, more, bar, (slow, fast) in rows:
        ratio = fast.steps_per_second / slow.steps_per_second
        table.add_row(name, less.label, *_cells(slow), "")
        table.add_row("", more.label, *_cells(fast), f"{ratio:.2f}x (at least {bar:g}x)", end_section=True)
    return table


def _cells(speed: Speed) -> tuple[str, ...]:
    return f"{speed.steps_per_second:.3f}", f"{speed.in_flight:.1f}", f"{speed.most_in_flight}"


if __name__ == "__main__":
    main()
