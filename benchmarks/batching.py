"""What it gains to decode elements together that are sampled at the same time.

    python -m benchmarks.batching [--recipe recipes/frozen_lake.toml] [--at-once 1 2 4 8] [--rounds 5]
    python -m benchmarks.batching model.layers=4 model.width=256 model.mlp_width=768       # another model

Threads sample elements one after another, each an eighth of a step's prompts, as a runner's threads do in one SDK
process: with a session each (plain), and with sessions that share the engine's calls (together). The two take turns, so
that what else the machine does hits both alike; the ratio is the median over rounds of together / plain. All is
compiled before. The policy is untrained.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from runners.run_directory import prepare_run, rare_garbage_collection
from schemas.recipe import Recipe
from schemas.recipe_io import load_recipe
from stages.prompts.source import prompt_batch
from stages.rollout.rollout import measure_rollouts, roll_out
from stages.runtime import Runtime, runtime
from stages.warm_start import warm_start

ELEMENTS_OF_STEP = 8


@dataclass(frozen=True)
class Sampled:
    tokens_per_second: float
    sessions_per_call: float


def sample(shared: Runtime, recipe: Recipe, threads: int, elements: int, *, together: bool) -> Sampled:
    """Samples the same elements with so many threads, each of which takes the next one that nobody has."""
    to_do = iter(range(elements))
    lock = threading.Lock()
    done: list[dict[str, float]] = []

    def work() -> None:
        while True:
            with lock:
                position = next(to_do, None)
            if position is None:
                return
            batch = prompt_batch(shared, *divmod(position, ELEMENTS_OF_STEP), policy_version=0)
            done.append(measure_rollouts(roll_out(shared, recipe, batch, decode_together=together)))

    started = time.perf_counter()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - started
    if len(done) != elements:
        raise RuntimeError("a thread failed; its error stands above")
    calls = sum(measured["rollout/decode_calls"] for measured in done)
    sessions = sum(m["rollout/decode_calls"] * m["rollout/sessions_per_decode_call/mean"] for m in done)
    return Sampled(sum(measured["rollout/sampled_tokens"] for measured in done) / seconds, sessions / calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/frozen_lake.toml")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--elements", type=int, default=32, help="elements sampled in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_intermixed_args()
    fixed = [f"rollout.elements_per_step={ELEMENTS_OF_STEP}", "warm_start.steps=0", "evaluation.every=0"]
    recipe = load_recipe(Path(arguments.recipe), [*fixed, *arguments.overrides])
    with tempfile.TemporaryDirectory() as folder, rare_garbage_collection():
        shared = runtime(folder, recipe)
        prepare_run(shared.store, recipe, resume=False)
        warm_start(shared, lambda step, metrics: None)
        rows = {n: _measure(shared, recipe, n, arguments) for n in arguments.at_once}
    Console().print(_table(recipe, rows))


def _measure(shared: Runtime, recipe: Recipe, threads: int, arguments: argparse.Namespace) -> list[Sequence[Sampled]]:
    """Plain and together, of each round; the first round compiles and is left out."""
    rounds = []
    for _ in range(1 + arguments.rounds):
        sides = [sample(shared, recipe, threads, arguments.elements, together=together) for together in (False, True)]
        print(f"{threads} at once, tokens/s: {[round(side.tokens_per_second) for side in sides]}", flush=True)
        rounds.append(sides)
    return list(rounds[1:])


def _table(recipe: Recipe, rows: dict[int, list[Sequence[Sampled]]]) -> Table:
    model, rollout = recipe.model, recipe.rollout
    samples = rollout.prompts_per_step // ELEMENTS_OF_STEP * rollout.samples_per_prompt
    title = f"{recipe.name}: {model.layers} layers of {model.width}, elements of {samples} samples, medians"
    table = Table("elements at once", "plain tokens/s", "together tokens/s", "ratio", "sessions a call", title=title)
    for threads, rounds in rows.items():
        plain, together = (statistics.median(r[side].tokens_per_second for r in rounds) for side in (0, 1))
        ratio = statistics.median(r[1].tokens_per_second / r[0].tokens_per_second for r in rounds)
        sessions = statistics.median(r[1].sessions_per_call for r in rounds)
        table.add_row(str(threads), f"{plain:.0f}", f"{together:.0f}", f"{ratio:.2f}", f"{sessions:.1f}")
    return table


if __name__ == "__main__":
    main()
