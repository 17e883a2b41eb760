"""The trainer as its own process: it makes policy version 0, then trains each step whose shards are there.

It meets the generators only in the run directory: it lists manifests, trains a step once the last of its shards is
committed, and publishes. So it may start before them, after them or without them, and be killed at any moment; started
again, it goes on from what is there. One process alone trains a run: it holds the run's config.json.

Left out on purpose: Beam, and several hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from runners.run_directory import clear_leftovers, fresh_runtime, rare_garbage_collection, recipe_of
from schemas import run_layout
from schemas.manifest import PolicyCommit
from schemas.store import RunStore
from schemas.worker import named
from stages.runtime import Runtime
from stages.train import StepReport, settle, train_ready_steps
from stages.warm_start import warm_start

# Between two looks for manifests: soon after the last step, and then less and less often.
_SHORTEST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS, _WAIT_GROWTH = 0.01, 0.5, 1.3


def train(
    location: str | Path,
    *,
    after_warm_start: Sequence[Callable[[PolicyCommit], None]] = (),
    after_step: Sequence[Callable[[StepReport], None]] = (),
    warm_start_report: Callable[[int, Mapping[str, float]], None] | None = None,
) -> None:
    """Trains the run at `location` to its last step, waiting for each step's shards.

    Args:
      after_warm_start, after_step, warm_start_report: see `stages.runtime.Runtime`.

    Raises:
      UserError: there is no run, another process trains it, or whatever `stages.train.train_ready_steps` raises.
    """
    location = str(location)
    store = RunStore.open(location)
    recipe = recipe_of(store)
    with named("trainer"), store.held(run_layout.CONFIG), fresh_runtime(location, recipe) as shared:
        shared.after_warm_start += after_warm_start
        shared.after_step += after_step
        shared.warm_start_report = warm_start_report or shared.warm_start_report
        clear_leftovers(shared)
        settle(shared)
        commit = warm_start(shared, shared.warm_start_report)
        for hook in shared.after_warm_start:
            hook(commit)
        shared.idle_since = time.monotonic()
        with rare_garbage_collection():
            _train_until_the_last_step(shared)


def _train_until_the_last_step(shared: Runtime) -> None:
    wait = _SHORTEST_WAIT_SECONDS
    while shared.policies.latest() != shared.recipe.trainer.steps:
        if train_ready_steps(shared):
            wait = _SHORTEST_WAIT_SECONDS
        else:
            time.sleep(wait)
            wait = min(wait * _WAIT_GROWTH, _LONGEST_WAIT_SECONDS)
