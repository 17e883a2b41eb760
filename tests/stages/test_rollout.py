"""Rollout: the stage in a pipeline, with a real engine and real environments."""

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.metrics import MetricsFilter
from apache_beam.testing.util import assert_that, equal_to

from jax_core.models.decoder import init_params
from schemas import trajectory
from schemas.metrics import read_metrics
from schemas.recipe import Recipe
from schemas.records import Prompt, PromptBatch
from stages.group import group
from stages.pack import pack
from stages.reward.environment_return import environment_return
from stages.reward.reward import score_batch
from stages.rollout.episodes import run_episodes
from stages.rollout.rollout import Rollout, measure_rollouts, roll_out
from stages.runtime import release, runtime
from tests.stages.rollout_fakes import (
    DIALOGUE,
    EchoEnvironments,
    FakeAnswer,
    FakeEngine,
    environment_seed,
    make_batch,
    make_recipe,
    token_seed,
)

LAKE = Prompt("lake", "frozen_lake", {"map": "SF\nFG"})
NO_LAKE = Prompt("no lake", "frozen_lake", {})
LAKES = PromptBatch("run", 3, 1, 0, 2, (LAKE, NO_LAKE, LAKE))  # element 1 of step 3: groups 2, 3 and 4


@pytest.fixture(scope="module")
def recipe():
    return Recipe.model_validate(
        {
            "name": "tiny",
            "model": {"layers": 1, "width": 16, "heads": 2, "kv_heads": 2, "head_width": 8, "mlp_width": 16},
            "rollout": {"prompts_per_step": 3, "samples_per_prompt": 4, "max_turns": 2, "cohorts": 1},
        }
    )


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    """A run directory with random weights as policy version 0."""
    location = str(tmp_path_factory.mktemp("run"))
    shared = runtime(location, recipe)
    shared.policies.publish(0, init_params(shared.model_config, recipe.seed), source="random")
    yield location
    release(location)


def test_the_stage_counts_for_beam_what_it_measures(recipe, run):
    pipeline = beam.Pipeline(runner="FnApiRunner")
    rolled = pipeline | beam.Create([LAKES]) | Rollout(recipe, run)
    assert_that(rolled | beam.Map(lambda batch: len(batch.rollouts)), equal_to([12]))
    result = pipeline.run()
    result.wait_until_finish()
    counters = result.metrics().query(MetricsFilter().with_namespace(Rollout))["counters"]
    (event,) = read_metrics(runtime(run, recipe).store, "rollout")
    assert (event.step, event.labels) == (3, {"element": 1})
    assert {c.key.metric.name: c.committed for c in counters} == {
        "in-prompts": 3,
        "out-trajectories": event.values["rollout/trajectories"],
        "failed-trajectories": event.values["rollout/failed_trajectories"],
        "sampled-tokens": event.values["rollout/sampled_tokens"],
    }
    assert event.values["rollout/trajectories"] == 12 and event.values["rollout/failed_trajectories"] == 4
    assert event.values["rollout/sampled_tokens"] > 0


def test_a_batch_rolled_out_again_gives_the_same_bits(recipe, run):
    first, second = (roll_out(runtime(run, recipe), recipe, LAKES) for _ in range(2))
    assert [r.status for r in first.rollouts] == ["ok"] * 4 + ["failed"] * 4 + ["ok"] * 4
    for a, b in zip(first.rollouts, second.rollouts, strict=True):
        assert a.tokens.tobytes() == b.tokens.tobytes()
        assert a.sampler_logprobs.tobytes() == b.sampler_logprobs.tobytes()
        assert (a.id, a.stop_reason, a.environment, a.versions) == (b.id, b.stop_reason, b.environment, b.versions)


def test_a_real_episode_says_moves_and_is_told_cells(recipe, run):
    tokenizer = runtime(run, recipe).tokenizer
    for rollout in roll_out(runtime(run, recipe), recipe, LAKES).rollouts:
        if rollout.status == "ok":
            assert tokenizer.decode(rollout.tokens[: rollout.prompt_length]) == "^ab\nfg*\na"
            assert rollout.loss_mask.sum() == rollout.environment["steps"] <= 2
            assert (rollout.sampler_logprobs < 0).tolist() == rollout.loss_mask.tolist()


def test_metrics_are_those_of_the_trajectories_that_did_not_fail():
    # Group 10: prompt "ab", sample 0 says "c" and is told "C", says "de" and is done; sample 1 fails.
    # Group 11: its prompt is refused.
    engine = FakeEngine(script={token_seed(10, 0): ["c", "de"]})
    environments = EchoEnvironments({(environment_seed(10, 1), "step", 0): lambda answer: None})
    batch = make_batch("ab", "~", turns=2)
    rolled = run_episodes(engine, None, environments, DIALOGUE, batch, recipe=make_recipe())
    measured = measure_rollouts(rolled)
    assert {name: value for name, value in measured.items() if "second" not in name} == {
        "rollout/trajectories": 4,
        "rollout/failed_trajectories": 3,
        "rollout/prompt_tokens": 2,
        "rollout/sampled_tokens": 3,
        "rollout/environment_tokens": 1,
        "rollout/turns/mean": 2.0,
        "rollout/branch_tokens/mean": 4.0,
        "rollout/branch_tokens/max": 4,
        "rollout/decode_calls": 2,
        "rollout/sessions_per_decode_call/mean": 1.0,
        "rollout/policy_version": 6,
    }
    assert measured["rollout/sampled_tokens_per_second"] == 3 / measured["rollout/seconds"]


def test_a_prompt_counts_once_a_group_whatever_became_of_the_group():
    # Groups of two samples: "abc" plays, "de" fails in both samples after its prompt was computed, "~" is refused.
    faults = {(environment_seed(11, sample), "step", 0): lambda answer: None for sample in range(2)}
    batch = make_batch("abc", "de", "~")
    rolled = run_episodes(FakeEngine(), None, EchoEnvironments(faults), DIALOGUE, batch, recipe=make_recipe())
    assert [r.status for r in rolled.rollouts] == ["ok"] * 2 + ["failed"] * 4
    assert measure_rollouts(rolled)["rollout/prompt_tokens"] == 3 + 2


def test_a_shard_holds_whatever_a_rollout_makes_of_its_failures():
    # One group of good samples, one with a failed one of each kind, one refused, and one of which nothing is known.
    environments = EchoEnvironments(
        {
            (environment_seed(11, 0), "reset", 0): lambda _: None,
            (environment_seed(11, 1), "step", 1): lambda _: None,
            **{(environment_seed(13, sample), "reset", 0): lambda _: None for sample in range(4)},
        }
    )
    no_numbers = lambda answer: FakeAnswer(answer.tokens, np.full(len(answer.tokens), np.nan, np.float32))
    engine = FakeEngine(faults={token_seed(11, 2): no_numbers})
    recipe = make_recipe(samples_per_prompt=4)
    rolled = run_episodes(engine, None, environments, DIALOGUE, make_batch("ab", "cd", "~", "ef"), recipe=recipe)
    scored = score_batch(rolled, environment_return, 10.0)
    table = trajectory.encode(pack(group(scored, samples=4), row_tokens=64))
    trajectory.validate(table)
    assert table.num_rows == 16
    assert table.column("status").to_pylist() == ["ok"] * 4 + ["failed"] * 3 + ["ok"] + ["failed"] * 8
