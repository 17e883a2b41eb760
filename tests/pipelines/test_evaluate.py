"""Success has honest intervals and an unbiased pass@k, and episodes depend on nothing but weights and seeds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelines import evaluate
from pipelines.evaluate import (
    CLUSTERED,
    LearningCurve,
    Player,
    PromptOutcome,
    chunks,
    clustered_interval,
    evaluate_run,
    evaluation_recipe,
    evaluation_sampling,
    evenly_spread,
    is_curve_point,
    open_run,
    pass_at_k,
    play_scripted,
    prompt_outcome,
    run_results,
    summarize,
    summarize_by_stratum,
    wilson_interval,
)
from schemas.errors import UserError
from schemas.metrics import read_metrics
from schemas.recipe_io import recipe_to_json
from schemas.records import Prompt, SamplingRecord
from schemas.store import RunStore
from stages.rollout.environments import ENVIRONMENTS
from stages.runtime import Runtime
from tests.pipelines.tiny_runs import begin, share_parts, tiny_recipe
from tests.stages.worked_batches import failed, rollout, scored

RECIPE = tiny_recipe(evaluation={"every": 2, "curve_prompts": 3, "test_prompts": 4, "samples": 2})


def outcome(successes: int, samples: int = 4, stratum: str = "", broken: int = 0) -> PromptOutcome:
    return PromptOutcome("p", stratum, samples, successes, broken, successes / samples)


# Intervals


def test_wilson_intervals_agree_with_published_values() -> None:
    # Newcombe (1998), table I, method 3: 81/263, 15/148, 0/20, 1/29.
    for successes, trials, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)]:
        interval = wilson_interval(successes, trials)
        assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)


def test_wilson_intervals_cover_the_true_share_about_as_often_as_they_say() -> None:
    trials = 40
    covered = []
    for share in np.linspace(0.02, 0.98, 97):
        chances = [math.comb(trials, c) * share**c * (1 - share) ** (trials - c) for c in range(trials + 1)]
        intervals = [wilson_interval(c, trials) for c in range(trials + 1)]
        covered.append(sum(p for p, i in zip(chances, intervals, strict=True) if i.low <= share <= i.high))
    assert 0.94 < np.mean(covered) < 0.97
    assert min(covered) > 0.85


def test_an_interval_has_a_width_where_everything_failed_or_succeeded() -> None:
    assert wilson_interval(0, 12).low == 0.0 < wilson_interval(0, 12).high
    assert wilson_interval(12, 12).low < 1.0 == wilson_interval(12, 12).high
    assert clustered_interval([4] * 12, 4).low == wilson_interval(12, 12).low


def test_one_sample_a_prompt_gives_the_plain_interval() -> None:
    assert clustered_interval([1, 0, 1, 1], 1) == wilson_interval(3, 4)


def test_copies_of_a_sample_add_no_certainty() -> None:
    # Each prompt either always succeeds or never: 16 samples know no more than one (less one degree of freedom).
    interval = clustered_interval([16, 0, 16, 16, 0, 16, 16, 16, 0, 16], 16)
    alone = wilson_interval(0.7 * 9, 9)
    assert (interval.low, interval.high) == pytest.approx((alone.low, alone.high))
    assert interval.method == CLUSTERED


def test_one_prompt_is_one_trial_however_often_it_is_sampled() -> None:
    interval = clustered_interval([3], 4)
    plain = wilson_interval(0.75, 1)
    assert (interval.low, interval.high) == (plain.low, plain.high)


def test_samples_that_are_independent_count_nearly_in_full() -> None:
    draws = np.random.default_rng(0).binomial(8, 0.4, size=4000)
    interval, plain = clustered_interval(draws.tolist(), 8), wilson_interval(draws.sum(), 32_000)
    assert interval.high - interval.low == pytest.approx(plain.high - plain.low, rel=0.05)


# pass@k


def test_pass_at_k_is_the_share_of_subsets_with_a_success() -> None:
    samples, successes = 6, 2
    won = [i < successes for i in range(samples)]
    for k in range(1, samples + 1):
        subsets = list(itertools.combinations(won, k))
        assert pass_at_k(samples, successes, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_unbiased() -> None:
    samples, share = 8, 0.3
    for k in (1, 2, 5, 8):
        expected = sum(
            math.comb(samples, c) * share**c * (1 - share) ** (samples - c) * pass_at_k(samples, c, k)
            for c in range(samples + 1)
        )
        assert expected == pytest.approx(1 - (1 - share) ** k)


@pytest.mark.parametrize(("samples", "successes", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_lies_outside_the_samples(samples: int, successes: int, k: int) -> None:
    with pytest.raises(ValueError, match="within the samples"):
        pass_at_k(samples, successes, k)


# Summaries


def test_a_summary_counts_prompts_samples_and_failures() -> None:
    summary = summarize([outcome(4), outcome(1), outcome(0, broken=3)])
    assert (summary.prompts, summary.samples, summary.failed) == (3, 4, 3)
    assert summary.success == pytest.approx(5 / 12)
    assert summary.pass_at == pytest.approx({1: 5 / 12, 2: (1 + 0.5 + 0) / 3, 4: 2 / 3})


def test_a_summary_refuses_unequal_numbers_of_samples() -> None:
    with pytest.raises(ValueError, match=r"samples \[2, 4\]"):
        summarize([outcome(1, samples=2), outcome(1, samples=4)])


def test_results_are_split_by_stratum_only_where_there_are_several() -> None:
    outcomes = [outcome(4, stratum="size 3"), outcome(0, stratum="size 4"), outcome(2, stratum="size 4")]
    by_stratum = summarize_by_stratum(outcomes)
    assert {name: summary.success for name, summary in by_stratum.items()} == {"size 3": 1.0, "size 4": 0.25}
    assert summarize_by_stratum(outcomes[1:]) == {}


def test_a_failed_episode_counts_and_is_no_success() -> None:
    samples = [scored(rollout(0, 1)), scored(failed(0, 2)), scored(failed(0, 3))]
    got = prompt_outcome(Prompt("p", "frozen_lake", {"size": 5}), samples)
    assert got == PromptOutcome("p", "size 5", samples=3, successes=1, failed=2, reward=1 / 3)


def test_without_a_success_component_a_reward_above_zero_is_success() -> None:
    samples = [
        replace(scored(rollout(0, i)), reward=reward, components={}) for i, reward in enumerate([0.0, -1.0, 0.5])
    ]
    assert prompt_outcome(Prompt("p", "t", {}), samples).successes == 1


# Which prompts, in which order


@pytest.mark.parametrize(("length", "most"), [(10, 3), (10, 10), (3, 10), (300, 64), (7, None)])
def test_prompts_are_spread_over_the_whole_split_without_repeats(length: int, most: int | None) -> None:
    chosen = evenly_spread(length, most)
    assert len(chosen) == len(set(chosen)) == (length if most is None else min(length, most))
    assert chosen[0] == 0 and chosen == sorted(chosen) and chosen[-1] < length
    assert chosen[-1] >= length - -(-length // len(chosen))


@pytest.mark.parametrize(("length", "most"), [(10, 4), (300, 128), (1, 5), (128, 128)])
def test_chunks_cover_everything_once_in_nearly_equal_parts(length: int, most: int) -> None:
    parts = chunks(length, most)
    assert [i for part in parts for i in part] == list(range(length))
    assert max(map(len, parts)) <= most and max(map(len, parts)) - min(map(len, parts)) <= 1


def test_an_evaluation_changes_sampling_and_seeds_and_nothing_else() -> None:
    changed = evaluation_recipe(RECIPE, "test", 1, SamplingRecord(0.5, top_k=3))
    assert changed.seed != RECIPE.seed
    assert changed.seed != evaluation_recipe(RECIPE, "validation", 1, SamplingRecord(0.5, top_k=3)).seed
    assert (changed.sampling.temperature, changed.sampling.top_k) == (0.5, 3)
    assert changed.rollout.samples_per_prompt == 1
    same = {"rollout", "sampling", "seed"}
    assert changed.model_dump(exclude=same) == RECIPE.model_dump(exclude=same)


def test_the_curve_has_a_point_every_so_often_and_at_the_end() -> None:
    odd = tiny_recipe(evaluation={"every": 3})
    assert [v for v in range(odd.trainer.steps + 1) if is_curve_point(v, odd)] == [0, 3, 4]
    assert not is_curve_point(0, tiny_recipe(evaluation={"every": 0}))


# With a real model


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    """A run with policy version 0, the random weights."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("evaluate")
        patch.setenv("ROLLSTREAM_DATA", str(folder / "data"))
        share_parts(patch)
        RunStore.open(folder / "run").put_new("config.json", recipe_to_json(RECIPE))
        begin(folder / "run", RECIPE)
        return open_run(folder / "run")


