"""Questions of reasoning-gym: any generator by name, options as TOML has them, and splits that share nothing."""

import json
import threading
import tomllib

import pytest

from schemas.errors import UserError
from schemas.recipe import DataSection, Recipe, TaskSection
from schemas.recipe_io import load_recipe
from stages.prompts.datasets import open_prompts, training_prompts
from stages.prompts.reasoning_gym import entry_of, exact_bounds, json_value, key_of, open_generator, python_value
from stages.reward.kinds import make_reward

reasoning_gym = pytest.importorskip("reasoning_gym")
TASK = TaskSection(environment="question", reward="reasoning_gym")
SIBLINGS = """
seed = 0
hold_out = 0.25
key = "numbers"
config = { task_types = ["SIBLINGS"], task_type_weights = [1.0] }
"""
# Generators that keep no right answer: many are, and their scorers check each.
WITHOUT_ANSWER = {"boxnet", "graph_color", "rush_hour"}
# A generator of generators: it has no questions of its own.
NEEDS_CONFIG = {
    "composite": {
        "datasets": [
            {"name": "aiw", "weight": 1.0, "config": {"max_entities": 3}},
            {"name": "lcm", "weight": 2.0, "config": {}},
        ]
    }
}


def opened(name, split="train", **options):
    return open_prompts(DataSection(source="reasoning_gym", name=name, options=options), TASK, split)


def siblings(split="train", **options):
    return opened("aiw", split, **{**tomllib.loads(SIBLINGS), **options})


def questions(data, most=None):
    return [data[i].payload["question"] for i in range(min(len(data), most or len(data)))]


def pairs(data, most=None):
    return {key_of({"question": question}, "numbers") for question in questions(data, most)}


# --- splits ---


def test_nine_of_the_36_number_pairs_of_siblings_are_never_trained_on():
    train, validation, test = pairs(siblings(), 6000), pairs(siblings("validation")), pairs(siblings("test"))
    assert (len(train), len(validation), len(test)) == (27, 4, 5)
    assert not train & validation and not train & test and not validation & test


@pytest.mark.parametrize("seed", [1, 2])
def test_a_pair_keeps_its_split_under_every_seed(seed):
    assert pairs(siblings("test", seed=seed)) == pairs(siblings("test"))
    assert pairs(siblings(seed=seed), 3000) == pairs(siblings(), 3000)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lcm", {"config": {"min_value": 1, "max_value": 10}}),  # so few questions that every draw is a repeat
        ("basic_arithmetic", {"config": {"max_digits": 1, "max_terms": 2}}),
        ("aiw", {}),
        ("aiw", {"key": "metadata.task_type", "hold_out": 0.67}),
        ("aiw", {"key": "metadata.source_index"}),  # says nothing of the question, so equal ones have different keys
    ],
)
def test_no_question_is_in_two_splits(name, options):
    sizes = {"train_size": 2000, "test_size": 100, "validation_size": 100}
    splits = ("train", "validation", "test")
    train, validation, test = (set(questions(opened(name, split, **sizes, **options))) for split in splits)
    assert train and validation and test
    assert not train & validation and not train & test and not validation & test


def test_training_questions_come_as_they_are_drawn_and_held_out_ones_once():
    train, test = questions(siblings(), 2000), questions(siblings("test"))
    assert len(set(train)) < len(train) and len(set(test)) == len(test) == 300
    # Two templates, each in half of the draws; the first has 11 texts a pair, the second 121.
    first_template = sum("and she also has" in q and "brothers and" in q for q in train)
    assert 900 < first_template < 1100


def test_held_out_questions_can_be_drawn_naturally_too():
    test = questions(siblings("test", held_out_repeats=True))
    assert len(test) == 300 and 120 < sum("brothers and" in question for question in test) < 180
    assert pairs(siblings("test", held_out_repeats=True)) == pairs(siblings("test"))


def test_a_small_space_of_questions_gives_what_it_has():
    test = questions(opened("lcm", "test", config={"min_value": 1, "max_value": 5, "min_numbers": 2, "max_numbers": 2}))
    assert 0 < len(test) == len(set(test)) < 15


def test_a_question_is_a_pure_function_of_its_place():
    data, again = siblings(), siblings(test_size=299)
    assert [data[i] for i in (1500, 3, 19_999)] == [again[i] for i in (1500, 3, 19_999)]
    assert questions(data, 50) != questions(siblings(seed=1), 50)
    assert training_prompts(data, 0, 3, 8) == training_prompts(again, 0, 3, 8)


def test_a_prompt_is_its_row_in_json_and_has_an_id_by_what_it_asks():
    data = siblings()
    prompts = [data[i] for i in range(500)]
    assert set(prompts[0].payload) == {"question", "answer", "metadata"}
    assert all(json.loads(json.dumps(p.payload)) == p.payload for p in prompts)
    asked = {p.payload["question"] for p in prompts}
    together = {(p.prompt_id, p.payload["question"]) for p in prompts}
    assert len(asked) == len({p.prompt_id for p in prompts}) == len(together)
    assert prompts[0].prompt_id.startswith("aiw/")


def test_threads_draw_the_same_questions():
    expected = questions(siblings(seed=7), 300)
    data, results = siblings(seed=7, test_size=298), [None] * 4
    threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, questions(data, 300))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def test_a_share_of_few_keys_is_counted_and_both_held_out_splits_get_some():
    assert exact_bounds([i / 36 for i in range(36)], 0.25) == ((4 / 36 + 5 / 36) / 2, (8 / 36 + 9 / 36) / 2)
    for places, share in (([0.1, 0.2, 0.3], 0.2), ([0.1, 0.2, 0.3], 0.9), ([0.5], 0.5)):
        with pytest.raises(UserError, match="need one each"):
            exact_bounds(places, share)


