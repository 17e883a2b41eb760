"""A generator: a process that samples a share of a run's positions, on one of Beam's runners.

It waits for version 0 and then, before each claim, for the policy that the lag bound asks for; whoever trains is
another process. It may be killed at any moment, started again, and started twice: the first writer of a shard wins.

Left out on purpose: trying again. A pipeline that failed ends its process, and whoever started that decides. One that
was cancelled or drained was stopped by somebody, so nobody is asked to start it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineResult, PipelineRunner, PipelineState, create_runner

from pipelines.online import sample_shards
from runners.beam_errors import errors_as_raised
from runners.dataflow import submit, with_job_name
from runners.flink import job_server_flags
from runners.fusion import check_fusion
from runners.presence import present
from runners.prism import TetheredPrismRunner
from runners.profiles import RunnerProfile
from runners.run_directory import fresh_runtime, rare_garbage_collection, recipe_of
from schemas.errors import UserError
from schemas.store import RunStore
from schemas.worker import named
from stages.prompts.shares import WHOLE_RUN, Share


def generate(
    location: str | Path, profile: RunnerProfile, share: Share = WHOLE_RUN, beam_flags: Sequence[str] = ()
) -> None:
    """Samples the positions of `share` of the run at `location`, until the last of them is sampled or trained.

    Args:
      beam_flags: further flags for Beam, as on a command line ("--prism_location=/opt/prism").

    Raises:
      UserError: there is no run, the profile has no generators, or whatever a stage raised that the user can mend; or
        the job was cancelled or drained in its runner.
      Exception: the pipeline failed; started again, it goes on from the run directory.
    """
    if profile.trains_itself:
        raise UserError(f"--runner {profile.name}", "it trains where it samples.", "Use another, such as local.")
    location = str(location)
    store = RunStore.open(location)
    recipe = recipe_of(store)
    flags = [*profile.flags, *(job_server_flags() if profile.beam_runner == "FlinkRunner" else ()), *beam_flags]
    on_dataflow = profile.beam_runner == "DataflowRunner"
    if on_dataflow:
        flags = with_job_name(flags, recipe, location, share)
    role = f"rollout-{share.index + 1}-of-{share.of}"
    with named(f"generator-{share}"), present(store, role), fresh_runtime(location, recipe):
        pipeline = beam.Pipeline(runner=_runner(profile), options=PipelineOptions(flags, save_main_session=False))
        _ = sample_shards(pipeline, recipe, location, share, profile.shape)
        if not profile.shape.boundaries:
            check_fusion(pipeline)
        with errors_as_raised(), rare_garbage_collection():
            _wait_for_the_end(submit(pipeline) if on_dataflow else pipeline.run(), role)


_STOPPED = (
    *(PipelineState.CANCELLING, PipelineState.CANCELLED),
    *(PipelineState.DRAINING, PipelineState.DRAINED, PipelineState.UPDATED),
)


def _wait_for_the_end(result: PipelineResult, role: str) -> None:
    try:
        result.wait_until_finish()
    except RuntimeError as error:
        state = _state_of(result)
        if state not in _STOPPED:
            raise
        raise UserError(
            role, f"its job was stopped ({state}).", "The run can be resumed: what is committed stays."
        ) from error


def _state_of(result: PipelineResult) -> str:
    try:
        return str(result.state)
    except Exception:  # whoever knew it is gone too
        return str(PipelineState.UNKNOWN)


def _runner(profile: RunnerProfile) -> PipelineRunner:
    if profile.beam_runner == "FnApiRunner":
        return FnApiRunner()
    if profile.beam_runner == "PrismRunner":
        return TetheredPrismRunner()
    return create_runner(profile.beam_runner)
