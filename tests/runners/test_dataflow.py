"""What Dataflow would be sent, found out offline."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineState, create_runner

from pipelines.online import sample_shards
from runners.availability import availabilities
from runners.dataflow import Submission, job_name, submit, translate, with_accelerator, with_job_name
from runners.profiles import PROFILES
from schemas.errors import UserError
from stages.prompts.shares import Share
from tests.pipelines.placed import skip
from tests.pipelines.tiny_runs import tiny_recipe

PROFILE = PROFILES["dataflow"]
GPU = "type:nvidia-l4;count:1;install-nvidia-driver"
WORKER_WIDE = f"--dataflow_service_options=worker_accelerator={GPU}"
FLAGS = (
    *("--project=my-project", "--region=us-central1", "--job_name=lake", "--temp_location=gs://my-bucket/tmp"),
    *("--staging_location=gs://my-bucket/staging", "--sdk_container_image=registry/rollstream:1"),
    *("--worker_machine_type=g2-standard-4", "--disk_size_gb=100", "--labels=team=rl"),
)
STEPS = {
    "AdmitPrompts/Admit",
    "Rollout/Rollout",
    "Reward/Reward",
    "GroupByPrompt/Group",
    "Pack/Pack",
    "WriteShards/WriteShard",
}


def need_google() -> None:
    """Skips where Beam's part for Google Cloud is not installed."""
    if not {row.runner: row.usable for row in availabilities()}["dataflow"]:
        skip("dataflow", "Beam's part for Google Cloud is not installed: pip install 'rollstream[gcp]'")


def submission(accelerator: str | None = None, *flags: str) -> Submission:
    need_google()
    profile = with_accelerator(PROFILE, accelerator, flags) if accelerator else PROFILE
    return translate(tiny_recipe(), "gs://my-bucket/runs/lake", profile, flags=[*FLAGS, *flags])


def pool_of(job: Mapping[str, Any]) -> Mapping[str, Any]:
    (pool,) = job["environment"]["workerPools"]
    return pool


def test_the_job_streams_on_workers_of_one_process_with_the_image_that_was_named() -> None:
    job = submission().job
    pool = pool_of(job)
    assert (job["type"], job["labels"]) == ("JOB_TYPE_STREAMING", {"team": "rl"})
    assert job["name"].startswith("lake-")
    assert {"enable_streaming_engine", "no_use_multiple_sdk_containers"} <= set(job["environment"]["experiments"])
    assert (pool["machineType"], pool["diskSizeGb"], pool["numThreadsPerWorker"]) == ("g2-standard-4", 100, 8)
    assert {image["containerImage"] for image in pool["sdkHarnessContainerImages"]} == {"registry/rollstream:1"}


def test_the_labels_of_its_steps_are_those_that_running_jobs_are_updated_by() -> None:
    steps = submission().steps
    assert {label for label in steps if "Reshuffle" not in label} == STEPS


def test_right_fitting_gives_the_sampling_step_alone_an_accelerator() -> None:
    hints = submission(GPU).steps
    assert {label: given for label, given in hints.items() if given} == {"Rollout/Rollout": {"accelerator": GPU}}


def test_a_worker_wide_accelerator_is_one_of_the_service_and_of_no_step() -> None:
    sent = submission(None, WORKER_WIDE)
    assert sent.job["environment"]["serviceOptions"] == [f"worker_accelerator={GPU}"]
    assert not any(sent.steps.values())


def test_accelerators_are_not_asked_for_in_two_ways() -> None:
    with pytest.raises(UserError, match="one of the two ways"):
        with_accelerator(PROFILE, GPU, [WORKER_WIDE])
    with pytest.raises(UserError, match="local does not give steps"):
        with_accelerator(PROFILES["local"], GPU, [])


def test_each_share_of_each_run_has_a_job_name_of_its_own_and_keeps_it() -> None:
    recipe, place = tiny_recipe(), "gs://my-bucket/runs/lake"
    name = job_name(recipe, place, Share(0, 2))
    assert re.fullmatch(r"rollstream-tiny-[0-9a-f]{10}-1-of-2", name)
    assert job_name(recipe, f"{place}/", Share(0, 2)) == name
    others = [
        job_name(recipe, place, Share(1, 2)),
        job_name(recipe, f"{place}2", Share(0, 2)),
        job_name(tiny_recipe(trainer={"steps": 5}), place, Share(0, 2)),
        job_name(recipe, place, Share(0, 2), given="lake"),
    ]
    assert len({name, *others}) == 5
    assert others[-1].startswith("lake-")


def test_a_recipe_of_any_name_gives_a_name_that_dataflow_takes() -> None:
    recipe = tiny_recipe().model_copy(update={"name": "_Lake.v2_"})
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job_name(recipe, "gs://b/l", Share(0, 1)))


class Service(ThreadingHTTPServer):
    """As much of Dataflow's REST interface as submitting needs: one active job of a name, and its state."""

    def __init__(self) -> None:
        super().__init__(("localhost", 0), _Requests)
        self.jobs: dict[str, dict[str, Any]] = {}  # by name

    @property
    def flags(self) -> list[str]:
        return [f"--dataflow_endpoint=http://localhost:{self.server_port}", "--no_auth"]


class _Requests(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        new = {key: asked[key] for key in ("name", "clientRequestId")} | {"currentState": "JOB_STATE_RUNNING"}
        self._answer(self.server.jobs.setdefault(asked["name"], new | {"id": f"id-{len(self.server.jobs)}"}))

    def do_GET(self) -> None:
        (job,) = (job for job in self.server.jobs.values() if f"/{job['id']}?" in f"{self.path}?")
        self._answer(job)

    def _answer(self, job: dict[str, Any]) -> None:
        body = json.dumps(job).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        yield service
        service.shutdown()


def pipeline_of(service: Service, share: Share, staging: Path) -> beam.Pipeline:
    need_google()
    given = [*PROFILE.flags, *FLAGS, *service.flags, f"--staging_location={staging}"]
    flags = with_job_name(given, tiny_recipe(), "gs://my-bucket/runs/lake", share)
    options = PipelineOptions(flags, save_main_session=False)
    pipeline = beam.Pipeline(runner=create_runner("DataflowRunner"), options=options)
    _ = sample_shards(pipeline, tiny_recipe(), "gs://my-bucket/runs/lake", share, PROFILE.shape)
    return pipeline


def test_a_share_that_is_submitted_again_is_waited_for_and_has_one_job(service: Service, tmp_path: Path) -> None:
    ids = [submit(pipeline_of(service, share, tmp_path)).job_id() for share in (Share(0, 2), Share(1, 2), Share(0, 2))]
    assert ids == ["id-0", "id-1", "id-0"]
    again = submit(pipeline_of(service, Share(0, 2), tmp_path))
    assert again.state == PipelineState.RUNNING
    service.jobs[next(iter(service.jobs))]["currentState"] = "JOB_STATE_DONE"
    assert again.wait_until_finish() == PipelineState.DONE


def test_a_run_that_workers_cannot_see_is_refused() -> None:
    with pytest.raises(UserError, match="cannot see it"):
        translate(tiny_recipe(), "runs/lake", PROFILE)


def test_without_beams_part_for_google_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(UserError, match=r"rollstream\[gcp\]"):
        translate(tiny_recipe(), "gs://my-bucket/runs/lake", PROFILE, flags=FLAGS)
