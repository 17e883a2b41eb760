"""Speed of a recipe: rollout and update tokens per second, and the time to the first trained step.

    python -m benchmarks.throughput [--recipe recipes/frozen_lake.toml] [--steps 30]

Runs the real loop in a fresh process state (nothing compiled) and reads the run's own metrics. The first steps compile,
so rates are medians over the second half of the steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from runners import colocated
from schemas.metrics import MetricEvent, read_metrics
from schemas.recipe_io import load_recipe
from schemas.store import RunStore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/frozen_lake.toml")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    overrides = [f"trainer.steps={arguments.steps}", "warm_start.steps=0", "evaluation.every=0"]
    recipe = load_recipe(Path(arguments.recipe), overrides)
    first_step: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        colocated.run(recipe, folder, after_step=[lambda report: first_step.append(time.perf_counter() - started)])
        store = RunStore.open(folder)
        rollout, train = read_metrics(store, "rollout"), read_metrics(store, "train")
    half = arguments.steps // 2
    sampled, environment = _sum(rollout, half, "sampled"), _sum(rollout, half, "environment")
    table = Table("", "value", title=f"{recipe.name}: medians over steps {half} to {arguments.steps - 1}")
    rows = {
        "seconds to the first trained step (data set and compilation included)": f"{first_step[0]:.1f}",
        "rollout seconds a step": f"{_median(rollout, half, 'rollout/seconds'):.3f}",
        "sampled tokens a step": f"{sampled:.0f}",
        "sampled tokens/s": f"{_median(rollout, half, 'rollout/sampled_tokens_per_second'):.0f}",
        "trajectory tokens/s (sampled and environment)": (
            f"{(sampled + environment) / _total_seconds(rollout, half):.0f}"
        ),
        "update seconds a step": f"{_median(train, half, 'trainer/update_seconds'):.3f}",
        "trained tokens/s": f"{_median(train, half, 'trainer/trained_tokens_per_second'):.0f}",
        "publish seconds a step": f"{_median(train, half, 'trainer/publish_seconds'):.3f}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def _median(events: list[MetricEvent], first: int, name: str) -> float:
    return statistics.median(e.values[name] for e in events if e.step >= first)


def _sum(events: list[MetricEvent], first: int, kind: str) -> float:
    return statistics.median(e.values[f"rollout/{kind}_tokens"] for e in events if e.step >= first)


def _total_seconds(events: list[MetricEvent], first: int) -> float:
    return _median(events, first, "rollout/seconds")


if __name__ == "__main__":
    main()
