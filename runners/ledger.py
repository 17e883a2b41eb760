"""The ledger of a run: every prompt is trained once, or listed with its reason; and whether that adds up.

It is made from what the run directory holds (pins, manifests, frozen lists, shards, commits), not from what the stages
say of themselves. What the trainer recorded of each step is then held against it.

    trained + trained nothing + left out + not trained yet = steps x prompts of a step

Left out on purpose: samples. A group is complete in its shard, tombstones included (`schemas.trajectory`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.text import Text

from jax_core.trainer import plan_step
from runners.report import count, table
from runners.run_directory import recipe_of
from schemas import run_layout
from schemas.errors import UserError
from schemas.manifest import StepList
from schemas.metrics import read_metrics
from schemas.recipe import Recipe
from schemas.records import ShardContent
from schemas.store import RunStore
from stages.shards import frozen_step, read_listed
from stages.train import drop_too_old

TRAINED = "trained"
EQUAL = "trained nothing: all its rewards are equal"
NO_TOKENS = "trained nothing: every sample failed"
TOO_OLD = "left out: its policy was older than max_lag allows"
DAMAGED = "left out: its shard was damaged"
WAITS = "not trained yet: sampled, waits for its step"
IN_FLIGHT = "not trained yet: being sampled"
NOT_BEGUN = "not trained yet: not begun"
NOT_YET = (WAITS, IN_FLIGHT, NOT_BEGUN)
FATES = (TRAINED, EQUAL, NO_TOKENS, TOO_OLD, DAMAGED, *NOT_YET)


@dataclass(frozen=True)
class Entry:
    """What became of one prompt: group `group_index` of training step `step`."""

    step: int
    group_index: int
    fate: str
    prompt_id: str = ""  # known once it is sampled
    lag: int | None = None  # steps between its oldest policy and the step that consumed it


@dataclass(frozen=True)
class Ledger:
    """Every prompt of a run, in order. It adds up if there are no problems."""

    run: str
    steps: int
    prompts_per_step: int
    max_lag: int
    entries: tuple[Entry, ...]
    problems: tuple[str, ...]

    @property
    def totals(self) -> Mapping[str, int]:
        """Prompts by fate, in the order of `FATES`; those that nobody had are left out."""
        totals = Counter(entry.fate for entry in self.entries)
        return {fate: totals[fate] for fate in FATES if totals[fate]}

    @property
    def largest_lag(self) -> int | None:
        """Of what was trained."""
        return max(
            (entry.lag for entry in self.entries if entry.fate == TRAINED and entry.lag is not None), default=None
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "totals": dict(self.totals), "largest_lag": self.largest_lag}


def ledger_of(store: RunStore) -> Ledger:
    """The ledger of the run in `store`, of now.

    Raises:
      UserError: there is no run, or a record of it cannot be read.
    """
    recipe = recipe_of(store)
    problems: list[str] = []
    entries = [entry for step in range(recipe.trainer.steps) for entry in _entries_of(store, recipe, step, problems)]
    problems += _disagreements(store, entries)
    return Ledger(
        run=store.location,
        steps=recipe.trainer.steps,
        prompts_per_step=recipe.rollout.prompts_per_step,
        max_lag=recipe.rollout.max_lag,
        entries=tuple(entries),
        problems=tuple(problems),
    )


def _entries_of(store: RunStore, recipe: Recipe, step: int, problems: list[str]) -> Sequence[Entry]:
    """One entry for each prompt of the step, whatever the directory holds."""
    if not store.exists(run_layout.policy_commit(step + 1)):
        return list(_untrained(store, recipe, step))
    frozen = frozen_step(store, step)
    if frozen is None:
        problems.append(f"step {step} is trained, and its frozen list is gone")
        return []
    try:
        found = [*_trained(store, recipe, frozen), *_skipped(recipe, frozen)]
    except UserError as error:
        problems.append(str(error))
        return []
    problems += _miscounted(step, found, recipe.rollout.prompts_per_step)
    problems += [
        f"step {step}, prompt {entry.group_index}: trained with a lag of {entry.lag} steps"
        for entry in found
        if entry.fate == TRAINED and entry.lag is not None and entry.lag > recipe.rollout.max_lag
    ]
    return sorted(found, key=lambda entry: entry.group_index)


def _trained(store: RunStore, recipe: Recipe, frozen: StepList) -> Iterator[Entry]:
    contents = read_listed(store, frozen)
    fresh = drop_too_old(contents, frozen.step, recipe.rollout.max_lag)
    kept = {group.group_index for content in fresh.contents for group in content.groups}
    for content in contents:
        for one in _group_by_group(content):
            (group,) = one.groups
            versions = [span.policy_version for sample in group.samples for span in sample.rollout.versions]
            yield Entry(
                frozen.step,
                group.group_index,
                _fate(one, recipe, frozen.step) if group.group_index in kept else TOO_OLD,
                group.prompt_id,
                frozen.step - min(versions) if versions else None,
            )


def _group_by_group(content: ShardContent) -> Iterator[ShardContent]:
    for group, places in zip(content.groups, content.placements, strict=True):
        yield replace(content, groups=(group,), placements=(places,))


def _fate(one: ShardContent, recipe: Recipe, step: int) -> str:
    """What training makes of a single group that is fresh enough, by the trainer's own plan."""
    plan = plan_step([one], recipe.algorithm, step, norm=1.0)
    if plan.trained_groups:
        return TRAINED
    return EQUAL if any(s.rollout.status == "ok" for s in one.groups[0].samples) else NO_TOKENS


