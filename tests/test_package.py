"""What a reader or a fresh machine meets first: docstrings, recipes, the README's commands, what is installed."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from schemas.recipe_io import load_recipe

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("schemas", "jax_core", "stages", "pipelines", "runners", "benchmarks")
RECIPES = sorted((REPOSITORY / "recipes").glob("*.toml"))
PINNED = re.compile(r"""[a-z0-9-]+==[0-9][\w.]*(; python_version (<|>=) "3\.\d+")?""")
TARGET = re.compile(r"^([a-z][a-z0-9-]*):", re.MULTILINE)

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def tracked() -> list[Path]:
    """Files that are, or with the next commit would be, in the repository."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split("\0")
    return [path for path in (REPOSITORY / name for name in listed if name) if path.is_file()]


def make_targets() -> set[str]:
    return set(TARGET.findall((REPOSITORY / "Makefile").read_text()))


def test_every_module_says_what_it_is() -> None:
    modules = [path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py")]
    trees = {path: ast.parse(path.read_text()) for path in modules}
    silent = [path for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)]
    assert len(modules) > len(PACKAGES)
    assert silent == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_and_is_named_like_its_file(path: Path) -> None:
    assert load_recipe(path).name == path.stem


def test_the_recipe_that_make_runs_is_there() -> None:
    (named,) = re.findall(r"^RECIPE := (.+)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert REPOSITORY / named in RECIPES


def test_the_readmes_make_commands_are_the_makefiles() -> None:
    readme = REPOSITORY / "README.md"
    if not readme.exists():
        pytest.skip("there is no README.md")
    said = set(re.findall(r"^(?:\$ )?make ([a-z][a-z0-9-]*)", readme.read_text(), re.MULTILINE))
    assert {"run", "test"} <= said
    assert said <= make_targets()


@needs_make
def test_make_alone_lists_every_target() -> None:
    printed = subprocess.run(["make"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  ([a-z0-9-]+) ", printed, re.MULTILINE)) == make_targets()


@needs_make
def test_a_machine_without_a_python_that_fits_is_told_what_is_needed(tmp_path: Path) -> None:
    command = ["make", "run", f"VENV={tmp_path / 'venv'}", "PYTHON=false"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Python 3.11, 3.12 or 3.13 is needed" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_constraints_are_names_and_versions_alone() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if not PINNED.fullmatch(line)] == []
    assert pins == sorted(pins, key=lambda line: (line.split("==")[0], line.partition("; ")[2]))


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = [extra for name, extra in project["optional-dependencies"].items() if name != "gcp"]
    wanted = [one for one in sum(extras, project["dependencies"]) if not one.startswith(project["name"])]
    pins = {line.split("==")[0] for line in (REPOSITORY / "constraints.txt").read_text().splitlines()}
    assert {re.split(r"[\[<>=!~; ]", one)[0].lower() for one in wanted} - pins == set()


# Places that exist on one machine only, and options that name where packages come from: neither belongs here.
FOREIGN = re.compile(rb"(?<![\w.}-])/(?:home|root|Users|work|tmp/w)/\w|(?:index|find)[-_](?:url|links)\b")


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}: {match.group().decode()}"
        for path in tracked()
        for match in FOREIGN.finditer(path.read_bytes())
    ]
    assert found == []


# In two parts, or the check would find them in this file.
WRITTEN = [("see /home", "/a/b"), ('"/work', '/main"'), ("pip --index-", "url x"), ("find_", "links")]


@pytest.mark.parametrize("parts", WRITTEN)
def test_what_belongs_to_one_machine_is_recognised(parts: tuple[str, str]) -> None:
    assert FOREIGN.search("".join(parts).encode())
    assert not any(FOREIGN.search(part.encode()) for part in parts)