@pytest.fixture(autouse=True)
def data_folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "shared" in request.fixturenames:
        run = Path(request.getfixturevalue("shared").run)
        monkeypatch.setenv("ROLLSTREAM_DATA", str(run.parent / "data"))


def test_an_episode_does_not_depend_on_what_is_played_beside_it(
    shared: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    player = Player(shared, "test", most_prompts=None, samples=2, sampling=evaluation_sampling(RECIPE))
    together = player.play(shared.initial_weights(), 0)
    monkeypatch.setattr(evaluate, "ROWS_IN_FLIGHT", 2)
    one_by_one = player.play(shared.initial_weights(), 0)
    assert together == one_by_one
    assert len(together) == 4 and {o.samples for o in together} == {2}


def test_an_evaluation_says_which_weights_it_is_of(shared: Runtime) -> None:
    evaluation = evaluate_run(shared, samples=2)
    assert (evaluation.version, evaluation.digest) == (0, shared.policies.commit(0).digest)
    assert [part.title for part in evaluation.parts] == ["sampled at temperature 1", "greedy: the most likely token"]
    assert [part.total.samples for part in evaluation.parts] == [2, 1]
    assert evaluate_run(shared, samples=2).parts == evaluation.parts


def test_a_version_that_was_never_published_is_refused(shared: Runtime) -> None:
    with pytest.raises(UserError, match="version 9"):
        evaluate_run(shared, version=9)


def test_the_results_of_a_run_show_its_random_weights_and_the_scripted_rule(shared: Runtime) -> None:
    results = run_results(shared).results
    # Without a warm start version 0 *is* the random weights, and nothing was trained yet.
    assert [result.label for result in results] == ["random weights", "scripted rule"]
    assert results[0].digest == shared.policies.commit(0).digest
    prompts = Player(shared, "test", most_prompts=None, samples=1, sampling=evaluation_sampling(RECIPE)).prompts
    assert results[1].total == summarize(play_scripted(RECIPE, prompts)["scripted rule"])


def test_an_environment_without_a_scripted_rule_has_no_scripted_result(monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Prompt("p", "frozen_lake", {"map": "SF\nFG"})
    assert [o.successes for o in play_scripted(RECIPE, [lake])["scripted rule"]] == [1]
    monkeypatch.setitem(ENVIRONMENTS, "frozen_lake", replace(ENVIRONMENTS["frozen_lake"], scripted=None))
    assert play_scripted(RECIPE, [lake]) == {}


def test_the_learning_curve_measures_each_due_version_once(shared: Runtime) -> None:
    commit = shared.policies.commit(0)
    LearningCurve(shared.run, RECIPE).first(commit)
    first = read_metrics(shared.store, "evaluate")
    assert [(event.step, event.values["evaluate/prompts"]) for event in first] == [(0, 3.0)]
    LearningCurve(shared.run, RECIPE).first(commit)  # a resumed run
    assert read_metrics(shared.store, "evaluate") == first


def test_a_resumed_run_adds_the_point_that_a_kill_took(shared: Runtime) -> None:
    weights = shared.initial_weights()
    for version in (1, 2):  # killed between the publishing of version 2, which is due, and its evaluation
        shared.policies.publish(version, weights, source="step")
    LearningCurve(shared.run, RECIPE).first(shared.policies.commit(0))
    assert [event.step for event in read_metrics(shared.store, "evaluate")] == [0, 2]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        open_run(tmp_path)
