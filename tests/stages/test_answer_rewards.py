"""Rewards of answers: what is right, how it is found in what a policy wrote, and which rewards a run refuses."""

import dataclasses
import json
import threading
import time
from functools import partial

import numpy as np
import pytest

from schemas.errors import UserError
from schemas.recipe import Recipe
from schemas.records import Prompt
from stages.limits import call_all
from stages.reward.kinds import REWARDS, make_reward
from stages.reward.reward import score_batch
from stages.reward.self_test import check_reward, check_task
from stages.rollout.environments import question
from stages.rollout.episodes import run_episodes
from tests.stages.rollout_fakes import AMPLE, DIALOGUE, TOKENIZER, FakeEngine, make_batch, make_recipe, token_seed

USER = "tests.stages.rewards_of_a_user"
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}

# One working set of options for each reward of answers: its options, a row, right answers, wrong answers.
EXAMPLES = {
    "exact": ({}, {"answer": "New York"}, ["New York", " New  York.\n"], ["new york", "York", "New York City", "."]),
    "regex": ({"expression": "[0-4]+"}, {}, ["3", "012"], ["5", "3 4", "x3"]),
    "json_schema": (
        {"json_schema": PERSON},
        {"answer": '{"age": 3}'},
        ['{"age": 4}', ' {"age":0}'],
        ["{}", '{"age": "3"}', "age", "[" * 100_000],
    ),
    "math": ({}, {"answer": "1/2"}, ["0.5", "\\frac{1}{2}", "$\\frac12$", "the answer is $2/4$"], ["2", "1/3", "half"]),
    "python": ({"function": f"{USER}:double"}, {"prompt": "4 + 4 = ?", "answer": "8"}, ["8"], ["9", "eight"]),
    "reasoning_gym": (
        {},
        {"question": "?", "answer": "3", "metadata": {"source_dataset": "aiw"}},
        ["3", "3.", " 3 "],
        ["4", "33", "three"],
    ),
}


def recipe_of(reward, options=None, **sections):
    source = {"source": "reasoning_gym", "name": "aiw"} if reward == "reasoning_gym" else {}
    task = {"environment": "question", "reward": reward, "reward_options": options or {}}
    return Recipe.model_validate({"name": "test", "data": source, "task": task} | sections)


def reward_of(reward, **options):
    return make_reward(recipe_of(reward, options))


# --- every reward of answers ---


def test_there_is_an_example_of_every_reward_of_answers():
    assert set(EXAMPLES) == set(REWARDS) - {"environment_return"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_right_answers_have_1_and_wrong_ones_less_and_none_0(name):
    options, row, right, wrong = EXAMPLES[name]
    reward = reward_of(name, **options)
    for text in right:
        score, components = reward.score(reward.extract(text), row)
        assert (score, components["success"]) == (1.0, 1.0), text
    for text in wrong:
        score, components = reward.score(reward.extract(text), row)
        assert score < 0.99 and components["success"] == 0.0, text[:20]
    for nothing in ("", " \n\t"):
        assert reward.score(reward.extract(nothing), row) == (0.0, {"success": 0.0})


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_self_test_passes_an_example(name):
    options, row, _, _ = EXAMPLES[name]
    check_reward(name, reward_of(name, **options), [Prompt("p", "question", {"prompt": "?", **row})])


@pytest.mark.parametrize("name", EXAMPLES)
def test_unknown_options_are_refused_by_name(name):
    options = EXAMPLES[name][0]
    with pytest.raises(UserError, match=r"task.reward_options.require_stopp is unknown \(did you mean require_stop"):
        reward_of(name, **options, require_stopp=False)


@pytest.mark.parametrize("name", EXAMPLES)
def test_text_that_no_encoding_can_hold_is_a_wrong_answer_and_no_failure(name):
    options, row, _, _ = EXAMPLES[name]
    assert reward_of(name, **options).score("half an emoji \ud83d", row)[1]["success"] == 0.0


# --- finding the answer ---


@pytest.mark.parametrize(
    ("options", "text", "answer"),
    [
        ({}, "  7\n", "7"),
        ({"tag": "answer"}, "<think>6</think><answer> 7 </answer>", "7"),
        ({"tag": "answer"}, "<answer>6</answer> no, <answer>7</answer> <answer>", "7"),
        ({"tag": "answer"}, "7", ""),
        ({"tag": "answer"}, "<answer>7", ""),
        ({"tag": "answer"}, "7</answer>", ""),
        ({"pattern": r"####\s*(\S+)"}, "6 #### 6\n#### 7", "7"),
        ({"pattern": r"\d+"}, "6 and 7", "7"),
        ({"pattern": r"\d+"}, "none", ""),
        ({"pattern": r"(a+)+b$"}, "a" * 60, ""),  # would take years
    ],
)
def test_the_answer_is_found_as_the_options_say(options, text, answer):
    assert reward_of("exact", **options).extract(text) == answer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tag": "a", "pattern": "b"}, "two ways"),
        ({"pattern": "("}, "is no regular expression"),
    ],
)
def test_options_that_cannot_find_an_answer_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        reward_of("exact", **options)


