"""What every placement does with a run directory before and after it runs: make it, recognise it, clear it.

Left out on purpose: what is in it (`schemas.run_layout`), and who works on it (`runners.presence`).
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runners.presence import alone
from schemas import run_layout
from schemas.errors import UserError
from schemas.recipe import Recipe
from schemas.recipe_io import differences, recipe_from_json, recipe_to_json
from schemas.store import RunStore
from stages.reward.self_test import check_task
from stages.runtime import Runtime, check_model, release, runtime
from stages.shards import sweep_orphans

_OBJECTS_BETWEEN_COLLECTIONS = 200_000


def prepare_run(store: RunStore, recipe: Recipe, *, resume: bool) -> None:
    """Makes the run directory, or recognises the run in it.

    Raises:
      UserError: without `resume`, the directory holds anything at all; with `resume`, it holds no run, or a run of a
        recipe that differs; the recipe's reward fails its test; or it has no model to begin with. Nothing is written
        then.
    """
    check_task(recipe)
    if not resume:
        check_model(recipe)
    if resume:
        _recognise(store, recipe)
    elif store.exists(run_layout.CONFIG):
        raise UserError(store.location, "already holds a run.", "Resume that run, or name an empty directory.")
    elif occupant := next(iter(store.list("")), None):
        raise UserError(store.location, f"is not empty (it holds {occupant}).", "Name an empty directory.")
    elif not store.put_new(run_layout.CONFIG, recipe_to_json(recipe)):
        raise UserError(store.location, "another run has just begun there.", "Name an empty directory.")


def _recognise(store: RunStore, recipe: Recipe) -> None:
    if not store.exists(run_layout.CONFIG):
        raise UserError(store.location, "holds no run to resume.", "Check the path, or start without resuming.")
    changed = differences(recipe_of(store), recipe)
    if changed:
        raise UserError(
            store.location,
            f"holds a run of another recipe: {'; '.join(changed)}.",
            "Resume with the recipe that it was begun with, or name an empty directory.",
        )


def recipe_of(store: RunStore) -> Recipe:
    """The recipe that the run in `store` was begun with.

    Raises:
      UserError: there is no run, or its recipe cannot be read.
    """
    if not store.exists(run_layout.CONFIG):
        raise UserError(
            store.location,
            f"holds no run: there is no {run_layout.CONFIG}.",
            "Check the path, or make it with rollstream begin.",
        )
    return recipe_from_json(store.get(run_layout.CONFIG), f"{store.location}/{run_layout.CONFIG}")


@contextmanager
def fresh_runtime(location: str, recipe: Recipe) -> Iterator[Runtime]:
    """The Runtime, new: what an earlier run in this process knew of the directory may no longer be so."""
    release(location)
    try:
        yield runtime(location, recipe)
    finally:
        release(location)


def clear_leftovers(shared: Runtime) -> None:
    """Removes what killed processes left half-made. Only for who holds the run as its trainer."""
    shared.policies.sweep()
    shared.trainer_states.sweep()
    clear_leftovers_of_generators(shared.store)


def clear_leftovers_of_generators(store: RunStore) -> None:
    """Removes what killed generators left, unless some are at work: theirs would look the same.

    Only for who holds the run as its trainer, or keeps the trainer out.
    """
    with alone(store) as nobody_else:
        if nobody_else:
            store.sweep_staged()
            sweep_orphans(store)
            if store.root is not None:
                _empty(store.root / run_layout.TEMPORARY)


def _empty(folder: Path) -> None:
    """Removes what is in a folder, if there is one. The folder stays: a process that is only starting, and has not said
    yet that it is there, may have been told to put its temporary files into it."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Lets Python look for reference cycles rarely, and never among what libraries have made until now.

    A step makes some ten thousand records, without cycles. By default each few steps' worth of them would set off a
    search through the million objects of JAX and Beam: an eighth of the run's time.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
