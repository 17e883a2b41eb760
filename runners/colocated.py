"""The colocated placement: sampling and training take turns in this process, on Beam's FnApiRunner.

The whole loop is one fused stage (`runners.fusion`). An element is sampled, scored, packed and committed, and with the
last element of a step the step is trained, before the source claims the next. So sampling never lags, whatever
`rollout.max_lag` allows, and two runs of one recipe give the same shards and weights, bit for bit.

Left out on purpose: DirectRunner, which may quietly choose another runner, and several workers, with which FnApiRunner
loses what a source has not yet claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import apache_beam as beam
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from pipelines.online import online
from runners.beam_errors import errors_as_raised
from runners.fusion import check_fusion
from runners.run_directory import clear_leftovers, fresh_runtime, prepare_run, rare_garbage_collection
from schemas import run_layout
from schemas.errors import UserError
from schemas.manifest import PolicyCommit
from schemas.recipe import Recipe
from schemas.store import RunStore
from schemas.worker import named
from stages.runtime import Runtime
from stages.train import StepReport, settle, train_ready_steps


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
        this placement cannot follow; or whatever a stage raised, as it raised it.
      KeyboardInterrupt: the run was interrupted. What is committed stays, and the run can be resumed.
    """
    location = str(location)
    options = _options(beam_flags)
    store = RunStore.open(location)
    prepare_run(store, recipe, resume=resume)
    with named("colocated"), store.held(run_layout.CONFIG), fresh_runtime(location, recipe) as shared:
        shared.after_warm_start += after_warm_start
        shared.after_step += after_step
        shared.warm_start_report = warm_start_report or shared.warm_start_report
        clear_leftovers(shared)
        settle(shared)
        train_ready_steps(shared)
        _run_pipeline(recipe, location, options)
        _check_finished(shared)


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
    with errors_as_raised(), rare_garbage_collection():
        pipeline.run().wait_until_finish()


def _check_finished(shared: Runtime) -> None:
    version, steps = shared.policies.latest(), shared.recipe.trainer.steps
    if version != steps:
        raise RuntimeError(f"the pipeline ended at policy version {version}, and the run has {steps} steps")
