"""Google Cloud Dataflow: a share's one job, and what would be submitted, found out without an account or a network.

A job outlives the process that submitted it. So its name says which share of which run it samples, and Dataflow, which
has one active job of a name, refuses a second: whoever submits again waits for the first.

Left out on purpose: ending and draining jobs (`gcloud dataflow jobs` does), and images (docs).
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions
from apache_beam.runners.runner import PipelineResult

from pipelines.online import sample_shards
from runners.profiles import RunnerProfile
from schemas.errors import UserError
from schemas.recipe import Recipe
from schemas.recipe_io import recipe_to_json
from stages.prompts.shares import WHOLE_RUN, Share

WORKER_WIDE = "worker_accelerator="
CLOUD = ("gs://", "s3://", "az://")
_ID_OF_THE_ACTIVE_JOB = re.compile(r"active job named \S+ with id: ([^\s]+?)\.(?:\s|$)")  # in what Beam raises

_LOGGER = logging.getLogger(__name__)


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


def job_name(recipe: Recipe, location: str, share: Share, given: str | None = None) -> str:
    """The name of the job that samples a share of the run of `recipe` at `location`, and of no other.

    Args:
      given: how the user wants it to begin; None: with the recipe's name.
    """
    identity = json.dumps([location.rstrip("/"), recipe_to_json(recipe).decode(), str(share)])
    begin = given or f"rollstream-{re.sub('[^a-z0-9]+', '-', recipe.name.lower()).strip('-')}"
    return f"{begin}-{hashlib.sha256(identity.encode()).hexdigest()[:10]}-{share.index + 1}-of-{share.of}"


def with_job_name(flags: Sequence[str], recipe: Recipe, location: str, share: Share) -> list[str]:
    """Beam's flags with the job's name, see `job_name`; one that is among them already is how it begins."""
    given = PipelineOptions(list(flags)).view_as(GoogleCloudOptions).job_name
    return [*flags, f"--job_name={job_name(recipe, location, share, given)}"]


def submit(pipeline: beam.Pipeline) -> PipelineResult:
    """Submits the pipeline's job, unless one of its name is active: then the result is that job's."""
    from apache_beam.runners.dataflow.dataflow_runner import DataflowPipelineResult
    from apache_beam.runners.dataflow.internal.apiclient import DataflowJobAlreadyExistsError

    try:
        return pipeline.run()
    except DataflowJobAlreadyExistsError as error:
        active = _ID_OF_THE_ACTIVE_JOB.search(str(error))
        if active is None:
            raise
        runner: Any = pipeline.runner
        _LOGGER.warning("job %s samples this share already: this process waits for it", active[1])
        return DataflowPipelineResult(runner.dataflow_client.get_job(active[1]), runner, pipeline.options)


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
        named_flags = with_job_name([*profile.flags, *flags], recipe, location, share)
        options = PipelineOptions(
            [*named_flags, "--runner=DataflowRunner", "--dry_run=True", "--no_auth"], save_main_session=False
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
