"""Recipes: what is written is what is meant, and everything that is wrong is said at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from schemas.errors import DamagedDataError, UserError
from schemas.recipe import Recipe
from schemas.recipe_io import differences, load_recipe, recipe_from_json, recipe_to_json, with_overrides

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(text: str) -> Path:
        path = tmp_path / "lake.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


# What is written is what is meant ---------------------------------------------------------------------------------


def test_a_recipe_is_its_file_and_the_defaults(write: Write) -> None:
    recipe = load_recipe(write('name = "lake"\n[trainer]\nsteps = 3\n[trainer.optimizer]\nlearning_rate = 1\n'))
    assert (recipe.name, recipe.trainer.steps, recipe.trainer.optimizer.learning_rate) == ("lake", 3, 1.0)
    assert recipe.model == Recipe(name="x").model


def test_overrides_are_applied_in_order_over_the_file(write: Write) -> None:
    path = write('name = "lake"\n[trainer]\nsteps = 3\n')
    overrides = ["trainer.steps=5", "trainer.optimizer.learning_rate=1e-3", "trainer.steps = 6", "seed=7"]
    recipe = load_recipe(path, overrides)
    assert (recipe.trainer.steps, recipe.trainer.optimizer.learning_rate, recipe.seed) == (6, 1e-3, 7)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("word", "word"),
        ("train[:90%]", "train[:90%]"),
        ('"quoted"', "quoted"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_an_overriding_value_that_is_no_toml_is_a_string(write: Write, text: str, value: str) -> None:
    recipe = load_recipe(write('name = "lake"'), [f"data.train_split={text}"])
    assert recipe.data.train_split == value


def test_an_overriding_value_may_be_any_toml(write: Write) -> None:
    recipe = load_recipe(
        write('name = "lake"'),
        ['sampling.stop_strings=["a", "b"]', "model.tied_head=false", 'data.options={sizes = [3, 4], kind = "x"}'],
    )
    assert recipe.sampling.stop_strings == ("a", "b")
    assert recipe.model.tied_head is False
    assert recipe.data.options == {"sizes": [3, 4], "kind": "x"}


def test_an_override_may_reach_into_options(write: Write) -> None:
    recipe = load_recipe(write('name = "lake"\n[data.options]\nsizes = [3]\n'), ["data.options.seed=4"])
    assert recipe.data.options == {"sizes": [3], "seed": 4}


def test_a_recipe_comes_back_from_json_exactly(write: Write) -> None:
    recipe = load_recipe(write('name = "lake"\n[sampling]\nstop_strings = ["é"]\n[data.options]\nsizes = [3]\n'))
    assert recipe_from_json(recipe_to_json(recipe), "config.json") == recipe
    assert recipe_to_json(recipe) == recipe_to_json(recipe_from_json(recipe_to_json(recipe), "config.json"))


@pytest.mark.parametrize(("then", "now"), [("true", "skip"), ("false", "train")])
def test_a_stored_recipe_of_an_earlier_release_is_read_in_todays_words(then: str, now: str) -> None:
    stored = recipe_to_json(Recipe(name="lake"))
    earlier = stored.replace(b'"equal_groups": "skip"', b'"skip_equal_groups": ' + then.encode())
    assert earlier != stored
    read = recipe_from_json(earlier, "config.json")
    assert read == with_overrides(Recipe(name="lake"), [f"algorithm.equal_groups={now}"])


# What is wrong is said --------------------------------------------------------------------------------------------


def test_a_missing_file_is_refused_and_the_nearest_recipe_named(write: Write) -> None:
    path = write('name = "lake"')
    assert (
        refusal(path.with_name("lke.toml"))
        == f"{path.with_name('lke.toml')}: there is no such recipe. Did you mean {path}?"
    )
    assert "has lake.toml" in refusal(path.with_name("zzz.toml"))
    assert "there is no such recipe" in refusal(path.parent / "no" / "folder.toml")


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path)


def test_bad_toml_is_refused_with_its_line(write: Write) -> None:
    assert "line 3" in refusal(write('name = "lake"\n[trainer]\nsteps = = 3\n'))


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'name = "caf\xe9"')
    assert "is not UTF-8 text (byte 11)" in refusal(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[trainer]\nstepz = 3", "trainer.stepz: is no key of a recipe. Did you mean trainer.steps?"),
        ("[trainr]\nsteps = 3", "trainr: is no key of a recipe. Did you mean trainer?"),
        (
            "[trainer.optimizer]\nlerning_rate = 3",
            "trainer.optimizer.lerning_rate: is no key of a recipe. Did you mean trainer.optimizer.learning_rate?",
        ),
        ("[trainer]\nlearning_rate = 3", "Did you mean trainer.optimizer.learning_rate?"),
        (
            "[rollout]\ntemperature = 3",
            "rollout.temperature: is no key of a recipe. Did you mean sampling.temperature?",
        ),
        ("[warm_start]\nlearning_rate = 3", "Did you mean warm_start.optimizer.learning_rate?"),
        ("[model]\nqqqq = 3", "Known there: family, layers, width"),
    ],
)
def test_an_unknown_key_is_refused_and_the_one_that_was_meant_is_named_by_its_path(
    write: Write, text: str, said: str
) -> None:
    assert said in refusal(write(f'name = "lake"\n{text}\n'))


def test_an_unknown_key_in_an_override_is_refused_alike(write: Write) -> None:
    assert "Did you mean trainer.steps?" in refusal(write('name = "lake"'), "trainer.step=3")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ('trainer.steps="8"', 'trainer.steps: should be a valid integer, and "8" (string) was given.'),
        ("trainer.steps=true", "trainer.steps: should be a valid integer, and true (boolean) was given."),
        ("trainer.steps=1.5", "trainer.steps: should be a valid integer"),
        ("trainer.steps=0", "trainer.steps: should be greater than or equal to 1, and 0 (integer) was given."),
        ("model.tied_head=1", "model.tied_head: should be a valid boolean, and 1 (integer) was given."),
        ("data.name=3", 'data.name: should be a valid string, and 3 (integer) was given. Write it in quotes: "3".'),
        ("sampling.stop_strings=3", "sampling.stop_strings: should be a valid array"),
        ("sampling.stop_strings=[3]", "sampling.stop_strings.0: should be a valid string"),
        ("sampling.temperature=nan", "sampling.temperature: should be a finite number"),
        ("trainer=3", "trainer: is a section, and 3 (integer) was given. Write its keys under [trainer]."),
        ("algorithm.advantage=grop", "Did you mean 'grpo'?"),
        (
            "data.name=2024-01-01",
            'data.name: is a date or time, and recipes have none. Write it in quotes: "2024-01-01".',
        ),
        ("data.options.day=2024-01-01", "data.options.day: is a date or time"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_as_it_was_written(write: Write, override: str, said: str) -> None:
    assert said in refusal(write('name = "lake"'), override)


@pytest.mark.parametrize("override", ["steps", "=3", "trainer..steps=3", ".=1"])
def test_what_is_no_override_is_refused_with_an_example(write: Write, override: str) -> None:
    assert "Write section.key=value, such as trainer.steps=10." in refusal(write('name = "lake"'), override)


def test_an_override_cannot_reach_into_a_value(write: Write) -> None:
    assert "trainer.steps is a value, not a section" in refusal(
        write('name = "lake"\n[trainer]\nsteps = 3'), "trainer.steps.x=1"
    )


def test_a_recipe_without_a_name_is_told_so(write: Write) -> None:
    assert "name: is missing" in refusal(write("seed = 1"))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["sampling.top_k=5"], "the importance ratio no longer exists"),
        (["model.heads=3", "model.kv_heads=2"], "heads=3 is not a multiple of kv_heads=2"),
        (["trainer.row_tokens=32"], "the longest trajectory would fit no training row and be lost"),
        (["rollout.samples_per_prompt=1"], "a group of one has no baseline"),
        (["algorithm.equal_groups=count", "algorithm.entropy_bonus=0.1"], "would go without. Set equal_groups='train'"),
        (["algorithm.equal_groups=count", "model.router_balance=0.1"], "with model.router_balance=0.1"),
        (["rollout.elements_per_step=3"], "elements have one fixed shape"),
        (["tokenizer.alphabet=aab"], "more than once"),
        (["tokenizer.kind=checkpoint"], "there is no checkpoint to take it from"),
        (["chat.template=model"], "special tokens that only its own tokenizer knows"),
        (["chat.prefill=Answer:"], "chat.prefill with chat.template='none'"),
        (["chat.system=Be brief."], "chat.system with chat.template='none'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_with_the_reason(
    write: Write, overrides: list[str], reason: str
) -> None:
    said = refusal(write('name = "lake"'), *overrides)
    assert reason in said
    assert "Value error" not in said


def test_all_problems_are_said_at_once_each_under_its_path(write: Write) -> None:
    text = """
        name = "lake"
        foo = 1
        [trainer]
        stepz = 3
        row_tokens = 32
        micro_batch_rows = true
        [model]
        heads = 3
        kv_heads = 2
        [sampling]
        top_k = 3
        [algorithm]
        advantage = "grop"
    """
    lines = refusal(write(text)).splitlines()
    assert lines[0].endswith("lake.toml: has 7 problems:")
    assert sorted(line.strip().split(":")[0] for line in lines[1:]) == [
        "algorithm.advantage",
        "foo",
        "model",
        "sampling",
        "the recipe",
        "trainer.micro_batch_rows",
        "trainer.stepz",
    ]


CONFLICTS = ["trainer.row_tokens=8", "sampling.answer_tokens=200", "rollout.samples_per_prompt=1"]


def test_all_settings_that_do_not_go_together_are_said_at_once(write: Write) -> None:
    lines = refusal(write('name = "lake"'), *CONFLICTS).splitlines()
    assert lines[0].endswith("lake.toml: has 3 problems:")
    assert [line.split("=")[0].strip() for line in lines[1:]] == [
        "the recipe: trainer.row_tokens",
        "the recipe: sampling.answer_tokens",
        "the recipe: rollout.samples_per_prompt",
    ]


def test_settings_that_do_not_go_together_are_said_beside_one_that_is_wrong_in_kind(write: Write) -> None:
    """The conflict that speaks of the wrong one is passed over, and only that one."""
    said = refusal(write('name = "lake"'), *CONFLICTS[1:], 'trainer.row_tokens="8"')
    assert "has 3 problems" in said and "should be a valid integer" in said
    assert "would fit no training row" not in said
    assert "may not outgrow its episode" in said and "a group of one has no baseline" in said


def test_a_recipe_made_in_python_is_told_all_its_conflicts_too() -> None:
    with pytest.raises(ValidationError, match=r"(?s)would fit no training row.*may not outgrow its episode"):
        Recipe.model_validate({"name": "lake", "trainer": {"row_tokens": 8}, "sampling": {"answer_tokens": 200}})


def test_a_rule_is_not_said_to_be_broken_by_a_default_that_nobody_asked_for(write: Write) -> None:
    """row_tokens is wrong in kind; that its default would be too short for these branches is not the user's problem."""
    said = refusal(write('name = "lake"\n[trainer]\nrow_tokens = "512"\n[rollout]\nbranch_tokens = 512\n'))
    assert "should be a valid integer" in said
    assert "problems" not in said and "would fit no training row" not in said