# --- a whole episode ---


def asked(*answers, stop_strings=(), **options):
    """The scored samples of one question, one for each of `answers`, in which $ is a sampled <eos>."""
    recipe = make_recipe(samples_per_prompt=len(answers), answer_tokens=2)
    task = recipe.task.model_copy(update={"environment": "question", "reward": "exact", "reward_options": options})
    sampling = recipe.sampling.model_copy(update={"stop_strings": stop_strings})
    recipe = recipe.model_copy(update={"task": task, "sampling": sampling})
    batch = make_batch("ABC")
    batch = dataclasses.replace(batch, prompts=(Prompt("p", "question", {"prompt": "ABC", "answer": "g"}),))
    engine = FakeEngine(script={token_seed(10, i): [answer] for i, answer in enumerate(answers)})
    rollouts = run_episodes(engine, None, partial(question.make, {}), DIALOGUE, batch, recipe=recipe)
    return score_batch(rollouts, make_reward(recipe), AMPLE).rollouts


def test_an_episode_is_one_question_one_answer_and_a_reward():
    right, wrong = asked("g$", "h$")
    assert right.rollout.tokens.tolist() == [*TOKENIZER.encode("ABCg").tolist(), TOKENIZER.eos_id]
    assert right.rollout.loss_mask.tolist() == [False] * 3 + [True] * 2
    assert (right.rollout.stop_reason, right.rollout.environment["answer"]) == ("terminated", "g")
    assert (right.reward, right.components) == (1.0, {"success": 1.0, "answered": 1.0, "stopped": 1.0})
    assert (wrong.reward, wrong.components) == (0.0, {"success": 0.0, "answered": 1.0, "stopped": 1.0})


def test_an_answer_that_ran_out_of_tokens_has_nothing_unless_that_is_allowed():
    assert [s.reward for s in asked("g", "g$")] == [0.0, 1.0]
    assert asked("g", "g$")[0].components == {"success": 0.0, "answered": 0.0, "stopped": 0.0}
    assert [s.reward for s in asked("g", "g$", require_stop=False)] == [1.0, 1.0]


def test_a_stop_string_is_an_end_too():
    assert [s.reward for s in asked("gh", "ga", stop_strings=("h",), pattern="(.).")] == [1.0, 0.0]


# --- one by one ---


def test_exact_takes_any_of_several_answers_and_numbers():
    reward = reward_of("exact", answer_key="ok", ignore_case=True)
    assert [reward.score(text, {"ok": ["A", "b"]})[0] for text in ("a", "B.", "c")] == [1.0, 1.0, 0.0]
    assert reward.score("12", {"ok": 12})[0] == 1.0


