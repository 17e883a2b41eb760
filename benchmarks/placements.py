"""One recipe on several placements: what each achieves, how fast, who waits, and what the pipeline itself costs.

    python -m benchmarks.placements [--recipe recipes/frozen_lake.toml] [--steps N] [--runners colocated,local,prism]
                                    [--generators 1] [--dir FOLDER] [KEY=VALUE ...]

Each is run by the command line in processes of its own (`rollstream run RECIPE rollout.max_lag=1 ... --runner X`), from
the warm start to the evaluation on held-out prompts; then the run's own metrics are read. In the order of the table:

    success               before and after, sampled, on held-out prompts, as `rollstream run` reports it
    steps/s               1 / the median time of a step, so that pauses for the learning curve do not count
    generators idle       share of the time in which a generator had no element in a stage
    trainer idle          share of the trainer's time that it waited for shards
    lag                   mean age in steps of the policy that sampled what was trained on
    first step, s         from the command to the first trained step: imports, data, warm start and compilation
    element outside, ms   from an element's admission to the commit of its shard, less the stages' own seconds: Beam,
                          queues between stages (on Prism also behind other elements), metrics; median

All but success and the first step are of the second half of the steps. Colocated, sampling and training take turns, so
one is idle while the other works, and `max_lag` is never used.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measures import Interval, covered, spent, typical_steps_per_second, within
from runners.prism import find_prism
from runners.processes import ROLLSTREAM
from schemas.metrics import MetricEvent, read_metrics
from schemas.recipe_io import load_recipe
from schemas.run_layout import RESULTS
from schemas.store import RunStore

OVERRIDES = ("rollout.max_lag=1",)
STAGES = ("rollout", "reward", "group", "pack", "shards")  # of an element's path, from its admission on


@dataclass(frozen=True)
class Measured:
    """One placement's row of the table. Shares are of the second half of the steps."""

    success_before: float
    success_after: float
    steps_per_second: float
    generators_idle: float
    trainer_idle: float
    lag_steps: float
    seconds_to_first_step: float
    outside_milliseconds: float


def run(command: Sequence[str], recipe: Path, overrides: Sequence[str], folder: Path, options: Sequence[str]) -> float:
    """Runs the recipe by the command line; returns when the command was given, in seconds since the epoch."""
    started = time.time()
    subprocess.run([*command, "run", str(recipe), *overrides, "--dir", str(folder), *options], check=True)
    return started


def measure(folder: Path, started: float, steps: int, generators: int) -> Measured:
    """What the run in `folder` says of itself.

    Args:
      started: when its command was given, in seconds since the epoch.
      steps: of the run.
      generators: how many shared its positions.
    """
    store = RunStore.open(folder)
    first = max(1, steps // 2)
    train = read_metrics(store, "train")
    late = [event for event in train if event.step >= first]
    ends = {event.step: event.time for event in train}
    before, after = success(json.loads(store.get(RESULTS)))
    waited = sum(event.values["trainer/idle_seconds"] for event in late)
    worked = sum(event.values["trainer/seconds"] for event in late)
    elements = elements_of(store)
    outside = [outside_seconds(events) for (step, _), events in elements.items() if step >= first]
    return Measured(
        success_before=before,
        success_after=after,
        steps_per_second=typical_steps_per_second(train, first),
        generators_idle=idle_share(elements, (ends[first - 1], ends[steps - 1]), generators),
        trainer_idle=waited / (waited + worked),
        lag_steps=statistics.fmean(event.values["trainer/lag_steps/mean"] for event in late),
        seconds_to_first_step=ends[0] - started,
        outside_milliseconds=1000 * statistics.median(outside),
    )


def success(results: Mapping) -> tuple[float, float]:
    """Of the policy that reinforcement learning began with, and of the one that it ended with."""
    policies = [result for result in results["results"] if result["version"] is not None]
    last_before = [result for result in policies if result["version"] == 0][-1]
    return last_before["total"]["success"], policies[-1]["total"]["success"]


Element = tuple[int, int]  # step, index within the step


def elements_of(store: RunStore) -> dict[Element, dict[str, MetricEvent]]:
    """Each element's events, by stage, of those that went the whole way."""
    found: dict[Element, dict[str, MetricEvent]] = defaultdict(dict)
    for stage in ("prompts", *STAGES):
        for event in read_metrics(store, stage):
            found[event.step, event.labels["element"]][stage] = event
    return {element: events for element, events in found.items() if len(events) == 1 + len(STAGES)}


def outside_seconds(events: Mapping[str, MetricEvent]) -> float:
    """From an element's admission to the commit of its shard, less what the stages say that they took."""
    inside = sum(events[stage].values[f"{stage}/seconds"] for stage in STAGES)
    return events["shards"].time - events["prompts"].time - inside


def idle_share(elements: Mapping[Element, Mapping[str, MetricEvent]], window: Interval, generators: int) -> float:
    """Share of the window in which a generator had no element in any stage, averaged over the generators."""
    each_step = 1 + max(index for _, index in elements)
    of_generator: dict[int, list[Interval]] = defaultdict(list)
    for (step, index), events in elements.items():
        position = step * each_step + index  # the generators divide positions by their remainders
        of_generator[position % generators] += [spent(events[stage]) for stage in STAGES]
    busy = sum(covered(within(intervals, window)) for intervals in of_generator.values())
    return 1.0 - busy / (generators * (window[1] - window[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/frozen_lake.toml"))
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--runners", default="colocated,local,prism")
    parser.add_argument("--generators", type=int, default=1, help="of local")
    parser.add_argument("--dir", type=Path, help="keep the run directories there")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_intermixed_args()
    steps = [f"trainer.steps={arguments.steps}"] if arguments.steps else []
    overrides = [*OVERRIDES, *steps, *arguments.overrides]
    recipe = load_recipe(arguments.recipe, overrides)
    console = Console()
    rows: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for runner in arguments.runners.split(","):
            if runner == "prism" and find_prism() is None:
                console.print("prism is left out: it is not on this machine (see rollstream runners)")
                continue
            generators = arguments.generators if runner == "local" else 1
            folder = (arguments.dir or Path(temporary)) / runner
            options = ["--runner", runner, *(["--generators", str(generators)] if generators > 1 else [])]
            started = run(ROLLSTREAM, arguments.recipe, overrides, folder, options)
            rows[runner] = measure(folder, started, recipe.trainer.steps, generators)
    console.print(_table(f"{recipe.name}, {recipe.trainer.steps} steps, {', '.join(overrides)}", rows))


def _table(title: str, rows: Mapping[str, Measured]) -> Table:
    table = Table("", *rows, title=title)
    of_all = list(rows.values())
    table.add_row("success", *(f"{m.success_before:.3f} -> {m.success_after:.3f}" for m in of_all))
    table.add_row("steps/s", *(f"{m.steps_per_second:.2f}" for m in of_all))
    table.add_row("generators idle", *(f"{m.generators_idle:.0%}" for m in of_all))
    table.add_row("trainer idle", *(f"{m.trainer_idle:.0%}" for m in of_all))
    table.add_row("lag", *(f"{m.lag_steps:.2f}" for m in of_all))
    table.add_row("first step, s", *(f"{m.seconds_to_first_step:.1f}" for m in of_all))
    table.add_row("element outside, ms", *(f"{m.outside_milliseconds:.1f}" for m in of_all))
    return table


if __name__ == "__main__":
    main()