def test_more_problems_than_fit_a_screen_are_counted(write: Write) -> None:
    lines = refusal(write('name = "lake"\n' + "".join(f"unknown_{index} = 1\n" for index in range(25)))).splitlines()
    assert "25 problems" in lines[0]
    assert len(lines) == 22 and lines[-1].strip() == "and 5 more"


def test_a_stored_recipe_that_is_torn_or_strange_is_refused_by_name() -> None:
    data = recipe_to_json(Recipe(name="lake"))
    for length in range(0, len(data) - 2, 101):
        with pytest.raises(DamagedDataError, match=r"^run/config\.json: "):
            recipe_from_json(data[:length], "run/config.json")
    for strange in (b"[]", b"\xff", data.replace(b'"steps"', b'"stepz"')):
        with pytest.raises(DamagedDataError, match=r"^run/config\.json: ?"):
            recipe_from_json(strange, "run/config.json")


# Overrides of a recipe that is there already ----------------------------------------------------------------------


def test_overrides_of_a_recipe_are_read_as_those_of_its_file(write: Write) -> None:
    path, overrides = write('name = "lake"\n[data.options]\nsizes = [3]\n'), ["trainer.steps=5", "data.options.seed=4"]
    assert with_overrides(load_recipe(path), overrides) == load_recipe(path, overrides)


