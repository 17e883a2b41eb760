"""What Flink would be given: the options, and a graph whose side effects stand behind stable input."""

from __future__ import annotations

from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import FlinkRunnerOptions, PipelineOptions, PortableOptions, StandardOptions

from pipelines.online import sample_shards
from runners import flink
from runners.flink import job_server_flags
from runners.profiles import PROFILES
from schemas.errors import UserError
from tests.pipelines.tiny_runs import tiny_recipe

PROFILE = PROFILES["flink"]


def test_the_options_say_one_engine_a_worker_a_stream_and_regular_checkpoints() -> None:
    options = PipelineOptions([*PROFILE.flags, "--flink_master=cluster:8081", "--parallelism=4"])
    assert options.view_as(StandardOptions).streaming
    assert options.view_as(FlinkRunnerOptions).flink_master == "cluster:8081"
    assert options.view_as(FlinkRunnerOptions).parallelism == 4  # the user's, not the profile's
    known = options.get_all_options(retain_unknown_options=True)
    assert (known["checkpointing_interval"], known["sdk_worker_parallelism"]) == ("10000", "1")
    assert not options.view_as(PortableOptions).environment_type  # Beam's choice, by where Flink is


def test_every_stage_with_side_effects_is_given_what_a_boundary_has_made_stable() -> None:
    pipeline = beam.Pipeline()
    _ = sample_shards(pipeline, tiny_recipe(), "run", shape=PROFILE.shape)
    steps = pipeline.to_runner_api().components.transforms.values()
    made_by = {out: step.unique_name for step in steps if not step.subtransforms for out in step.outputs.values()}
    inputs = {step.unique_name: [made_by[i] for i in step.inputs.values()] for step in steps if not step.subtransforms}
    assert inputs["Rollout/Rollout"] == ["AfterAdmitPrompts/Reshuffle/RemoveRandomKeys"]
    assert inputs["Reward/Reward"] == ["AfterRollout/Reshuffle/RemoveRandomKeys"]
    assert inputs["WriteShards/WriteShard"] == ["BeforeWriteShards/Reshuffle/RemoveRandomKeys"]


def test_the_job_server_is_a_jar_or_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jar = tmp_path / "server.jar"
    jar.touch()
    for named, flag in ((str(jar), f"--flink_job_server_jar={jar}"), ("host:8099", "--job_endpoint=host:8099")):
        monkeypatch.setenv(flink.VARIABLE, named)
        assert job_server_flags() == [flag]


@pytest.mark.parametrize("named", ["", "no-such.jar", "host:port"])
def test_a_job_server_that_is_none_is_refused_with_the_way_to_get_one(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flink.VARIABLE, named)
    with pytest.raises(UserError) as error:
        job_server_flags()
    assert "Maven Central" in error.value.way_out