def _skipped(recipe: Recipe, frozen: StepList) -> Iterator[Entry]:
    for shard in frozen.skipped:
        element = int(PurePosixPath(shard.key).name[:4])  # of a manifest or of a data file
        yield from (Entry(frozen.step, index, DAMAGED) for index in _prompts_of(recipe, element))


def _untrained(store: RunStore, recipe: Recipe, step: int) -> Iterator[Entry]:
    for element in range(recipe.rollout.elements_per_step):
        if store.exists(run_layout.manifest(step, element)):
            fate = WAITS
        elif store.exists(run_layout.pin(step, element)):
            fate = IN_FLIGHT
        else:
            fate = NOT_BEGUN
        yield from (Entry(step, index, fate) for index in _prompts_of(recipe, element))


def _prompts_of(recipe: Recipe, element: int) -> range:
    first = element * recipe.prompts_per_element
    return range(first, first + recipe.prompts_per_element)


def _miscounted(step: int, found: Sequence[Entry], prompts: int) -> list[str]:
    times = Counter(entry.group_index for entry in found)
    wrong = {index: n for index, n in times.items() if n > 1 or index >= prompts}
    missing = {index: 0 for index in range(prompts) if not times[index]}
    return [
        f"step {step}, prompt {index}: is there {n} times, of prompts 0 to {prompts - 1}"
        for index, n in sorted((wrong | missing).items())
    ]


def _disagreements(store: RunStore, entries: Sequence[Entry]) -> list[str]:
    """Where the trainer's own count of a step is another than the ledger's."""
    totals = Counter((entry.step, entry.fate) for entry in entries)
    trained_steps = {entry.step for entry in entries if entry.fate not in NOT_YET}
    counted = [
        (event.step, fate, event.values[name])
        for event in read_metrics(store, "train")
        for name, fate in (("trainer/trained_groups", TRAINED), ("trainer/too_old_groups", TOO_OLD))
        if event.step in trained_steps and name in event.values
    ]
    return [
        f"step {step}: {totals[step, fate]} prompts are {fate!r}, and the trainer counted {number:g}"
        for step, fate, number in counted
        if number != totals[step, fate]
    ]


def render_ledger(ledger: Ledger, *, every_row: bool = False) -> RenderableType:
    """The ledger for a terminal: the sum, and the prompts that were not trained."""
    whole = ledger.steps * ledger.prompts_per_step
    rows = [[fate, count(number)] for fate, number in ledger.totals.items()]
    title = f"{count(whole)} prompts: {ledger.steps} steps of {ledger.prompts_per_step}"
    lag = "nothing" if ledger.largest_lag is None else f"at most {ledger.largest_lag} steps"
    parts: list[RenderableType] = [
        table(title, ("what became of them", "prompts"), rows),
        Text(f"lag of what was trained: {lag}; the recipe allows {ledger.max_lag}"),
    ]
    listed = [entry for entry in ledger.entries if entry.fate not in (TRAINED, *NOT_YET)]
    shown = listed if every_row else listed[:20]
    parts += [Text(f"  step {entry.step} prompt {entry.group_index}  {entry.fate}", style="dim") for entry in shown]
    if len(listed) > len(shown):
        parts.append(Text(f"  ... {len(listed) - len(shown)} more: --all shows them", style="dim"))
    if ledger.problems:
        parts.append(Text("It does not add up:\n" + "\n".join(f"  {line}" for line in ledger.problems), style="red"))
    else:
        parts.append(Text("It adds up.", style="green"))
    return Lines(*parts)