def test_a_recipe_with_overrides_leaves_the_first_one_as_it_was(write: Write) -> None:
    recipe = load_recipe(write('name = "lake"\n[data.options]\nsizes = [3]\n'))
    with_overrides(recipe, ["data.options.sizes=[4]"])
    assert recipe.data.options == {"sizes": [3]}
    assert with_overrides(recipe, []) == recipe


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.step=3"], "the changed recipe: trainer.step: is no key of a recipe. Did you mean trainer.steps?"),
        (["seed"], "seed: is not an override."),
        (["seed.x=1"], "seed is a value, not a section"),
        (CONFLICTS, "the changed recipe: has 3 problems"),
    ],
)
def test_overrides_that_a_recipe_cannot_take_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        with_overrides(Recipe(name="lake"), overrides)
    assert said in str(caught.value) and not isinstance(caught.value, DamagedDataError)


# Differences ------------------------------------------------------------------------------------------------------


def test_equal_recipes_do_not_differ() -> None:
    assert differences(Recipe(name="lake"), Recipe(name="lake")) == []


def test_differences_are_said_by_path_with_before_and_after(write: Write) -> None:
    path = write('name = "lake"\n[data.options]\nold = 1\n')
    before = load_recipe(path)
    after = load_recipe(
        path,
        [
            "trainer.optimizer.learning_rate=1e-3",
            "data.name=other",
            "data.options={new = [1]}",
            "model.tied_head=false",
        ],
    )
    assert differences(before, after) == [
        "model.tied_head: true -> false",
        'data.name: "frozen_lake_maps" -> "other"',
        "data.options.old: 1 -> (absent)",
        "trainer.optimizer.learning_rate: 0.0003 -> 0.001",
        "data.options.new: (absent) -> [1]",
    ]
