"""Google Cloud Dataflow: what would be submitted, found out on this machine, without an account and without a network.

Left out on purpose: waiting for jobs and draining them (`gcloud dataflow jobs` does), and images (docs).
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions

from pipelines.online import sample_shards
from runners.profiles import RunnerProfile
from schemas.errors import UserError
from schemas.recipe import Recipe
from stages.prompts.shares import WHOLE_RUN, Share

WORKER_WIDE = "worker_accelerator="
CLOUD = ("gs://", "s3://", "az://")


@dataclass(frozen=True)
class Submission:
    """A job as Dataflow would get it.

    Attributes:
      job: the job's description (worker pools, experiments, service options, image).
      steps: label of each step that computes -> its resource hints, by their short names.
    """

    job: Mapping[str, Any]
    steps: Mapping[str, Mapping[str, str]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_location(location: str) -> None:
    """Raises UserError if workers in the cloud could not see the run."""
    if not location.startswith(CLOUD):
        raise UserError(
            location,
            "lies on this machine, where Dataflow's workers cannot see it.",
            "Name a run directory in an object store, such as gs://bucket/runs/lake.",
        )


def with_accelerator(profile: RunnerProfile, accelerator: str, flags: Sequence[str]) -> RunnerProfile:
    """The profile whose sampling step alone has the accelerator ("right fitting").

    Raises:
      UserError: the runner has no right fitting; or every worker has one already, by the flags, and the step would get
        two.
    """
    if profile.beam_runner != "DataflowRunner":
        raise UserError(
            f"--accelerator {accelerator}",
            f"--runner {profile.name} does not give steps workers of their own.",
            "Leave it out: JAX takes the accelerators that it finds.",
        )
    if any(WORKER_WIDE in flag for flag in flags):
        raise UserError(
            f"--accelerator {accelerator}",
            f"the flags give every worker one already ({WORKER_WIDE}...).",
            "Ask for accelerators in one of the two ways.",
        )
    return replace(profile, shape=replace(profile.shape, rollout_hints={"accelerator": accelerator}))


def translate(
    recipe: Recipe, location: str, profile: RunnerProfile, share: Share = WHOLE_RUN, flags: Sequence[str] = ()
) -> Submission:
    """What would be submitted for the run at `location`. Takes some two seconds and asks nobody.

    Args:
      flags: Beam's flags of the job: project, region, temp_location, image, machine type, labels.

    Raises:
      UserError: the location is not in a cloud, what Beam needs for this is not installed, or Beam refuses a flag.
    """
    check_location(location)
    with tempfile.TemporaryDirectory() as folder:
        options = PipelineOptions(
            [*profile.flags, *flags, "--runner=DataflowRunner", "--dry_run=True", "--no_auth"], save_main_session=False
        )
        runner = _dataflow_runner()
        pipeline = beam.Pipeline(runner=runner, options=options)
        _ = sample_shards(pipeline, recipe, location, share, profile.shape)
        try:
            job = _job_of(pipeline.run())
        except ValueError as error:
            raise UserError("--runner dataflow", f"{error}", "Give Beam's flags with --beam-flag.") from error
        return Submission(_described(job, options, Path(folder)), _steps(runner.proto_pipeline))


def _job_of(result: Any) -> Any:
    return result.job


def _dataflow_runner() -> Any:
    try:
        importlib.import_module("google.auth")
        from apache_beam.runners.dataflow.dataflow_runner import DataflowRunner
    except ImportError as error:
        raise UserError(
            "--runner dataflow", f"needs what is not installed ({error}).", "pip install 'rollstream[gcp]'"
        ) from error
    return DataflowRunner()


def _described(job: Any, options: PipelineOptions, folder: Path) -> dict[str, Any]:
    """The whole description, by having Beam write it as a template into a local folder."""
    from apache_beam.runners.dataflow.internal.apiclient import DataflowApplicationClient

    template, staged = folder / "template.json", folder / "staged"
    staged.mkdir()
    job.google_cloud_options.staging_location = str(staged)
    job.options.view_as(GoogleCloudOptions).template_location = str(template)
    cloud = options.view_as(GoogleCloudOptions)
    cloud.staging_location, cloud.template_location = str(staged), str(template)
    DataflowApplicationClient(options, str(staged)).create_job(job)
    return json.loads(template.read_text())


def _steps(proto: Any) -> dict[str, dict[str, str]]:
    environments = proto.components.environments
    return {
        step.unique_name: {
            urn.rpartition(":")[0].rpartition(":")[2]: value.decode()
            for urn, value in environments[step.environment_id].resource_hints.items()
        }
        for step in proto.components.transforms.values()
        if step.environment_id and not step.subtransforms
    }
