"""Trains a run again from its saved shards alone: the same recipe gives the same weights, bit for bit.

    version 0 -> update(frozen list of step 0) -> version 1 -> update(frozen list of step 1) -> version 2 ...

No token is sampled. With another learning rate or another advantage it is another training on the same frozen
trajectories, which is the fairest comparison of two algorithms' updates; but those trajectories were sampled by the old
policy, so ratios wander from 1 as the new one departs from it. The run itself is only read.

Left out on purpose: Beam (one process, one step after another), and resuming a replay: it is short, start it again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from jax_core.policies import MissingVersionError, PolicyStore, tree_digest
from jax_core.trainer import Trainer
from schemas import run_layout
from schemas.errors import DamagedDataError, UserError
from schemas.manifest import StepList
from schemas.metrics import MetricsWriter, read_metrics
from schemas.recipe import Recipe
from schemas.recipe_io import differences, recipe_from_json, recipe_to_json, with_overrides
from schemas.records import ShardContent
from schemas.store import RunStore
from schemas.text import to_json
from stages.runtime import Runtime
from stages.shards import frozen_step, read_listed
from stages.train import drop_too_old, policies_to_keep

MAY_CHANGE = ("algorithm.", "trainer.")

Report = Callable[["ReplayedStep"], None]


@dataclass(frozen=True)
class ReplayedStep:
    """One step trained again. `recorded` is the digest that the run committed for the version; None if it has none."""

    version: int
    digest: str
    recorded: str | None
    metrics: Mapping[str, float]
    recorded_metrics: Mapping[str, float]

    @property
    def same(self) -> bool:
        return self.digest == self.recorded


@dataclass(frozen=True)
class Replay:
    """What came of a replay.

    `distance` is |new - old| / |old| over all weights of the last version (2-norms); None where the run's weights
    cannot be read.
    """

    run: str
    changes: tuple[str, ...]  # "trainer.optimizer.learning_rate: 0.0003 -> 0.001"
    steps: tuple[ReplayedStep, ...]
    distance: float | None
    to: str | None

    @property
    def compared(self) -> list[ReplayedStep]:
        return [step for step in self.steps if step.recorded is not None]

    @property
    def first_difference(self) -> ReplayedStep | None:
        return next((step for step in self.compared if not step.same), None)

    @property
    def identical(self) -> bool:
        """Every version that the run has recorded came out with the same bits, and there was at least one."""
        return bool(self.compared) and self.first_difference is None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"identical": self.identical}


def changed_recipe(recipe: Recipe, overrides: Sequence[str]) -> tuple[Recipe, list[str]]:
    """`recipe` with `section.key=value` overrides, and what they changed.

    Raises:
      UserError: an override is wrong, or changes what the saved trajectories were made with.
    """
    changed = with_overrides(recipe, overrides)
    found = differences(recipe, changed)
    for change in found:
        if not change.startswith(MAY_CHANGE):
            raise UserError(
                change,
                "a replay samples nothing: the saved trajectories were made with the old value, and cannot follow.",
                "Change only algorithm.* and trainer.*, or start a new run with `rollstream run`.",
            )
    return changed, found


def replay(
    shared: Runtime, recipe: Recipe, *, to: RunStore | None = None, report: Report = lambda step: None
) -> Replay:
    """Trains `recipe` on the frozen trajectories of the run `shared`.

    Args:
      recipe: the run's recipe, or one that `changed_recipe` made of it.
      to: an empty run directory for the new policies and metrics; None keeps neither.
      report: called after each step.

    Raises:
      UserError: nothing to replay, or more steps than there are, or `to` is occupied.
      DamagedDataError: a shard, a list or version 0 is damaged or gone.
    """
    frozen = step_lists(shared.store, recipe)
    changes = tuple(differences(shared.recipe, recipe))
    initial = shared.policies.load(0)
    keeper = None if to is None else Keeper(to, shared, recipe, changes, initial)
    trainer = Trainer(shared.model_config, recipe, shared.base) if changes else shared.trainer
    state = trainer.init(initial)
    recorded_metrics = {event.step: event.values for event in read_metrics(shared.store, "train")}
    steps = []
    for listed in frozen:
        contents = drop_too_old(read_rows(shared.store, listed, recipe), listed.step, recipe.rollout.max_lag).contents
        started = time.perf_counter()
        state, measured = trainer.update(state, contents)
        digest = tree_digest(state.params)  # waits for the update to be computed
        measured |= {"trainer/update_seconds": time.perf_counter() - started}
        step = ReplayedStep(
            state.step, digest, recorded_digest(shared, state.step), measured, recorded_metrics.get(listed.step, {})
        )
        steps.append(step)
        if keeper:
            keeper.keep(step, state.params)
        report(step)
    distance = distance_from_run(shared, state.step, state.params)
    return Replay(shared.run, changes, tuple(steps), distance, None if to is None else to.location)


def step_lists(store: RunStore, recipe: Recipe) -> list[StepList]:
    """The frozen lists of steps 0, 1, 2, ... as far as the run and `recipe.trainer.steps` go.

    Raises:
      UserError: there are none, or the recipe was changed to more steps than the run has.
    """
    own_steps = recipe_from_json(store.get(run_layout.CONFIG), run_layout.CONFIG).trainer.steps
    lists: list[StepList] = []
    while len(lists) < recipe.trainer.steps and (listed := frozen_step(store, len(lists))) is not None:
        lists.append(listed)
    if not lists:
        raise UserError(store.location, "has no trained step, so there is nothing to replay.", "Resume the run first.")
    if recipe.trainer.steps > max(own_steps, len(lists)):
        raise UserError(
            f"trainer.steps={recipe.trainer.steps}",
            f"the run has trajectories of {len(lists)} steps, and a replay samples no others.",
            f"Set trainer.steps to {len(lists)} or less.",
        )
    return lists


def read_rows(store: RunStore, listed: StepList, recipe: Recipe) -> list[ShardContent]:
    """The shards of a frozen list, for a recipe that may have other rows than the run.

    Raises:
      DamagedDataError: as `read_listed` says.
      UserError: the recipe's rows are shorter than those that the shards are packed in.
    """
    contents = read_listed(store, listed)
    longest = max((content.row_tokens for content in contents), default=0)
    if longest > recipe.trainer.row_tokens:
        raise UserError(
            f"trainer.row_tokens={recipe.trainer.row_tokens}",
            f"the saved shards are packed in rows of {longest} tokens.",
            f"Set it to {longest} or more.",
        )
    return contents


def recorded_digest(shared: Runtime, version: int) -> str | None:
    """The digest that the run committed for `version`; None if the version was never committed."""
    if not shared.store.exists(run_layout.policy_commit(version)):
        return None
    return shared.policies.commit(version).digest


def distance_from_run(shared: Runtime, version: int, params: Any) -> float | None:
    """|new - old| / |old| (2-norms over all weights); None where the run's weights of that version cannot be read."""
    try:
        stored = shared.policies.load(version)
    except (MissingVersionError, DamagedDataError):
        return None
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(stored), strict=True)
    arrays = [(np.asarray(new, np.float64), np.asarray(old, np.float64)) for new, old in pairs]
    moved = sum(float(np.sum((new - old) ** 2)) for new, old in arrays)
    length = sum(float(np.sum(old**2)) for _, old in arrays)
    return math.sqrt(moved / length) if length else math.sqrt(moved)


class Keeper:
    """Writes a replay's policies and metrics as a run directory, so that `evaluate` and `inspect` can read it.

    Raises:
      UserError: the directory holds something already.
    """

    def __init__(self, to: RunStore, shared: Runtime, recipe: Recipe, changes: Sequence[str], initial: Any):
        if occupant := next(iter(to.list("")), None):
            raise UserError(to.location, f"is not empty (it holds {occupant}).", "Name an empty directory.")
        self._recipe = recipe
        self._policies = PolicyStore(to)
        self._metrics = MetricsWriter(to, "train")
        to.put_new(run_layout.REPLAY, to_json({"run": shared.run, "changes": list(changes)}, indent=2).encode() + b"\n")
        to.put_new(run_layout.CONFIG, recipe_to_json(recipe))
        self._policies.publish(0, initial, source=shared.policies.commit(0).source)

    def keep(self, step: ReplayedStep, params: Any) -> None:
        self._metrics.write(step.version - 1, step.metrics)
        self._policies.publish(step.version, params, source="step")
        self._policies.prune(policies_to_keep(step.version, self._recipe))
