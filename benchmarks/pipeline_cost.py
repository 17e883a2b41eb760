"""What the pipeline itself costs: the same steps as a bare Python loop over the stages' functions, and through Beam.

    python -m benchmarks.pipeline_cost [--recipe recipes/frozen_lake.toml] [--steps 20] [--rounds 5]

Both sides sample, score, group, pack, commit shards, train, checkpoint and publish, into run directories of their own,
with everything compiled before. They take turns, so that what else the machine does hits both alike. Printed: seconds
of each round, and the ratio of the medians (stages / bare loop).

The bare loop writes neither the stages' metrics nor Beam's counters: these count as the pipeline's own cost.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jax_core.policies import tree_digest
from runners import colocated
from runners.run_directory import prepare_run, rare_garbage_collection
from schemas.recipe import Recipe
from schemas.recipe_io import load_recipe
from stages.group import group
from stages.pack import pack
from stages.prompts.source import prompt_batch
from stages.reward.kinds import make_reward
from stages.reward.reward import score_batch
from stages.rollout.rollout import roll_out
from stages.runtime import Runtime, release, runtime
from stages.shards import commit_shard
from stages.train import train_ready_steps
from stages.warm_start import warm_start


def bare_loop(shared: Runtime, recipe: Recipe) -> None:
    """The run without Beam: each step's elements one after another, then its training."""
    warm_start(shared, lambda step, metrics: None)
    reward = make_reward(recipe)
    for step in range(recipe.trainer.steps):
        for element in range(recipe.rollout.elements_per_step):
            batch = prompt_batch(shared, step, element, policy_version=step)
            rolled = roll_out(shared, recipe, batch)
            scored = score_batch(rolled, reward, recipe.task.reward_seconds_limit, run_seed=recipe.seed)
            grouped = group(scored, samples=recipe.rollout.samples_per_prompt)
            packed = pack(grouped, row_tokens=recipe.trainer.row_tokens)
            shared.recent_shards.put(commit_shard(shared.store, packed, shared.run_id).manifest.sha256, packed)
        train_ready_steps(shared)


def run_bare(recipe: Recipe, folder: Path) -> tuple[float, str]:
    """Seconds, and the digest of the last policy."""
    shared = runtime(folder, recipe)
    started = time.perf_counter()
    prepare_run(shared.store, recipe, resume=False)
    with rare_garbage_collection():  # as the placement does: it is not what is measured here
        bare_loop(shared, recipe)
    seconds = time.perf_counter() - started
    digest = shared.policies.commit(recipe.trainer.steps).digest
    release(folder)
    return seconds, digest


def run_stages(recipe: Recipe, folder: Path) -> tuple[float, str]:
    started = time.perf_counter()
    colocated.run(recipe, folder)
    seconds = time.perf_counter() - started
    digest = tree_digest(runtime(folder, recipe).policies.load(recipe.trainer.steps))
    release(folder)
    return seconds, digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/frozen_lake.toml")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    overrides = [f"trainer.steps={arguments.steps}", "warm_start.steps=0", "evaluation.every=0"]
    recipe = load_recipe(Path(arguments.recipe), overrides)
    console = Console()
    seconds: dict[str, list[float]] = {"bare loop": [], "stages": []}
    with tempfile.TemporaryDirectory() as folder:
        for compiling in (run_bare, run_stages):
            compiling(recipe, Path(folder, f"compile-{compiling.__name__}"))
        for round_ in range(arguments.rounds):
            bare, bare_digest = run_bare(recipe, Path(folder, f"bare-{round_}"))
            staged, staged_digest = run_stages(recipe, Path(folder, f"stages-{round_}"))
            assert bare_digest == staged_digest, "the two sides did not do the same work"
            seconds["bare loop"].append(bare)
            seconds["stages"].append(staged)
            console.print(f"round {round_ + 1}: bare loop {bare:.2f} s, stages {staged:.2f} s")
    console.print(_table(seconds, arguments.steps))


def _table(seconds: dict[str, list[float]], steps: int) -> Table:
    median = {side: statistics.median(values) for side, values in seconds.items()}
    table = Table("", "median s", "min s", "ms a step", title=f"{steps} steps, the same weights bit for bit")
    for side, values in seconds.items():
        table.add_row(side, f"{median[side]:.2f}", f"{min(values):.2f}", f"{1000 * median[side] / steps:.0f}")
    table.add_row("ratio", f"{median['stages'] / median['bare loop']:.3f}", "", "")
    return table


if __name__ == "__main__":
    main()