# --- configuration ---


def test_enumerations_are_written_by_name_in_any_case_or_by_value():
    kinds = open_generator("aiw", {}, seed=0, size=1).config.task_types
    for written in ("SIBLINGS", "siblings"):
        config = {"task_types": [written], "task_type_weights": [1.0]}
        assert open_generator("aiw", config, seed=0, size=1).config.task_types == [kinds[0]]


def test_nested_tables_become_what_a_generator_declares():
    mixed = open_generator("composite", NEEDS_CONFIG["composite"], seed=0, size=20)
    sources = {mixed[i]["metadata"]["source_dataset"] for i in range(20)}
    assert sources == {"aiw", "lcm"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("aiww", {}, r"data.name='aiww'.*Did you mean aiw\?"),
        ("aiw", {"config": {"task_type": []}}, r"config.task_type: is no option.*Did you mean task_types\?"),
        (
            "composite",
            {"config": {"datasets": [{"name": "aiw"}]}},
            "config.datasets: .*missing .*'weight' and 'config'",
        ),
        ("aiw", {"config": {"task_types": ["COUSINS"]}}, r"no TaskType.*SIBLINGS, FRIENDS, COLLEAGUES"),
        ("aiw", {"config": {"max_entities": 0}}, "max_entities must be positive"),
        ("aiw", {"config": {"size": 5}}, "set by the splits"),
        ("aiw", {"configs": {}}, r"data.options.configs is unknown \(did you mean config\?\)"),
        ("aiw", {"key": "pairs"}, "'question', 'numbers' or 'metadata"),
        ("aiw", {"key": "metadata.pair"}, r"is in no question's metadata. There are: .*metadata.task_type"),
        ("aiw", {"hold_out": 1.0}, "hold_out"),
    ],
)
def test_what_cannot_be_is_refused_by_name(name, options, message):
    with pytest.raises(UserError, match=message):
        opened(name, **options)


def test_a_recipe_says_it_all_in_toml(tmp_path):
    (tmp_path / "aiw.toml").write_text(
        'name = "aiw"\n[data]\nsource = "reasoning_gym"\nname = "aiw"\n[data.options]'
        + SIBLINGS
        + '[task]\nenvironment = "question"\nreward = "reasoning_gym"\n'
    )
    recipe = load_recipe(tmp_path / "aiw.toml")
    assert pairs(open_prompts(recipe.data, recipe.task, "test")) == pairs(siblings("test"))


# --- entries ---


def test_what_json_has_no_word_for_comes_back_as_it_was():
    value = {"grid": ((1, 2), (3, 4)), "cells": {(0, 1): "a", 7: [None, 1.5]}, "seen": {3, 1}, "text": "ü"}
    assert python_value(json.loads(json.dumps(json_value(value)))) == value


def reward_of(name, **task):
    options = {"config": NEEDS_CONFIG.get(name, {})}
    data = {"source": "reasoning_gym", "name": name, "options": options}
    task = {"environment": "question", "reward": "reasoning_gym", **task}
    return make_reward(Recipe.model_validate({"name": "test", "data": data, "task": task}))


@pytest.mark.slow
def test_every_generator_opens_by_name_and_its_scorer_takes_its_own_answers():
    from reasoning_gym.factory import DATASETS

    assert len(DATASETS) > 100
    without = set()
    for name in sorted(DATASETS):
        reward = reward_of(name)
        data = opened(name, config=NEEDS_CONFIG.get(name, {}))
        for prompt in (data[0], data[1]):
            assert json.loads(json.dumps(prompt.payload)) == prompt.payload, name
            known = reward.known_answer(prompt.payload)
            if known is None:
                without.add(name)
            else:
                score, components = reward.score(reward.extract(known), prompt.payload)
                assert score >= 0.99 and components["success"] == 1.0, (name, known)
    assert without == WITHOUT_ANSWER


@pytest.mark.parametrize("name", ["arc_agi", "rearc", "aiw", "countdown", "calendar_arithmetic"])
def test_an_entry_is_scored_as_it_was_before_it_was_a_row(name):
    generator = open_generator(name, {}, seed=3, size=3)
    for i in range(3):
        entry = generator[i]
        row = json.loads(json.dumps({name: json_value(value) for name, value in entry.items()}))
        assert generator.score_answer(entry["answer"], entry_of(row)) == 1.0


@pytest.mark.parametrize(
    ("answer", "reward", "success"),
    [
        ("{}", 1.0, 1.0),
        ("{}.", 1.0, 1.0),
        (" {}\n", 1.0, 1.0),
        ("it is {}", 1 / 7, 0.0),
        ("nine", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_answers_are_read_without_white_space_and_a_period_and_scored_by_the_generator(answer, reward, success):
    prompt = siblings()[0]
    scored = reward_of("aiw")
    given, components = scored.score(scored.extract(answer.format(prompt.payload["answer"])), prompt.payload)
    assert (given, components["success"]) == (pytest.approx(reward), success)


def test_a_scorer_that_raises_on_an_answer_gives_nothing_for_it():
    prompt = opened("prime_factorization")[0]
    assert reward_of("prime_factorization").score("⊥", prompt.payload) == (0.0, {"success": 0.0, "unreadable": 1.0})


def test_an_answer_that_its_scorer_would_compute_for_ever_is_late():
    prompt = opened("countdown")[0]
    reward = reward_of("countdown", reward_options={"seconds_limit": 0.5})
    assert reward.score("9**9**9**9", prompt.payload) == (0.0, {"success": 0.0, "late": 1.0})
    assert reward.score(prompt.payload["answer"], prompt.payload)[0] == 1.0
