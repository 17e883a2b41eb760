"""The question environment, and the simple rules that a policy has to beat on it."""

import json

import pytest

from schemas.errors import UserError
from schemas.recipe import Recipe
from schemas.records import Prompt
from stages.prompts.datasets import open_prompts
from stages.rollout.environments import ENVIRONMENTS
from stages.rollout.environments.question import make
from stages.rollout.environments.question_baselines import SHORTCUTS, best_shortcut, majority_answer

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7?"}]


def prompt_of(**payload):
    return Prompt("p", "question", payload)


# --- the environment ---


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        ({"question": "6 * 7?", "answer": "42"}, "6 * 7?"),
        ({"prompt": "6 * 7?"}, "6 * 7?"),
        ({"messages": MESSAGES, "prompt": "not this"}, MESSAGES),
    ],
)
def test_it_shows_what_the_row_asks(payload, shown):
    assert make({}).reset(prompt_of(**payload), 0) == shown


def test_a_template_is_laid_around_a_text_and_its_other_braces_mean_nothing():
    environment = make({"template": "Q: {question} {as json}\nA:"})
    assert environment.reset(prompt_of(prompt="{x} + 1?"), 0) == "Q: {x} + 1? {as json}\nA:"


def test_one_answer_of_any_kind_ends_it_and_is_left_with_the_row_in_the_facts():
    environment = make({})
    for answer in ("42", "", "half an emoji \ud83d"):
        environment.reset(prompt_of(question="6 * 7?", answer="42"), 0)
        transition = environment.step(answer)
        assert (transition.text, transition.reward, transition.terminated, transition.truncated) == (
            "",
            0.0,
            True,
            False,
        )
        assert transition.facts["answer"] == answer
        assert transition.facts["payload"] == {"question": "6 * 7?", "answer": "42"}
        with pytest.raises(RuntimeError, match="without an episode"):
            environment.step("again")
    environment.close()
    environment.close()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"map": "SF\nFG"}, "has no 'messages', 'question' or 'prompt'; it has map"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "42"}]}, "nothing to answer"),
    ],
)
def test_a_row_that_asks_nothing_is_refused(payload, message):
    with pytest.raises(UserError, match=message):
        make({}).reset(prompt_of(**payload), 0)


@pytest.mark.parametrize(
    ("options", "message"), [({"template": "hi"}, "has no {question}"), ({"temple": ""}, "template")]
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        make(options)


# --- rules to beat ---


@pytest.mark.parametrize(
    ("rule", "question", "answer"),
    [
        ("the first number", "Ann has 3 cats and 12 dogs.", "3"),
        ("the last number - 1", "Ann has 3 cats and 12 dogs.", "11"),
        ("the largest number + 1", "Ann has 3 cats and 12 dogs.", "13"),
        ("the first number x the second", "2.5 * 2 = ?", "5"),
        ("the first number - the second", "2 - 2.5 = ?", "-0.5"),
        ("the third number", "Ann has 3 cats and 12 dogs.", ""),
        ("how many numbers there are", "none", "0"),
    ],
)
def test_a_shortcut_looks_at_numbers_alone(rule, question, answer):
    assert SHORTCUTS[rule](question) == answer


def test_the_best_shortcut_is_the_one_that_is_right_most_often():
    pairs = [("1 and 5", "6"), ("2 and 3", "4"), ("4 and 4", "5"), ("1 and 9", "2")]
    assert best_shortcut(pairs) == "the second number + 1"
    assert best_shortcut([("who?", "Ann")]) is None


def test_of_equally_frequent_answers_the_first_is_the_majority():
    assert majority_answer(["b", "a", "c", "a", "b"]) == "a"


def recipe_of(data, reward, **options):
    task = {"environment": "question", "reward": reward, "reward_options": options}
    return Recipe.model_validate({"name": "test", "data": data, "task": task})


def results_of(recipe, split="test"):
    """Success of each scripted rule, by its label."""
    data = open_prompts(recipe.data, recipe.task, split)
    rules = ENVIRONMENTS["question"].scripted(recipe)
    return {rule.label: sum(rule.success(data[i]) for i in range(len(data))) / len(data) for rule in rules}


def test_rules_are_chosen_on_training_questions_and_judged_on_others(tmp_path):
    splits = {
        "train": [("1 and 5", "6"), ("2 and 5", "6"), ("3 and 3", "4"), ("9 and 1", "9")],
        "test": [("1 and 7", "8"), ("8 and 2", "8"), ("9 and 3", "6"), ("5 and 5", "6")],
    }
    for split, pairs in splits.items():
        rows = [json.dumps({"prompt": question, "answer": answer}) for question, answer in pairs]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    files = {split: [str(tmp_path / f"{split}.jsonl")] for split in splits}
    recipe = recipe_of({"source": "files", "name": "pairs", "options": {"files": files}}, "exact")
    assert results_of(recipe) == {
        "always '6', the commonest answer": 0.5,
        "the second number + 1, the best shortcut": 0.5,
    }


def test_on_siblings_a_shortcut_is_worth_more_than_half():
    pytest.importorskip("reasoning_gym")
    options = {
        "config": {"task_types": ["SIBLINGS"], "task_type_weights": [1.0]},
        "key": "numbers",
        "hold_out": 0.25,
        "held_out_repeats": True,
    }
    found = results_of(recipe_of({"source": "reasoning_gym", "name": "aiw", "options": options}, "reasoning_gym"))
    majority, shortcut = found.values()
    assert len(found) == 2 and any("number + 1, the best shortcut" in label for label in found)
    assert majority < 0.35 and 0.5 < shortcut < 0.75


def test_where_the_data_knows_no_answers_there_are_no_rules(tmp_path):
    (tmp_path / "open.jsonl").write_text("\n".join(json.dumps({"prompt": f"Say {i}."}) for i in range(40)))
    data = {"source": "files", "name": "open", "options": {"files": [str(tmp_path / "open.jsonl")]}}
    assert results_of(recipe_of(data, "regex", expression=r"\d+")) == {}