def test_a_regular_expression_may_be_the_rows_own_and_may_match_some_place():
    reward = reward_of("regex", expression_key="like", where="first")
    assert [reward.score("it is 42 m", {"like": like})[0] for like in (r"\d\d m", r"^42")] == [1.0, 0.0]


def test_an_expression_that_takes_years_is_late_and_stops_nobody_else():
    reward = reward_of("regex", expression="(a+)+b")
    outcomes = call_all([partial(reward.score, text, {}) for text in ("a" * 60, "ab", "aab")], AMPLE)
    assert [outcome.result for outcome in outcomes] == [
        (0.0, {"success": 0.0, "late": 1.0}),
        (1.0, {"success": 1.0}),
        (1.0, {"success": 1.0}),
    ]


def test_a_schema_may_be_in_a_file_or_the_rows_own_and_json_that_does_not_fit_is_told_apart(tmp_path):
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    from_file = reward_of("json_schema", schema_file=str(tmp_path / "person.json"))
    from_row = reward_of("json_schema", schema_key="schema")
    for reward in (from_file, from_row):
        row = {"schema": PERSON}
        assert reward.score('{"age": 3}', row) == (1.0, {"success": 1.0, "json": 1.0})
        assert reward.score('{"age": 3.5}', row) == (0.0, {"success": 0.0, "json": 1.0})
        assert reward.score('{"age": ', row) == (0.0, {"success": 0.0, "json": 0.0})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set one of json_schema, schema_file and schema_key"),
        ({"json_schema": {"type": "integr"}}, "holds no JSON schema"),
        ({"schema_file": "/nowhere.json"}, "holds no JSON"),
    ],
)
def test_a_schema_that_is_none_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        reward_of("json_schema", **options)


def test_mathematics_is_compared_by_value():
    reward = reward_of("math")
    same = ["2x + x = 3x", r"$\sqrt{8}$ = 2\sqrt{2}", r"\boxed{42} = 42", "1,000 = 1000", "(1,2) = (1, 2)", "50% = 1/2"]
    other = ["3 = 3x", "3x+7 = 7", "1/3 = 1/2", "-3 = 3", "x = 4"]
    for pair in same + other:
        answer, known = pair.split(" = ")
        assert reward.score(answer, {"answer": known})[0] == float(pair in same), pair


def test_mathematics_that_takes_for_ever_is_late_in_any_thread_beside_other_answers():
    reward = reward_of("math", seconds_limit=1.0)
    outcomes = []
    calls = [partial(reward.score, answer, {"answer": "4"}) for answer in ("$9^{9^{9^{9^9}}}!$", "2+2", "$2^2$", "5")]
    thread = threading.Thread(target=lambda: outcomes.extend(call_all(calls, AMPLE)))
    started = time.monotonic()
    thread.start()
    thread.join()
    assert time.monotonic() - started < 30
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert [outcome.result[0] for outcome in outcomes] == [0.0, 1.0, 1.0, 0.0]


def test_a_limit_that_would_fail_samples_instead_of_answers_is_refused():
    for name in ("math", "reasoning_gym"):
        with pytest.raises(UserError, match=r"seconds_limit=20 is not below|seconds_limit=20: is not below"):
            reward_of(name, seconds_limit=20.0)


