"""The graph is one on every placement, boundaries apart; its labels stay, because running jobs are updated by them."""

from __future__ import annotations

import apache_beam as beam
import pytest

from pipelines.online import BOUNDARIES, GraphShape, sample_shards
from runners.fusion import check_fusion
from runners.profiles import PROFILES
from schemas.errors import UserError
from stages.prompts.shares import WHOLE_RUN, Share
from tests.pipelines.tiny_runs import tiny_recipe

STAGES = ["AdmitPrompts", "Rollout", "Reward", "GroupByPrompt", "Pack", "WriteShards"]
ORDER = [
    *("AdmitPrompts", "AfterAdmitPrompts", "Rollout", "AfterRollout", "Reward", "GroupByPrompt", "Pack"),
    *("BeforeWriteShards", "WriteShards"),
]
LABELS = {
    "colocated": STAGES,
    "local": STAGES,
    "flink": ORDER,
    "dataflow": ORDER,
    "prism": ["AdmitPrompts", "AfterAdmitPrompts", "Rollout", "AfterRollout", *STAGES[2:]],
}


def graph(shape: GraphShape, share: Share = WHOLE_RUN) -> beam.Pipeline:
    pipeline = beam.Pipeline()
    _ = sample_shards(pipeline, tiny_recipe(), "run", share, shape)
    return pipeline


def stages_of(pipeline: beam.Pipeline) -> list[str]:
    """The labels that are written in the pipeline, in its order."""
    proto = pipeline.to_runner_api()
    steps = proto.components.transforms
    return [steps[child].unique_name for root in proto.root_transform_ids for child in steps[root].subtransforms]


def labels(pipeline: beam.Pipeline) -> set[str]:
    """Of all steps, those inside of others included."""
    return {step.unique_name for step in pipeline.to_runner_api().components.transforms.values()}


@pytest.mark.parametrize("name", PROFILES)
def test_every_placement_has_the_same_stages_by_the_same_labels(name: str) -> None:
    assert stages_of(graph(PROFILES[name].shape)) == LABELS[name]


def test_boundaries_are_the_only_difference_in_the_graph() -> None:
    fused = labels(graph(GraphShape()))
    cut = labels(graph(GraphShape(boundaries=frozenset(BOUNDARIES))))
    assert fused < cut
    assert {name.split("/")[0] for name in cut - fused} == set(BOUNDARIES)


def test_a_graph_without_boundaries_is_one_fused_stage_and_each_boundary_cuts_it() -> None:
    check_fusion(graph(GraphShape()))
    for boundary in BOUNDARIES:
        with pytest.raises(UserError, match=boundary):
            check_fusion(graph(GraphShape(boundaries=frozenset({boundary}))))


def test_a_boundary_that_the_graph_does_not_have_is_an_error() -> None:
    with pytest.raises(ValueError, match="AfterLunch"):
        GraphShape(boundaries=frozenset({"AfterLunch"}))


def test_the_graph_travels_without_anything_that_only_this_machine_has() -> None:
    # What a worker gets is the recipe, the run's location and the share: two graphs of one share are equal.
    one, other = (graph(GraphShape(), Share(1, 4)).to_runner_api() for _ in range(2))
    assert [t.spec.payload for _, t in sorted(one.components.transforms.items())] == [
        t.spec.payload for _, t in sorted(other.components.transforms.items())
    ]
