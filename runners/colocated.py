"""The colocated placement: sampling and training take turns in this process, on Beam's FnApiRunner.

The whole loop is one fused stage (`runners.fusion`). An element is sampled, scored, packed and committed, and with the
last element of a step the step is trained, before the source claims the next. So sampling never lags, whatever
`rollout.max_lag` allows, and two runs of one recipe give the same shards and weights, bit for bit.

Left out on purpose: DirectRunner, which may quietly choose another runner, and several workers, with which FnApiRunner
loses what a source has not yet claimed.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import apache_beam as beam
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from pipelines.online import online
from runners.fusion import check_fusion
from schemas import run_layout
from schemas.errors import UserError
from schemas.manifest import PolicyCommit
from schemas.recipe import Recipe
from schemas.recipe_io import differences, recipe_from_json, recipe_to_json
from schemas.store import RunStore
from stages.reward.self_test import check_task
from stages.runtime import Runtime, release, runtime
from stages.shards import sweep_orphans
from stages.train import StepReport, settle, train_ready_steps

_OBJECTS_BETWEEN_COLLECTIONS = 200_000
_CHATTY_LOGGERS = ("apache_beam.runners.common", "apache_beam.runners.worker.sdk_worker")


def run(
    recipe: Recipe,
    location: str | Path,
    *,
    resume: bool = False,
    beam_flags: Sequence[str] = (),
    after_warm_start: Sequence[Callable[[PolicyCommit], None]] = (),
    after_step: Sequence[Callable[[StepReport], None]] = (),
    warm_start_report: Callable[[int, Mapping[str, float]], None] | None = None,
) -> None:
    """Runs `recipe` in the run directory at `location` to its last step, from the beginning or from where it stopped.

    It may be killed at any moment and resumed: the weights come out as if it had not been.

    Args:
      resume: whether to go on with the run that is there.
      beam_flags: further flags for Beam, as on a command line ("--direct_runner_bundle_repeat=1").
      after_warm_start, after_step, warm_start_report: see `stages.runtime.Runtime`.

    Raises:
      UserError: the directory is occupied, holds another recipe's run, or another process is at work on it; a flag that
        this placement cannot follow; a reward that fails its test; or whatever a stage raised, as it raised it.
      KeyboardInterrupt: the run was interrupted. What is committed stays, and the run can be resumed.
    """
    location = str(location)
    options = _options(beam_flags)
    store = RunStore.open(location)
    check_task(recipe)
    prepare_run(store, recipe, resume=resume)
    with store.held(run_layout.CONFIG), _fresh_runtime(location, recipe) as shared:
        shared.after_warm_start += after_warm_start
        shared.after_step += after_step
        shared.warm_start_report = warm_start_report or shared.warm_start_report
        clear_leftovers(shared)
        settle(shared)
        train_ready_steps(shared)
        _run_pipeline(recipe, location, options)
        _check_finished(shared)


@contextmanager
def _fresh_runtime(location: str, recipe: Recipe) -> Iterator[Runtime]:
    """The Runtime, new: what an earlier run in this process knew of the directory may no longer be so."""
    release(location)
    try:
        yield runtime(location, recipe)
    finally:
        release(location)


def clear_leftovers(shared: Runtime) -> None:
    """Removes what killed processes left half-made. Only for who holds the run: another's work would look the same."""
    shared.store.sweep_staged()
    sweep_orphans(shared.store)
    shared.policies.sweep()
    shared.trainer_states.sweep()


def prepare_run(store: RunStore, recipe: Recipe, *, resume: bool) -> None:
    """Makes the run directory, or recognises the run in it.

    Raises:
      UserError: without `resume`, the directory holds anything at all; with `resume`, it holds no run, or a run of a
        recipe that differs.
    """
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
    name = f"{store.location}/{run_layout.CONFIG}"
    changed = differences(recipe_from_json(store.get(run_layout.CONFIG), name), recipe)
    if changed:
        raise UserError(
            store.location,
            f"holds a run of another recipe: {'; '.join(changed)}.",
            "Resume with the recipe that it was begun with, or name an empty directory.",
        )


def _options(beam_flags: Sequence[str]) -> PipelineOptions:
    options = PipelineOptions(list(beam_flags))
    direct = options.view_as(DirectOptions)
    if direct.direct_num_workers != 1 or direct.direct_running_mode != "in_memory":
        raise UserError(
            f"direct_num_workers={direct.direct_num_workers}, direct_running_mode={direct.direct_running_mode!r}",
            "this placement is one worker in one process: with more, the runner loses prompts not yet claimed.",
            "Leave these flags out.",
        )
    return options


def _run_pipeline(recipe: Recipe, location: str, options: PipelineOptions) -> None:
    pipeline = beam.Pipeline(runner=FnApiRunner(), options=options)
    online(pipeline, recipe, location)
    check_fusion(pipeline)
    with _errors_as_raised(), rare_garbage_collection():
        pipeline.run().wait_until_finish()


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


@contextmanager
def _errors_as_raised() -> Iterator[None]:
    """Undoes what Beam does to errors of a stage: it makes them new, with its own words in them, and logs each."""
    loggers = [logging.getLogger(name) for name in _CHATTY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        original = original_error(error)
        if original is error:
            raise
        raise original from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def original_error(error: BaseException) -> BaseException:
    """What a stage raised, given what came out of Beam: the UserError or interrupt that Beam made anew, else `error`.

    Other errors are faults of ours: they keep Beam's words, which say in which step it was.
    """
    behind: BaseException | None = error
    while behind is not None and getattr(behind, "_tagged_with_step", False):
        behind = behind.__context__
    return behind if isinstance(behind, UserError | KeyboardInterrupt | SystemExit) else error


def _check_finished(shared: Runtime) -> None:
    version, steps = shared.policies.latest(), shared.recipe.trainer.steps
    if version != steps:
        raise RuntimeError(f"the pipeline ended at policy version {version}, and the run has {steps} steps")