def test_a_function_may_be_in_a_file_and_may_return_components(tmp_path):
    (tmp_path / "mine.py").write_text("def short(answer, row):\n    return 1 / len(answer)\n")
    row = {"answer": "abc"}
    assert reward_of("python", function=f"{tmp_path}/mine.py:short").score("abcd", row) == (0.25, {"success": 0.0})
    parts = reward_of("python", function=f"{USER}:with_parts")
    assert parts.score("abc", row) == (0.3, {"length": 3.0, "success": 1.0})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("length", "names no function"),
        ("no_such_module:length", "cannot be loaded .ModuleNotFoundError"),
        (f"{USER}:length", "cannot be loaded .AttributeError"),
        ("nowhere/mine.py:length", "cannot be loaded .FileNotFoundError"),
        (f"{USER}:takes_one", "cannot be called .too many positional"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_a_run(function, message):
    with pytest.raises(UserError, match=message):
        reward_of("python", function=function)


# --- before a run ---

SUMS = [Prompt(f"sum {i}", "question", {"prompt": f"{i} + {i} = ?", "answer": str(2 * i)}) for i in range(1, 6)]


@pytest.mark.parametrize(
    ("reward", "options", "message"),
    [
        ("python", {"function": f"{USER}:never_checks"}, r"'⊥ no answer ⊥' to prompt sum 1 it says right, although"),
        ("python", {"function": f"{USER}:any_number"}, "another prompt's answer is"),
        ("python", {"function": f"{USER}:never_right"}, "for the answer '2' to prompt sum 1 it says wrong"),
        ("python", {"function": f"{USER}:raises"}, r"raises KeyError \('level'\)"),
        ("regex", {"expression": "[a-z]+"}, "says wrong, although the data says it is right"),
        ("regex", {"expression": ".*"}, "says right, although it is no answer"),
        ("json_schema", {"json_schema": {"type": "string"}}, "says wrong"),
    ],
)
def test_a_reward_that_cannot_tell_right_from_wrong_is_refused_with_what_shows_it(reward, options, message):
    with pytest.raises(UserError, match=message):
        check_reward(reward, reward_of(reward, **options), SUMS)


@pytest.mark.parametrize("function", ["double", "with_parts"])
def test_a_reward_that_can_is_not(function):
    check_reward("python", reward_of("python", function=f"{USER}:{function}"), SUMS)


def test_a_row_without_an_answer_is_tried_on_nonsense_alone():
    check_reward("regex", reward_of("regex", expression=r"\d+"), [Prompt("p", "question", {"prompt": "A number?"})])


def write_sums(path, answer="answer"):
    rows = [{"prompt": f"{i} + {i} = ?", answer: str(2 * i)} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": "files", "name": "sums", "options": {"files": [str(path)]}}


def test_a_task_is_tried_on_its_own_training_prompts(tmp_path):
    good = recipe_of("exact", data=write_sums(tmp_path / "sums.jsonl"))
    check_task(good)
    bad = recipe_of("python", {"function": f"{USER}:never_checks"}, data=good.data.model_dump())
    with pytest.raises(UserError, match="says right, although it is no answer"):
        check_task(bad)
    check_task(
        recipe_of("python", {"function": f"{USER}:never_checks", "self_test": False}, data=good.data.model_dump())
    )


@pytest.mark.parametrize("reward", ["exact", "math"])
def test_a_comparison_without_anything_to_compare_with_is_refused(tmp_path, reward):
    recipe = recipe_of(reward, data=write_sums(tmp_path / "sums.jsonl", answer="solution"))
    with pytest.raises(UserError, match=r"no known answer under 'answer'.*answer_key"):
        check_task(recipe)
    check_task(recipe_of(reward, {"answer_key": "solution"}, data=recipe.data.model_dump()))


def test_a_split_that_is_missing_is_named_before_and_not_after_the_training(tmp_path):
    data = write_sums(tmp_path / "sums.jsonl")
    files = {"train": data["options"]["files"], "validation": [str(tmp_path / "other.jsonl")]}
    (tmp_path / "other.jsonl").write_text('{"prompt": "other", "answer": "1"}')
    with pytest.raises(UserError, match=r"has no split 'test'. +It has train, validation"):
        check_task(recipe_of("exact", data=data | {"options": {"files": files}}))


def test_a_generator_whose_scorer_takes_anything_is_refused():
    recipe = recipe_of("reasoning_gym", data={"source": "reasoning_gym", "name": "game_of_life_halting"})
    with pytest.raises(UserError, match="says right, although it is no answer"):
        check_task(recipe)


def test_a_task_that_its_environment_rewards_needs_no_test():
    check_task(Recipe(name="test"))
    assert np.isfinite(make_reward(Recipe(name="test"))(asked("g$", "g$")[0].rollout)[0])
