"""What Dataflow would be sent, found out offline."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest

from runners.availability import availabilities
from runners.dataflow import Submission, translate, with_accelerator
from runners.profiles import PROFILES
from schemas.errors import UserError
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


def submission(accelerator: str | None = None, *flags: str) -> Submission:
    """Skips where Beam's part for Google Cloud is not installed."""
    if not {row.runner: row.usable for row in availabilities()}["dataflow"]:
        skip("dataflow", "Beam's part for Google Cloud is not installed: pip install 'rollstream[gcp]'")
    profile = with_accelerator(PROFILE, accelerator, flags) if accelerator else PROFILE
    return translate(tiny_recipe(), "gs://my-bucket/runs/lake", profile, flags=[*FLAGS, *flags])


def pool_of(job: Mapping[str, Any]) -> Mapping[str, Any]:
    (pool,) = job["environment"]["workerPools"]
    return pool


def test_the_job_streams_on_workers_of_one_process_with_the_image_that_was_named() -> None:
    job = submission().job
    pool = pool_of(job)
    assert (job["name"], job["type"], job["labels"]) == ("lake", "JOB_TYPE_STREAMING", {"team": "rl"})
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


def test_a_run_that_workers_cannot_see_is_refused() -> None:
    with pytest.raises(UserError, match="cannot see it"):
        translate(tiny_recipe(), "runs/lake", PROFILE)


def test_without_beams_part_for_google_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(UserError, match=r"rollstream\[gcp\]"):
        translate(tiny_recipe(), "gs://my-bucket/runs/lake", PROFILE, flags=FLAGS)
