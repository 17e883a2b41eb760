"""The Dockerfiles, as far as they can be checked without Docker: what they copy, install, and are built upon."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
WORKER, TRAINER = "worker.Dockerfile", "trainer.Dockerfile"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
CONSTRAINTS = (REPOSITORY / "constraints.txt").read_text()


@dataclass(frozen=True)
class Instruction:
    keyword: str
    rest: str


def instructions(name: str) -> list[Instruction]:
    """Those of a Dockerfile in order; lines that a backslash joins are one."""
    lines = (REPOSITORY / "docker" / name).read_text().replace("\\\n", " ").splitlines()
    split = [line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#")]
    return [Instruction(keyword, rest) for keyword, rest in split]


def all_of(name: str, keyword: str) -> list[str]:
    return [one.rest for one in instructions(name) if one.keyword == keyword]


def default_of(name: str, argument: str) -> str:
    return dict(rest.split("=", 1) for rest in all_of(name, "ARG"))[argument]


files = pytest.mark.parametrize("name", [WORKER, TRAINER])


def test_every_dockerfile_is_checked() -> None:
    assert {path.name for path in (REPOSITORY / "docker").iterdir()} == {WORKER, TRAINER}


@files
def test_what_is_copied_is_there_and_every_package_of_the_product_is_copied(name: str) -> None:
    copied = [source for rest in all_of(name, "COPY") for source in rest.split()[:-1]]
    assert [source for source in copied if not (REPOSITORY / source).exists()] == []
    packages = {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {"pyproject.toml", "constraints.txt"} <= set(copied)


@files
def test_every_argument_is_used_after_it_is_declared(name: str) -> None:
    given = instructions(name)
    declared = [(place, one.rest.split("=")[0]) for place, one in enumerate(given) if one.keyword == "ARG"]
    assert {argument for _, argument in declared} == {"JAX", "EXTRAS"}
    for place, argument in declared:
        assert any(f"${{{argument}}}" in one.rest for one in given[place + 1 :]), argument


def test_workers_have_the_beam_that_the_product_is_tested_with() -> None:
    (base,) = all_of(WORKER, "FROM")
    image = re.fullmatch(r"apache/beam_python(3\.\d+)_sdk:([\d.]+)", base)
    assert image is not None, base
    assert f"\napache-beam=={image[2]}\n" in CONSTRAINTS


def test_both_images_have_one_python_which_is_one_of_the_products() -> None:
    (worker,), (trainer,) = all_of(WORKER, "FROM"), all_of(TRAINER, "FROM")
    (version,) = re.findall(r"python(3\.\d+)", worker)
    assert trainer == f"python:{version}-slim"
    bounds = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["project"]["requires-python"])
    assert bounds is not None
    assert int(bounds[1]) <= int(version.split(".")[1]) < int(bounds[2])


@files
def test_packages_are_installed_in_the_versions_that_are_tested(name: str) -> None:
    installs = [rest for rest in all_of(name, "RUN") if "pip install" in rest]
    assert installs and all("--constraint /opt/rollstream/constraints.txt" in rest for rest in installs)
    assert set(default_of(name, "EXTRAS").split(",")) <= set(PROJECT["project"]["optional-dependencies"])


@files
def test_the_kinds_of_jax_that_are_offered_exist(name: str) -> None:
    assert default_of(name, "JAX") == "jax"
    offered = set(re.findall(r"jax\[(\w+)\]", (REPOSITORY / "docker" / name).read_text()))
    assert offered == {"cuda12", "tpu"}
    assert offered <= set(importlib.metadata.metadata("jax").get_all("Provides-Extra") or ())


def test_a_worker_is_started_by_beam_and_a_trainer_by_the_command() -> None:
    assert all_of(WORKER, "ENTRYPOINT") == all_of(WORKER, "CMD") == []
    (entry,) = all_of(TRAINER, "ENTRYPOINT")
    assert entry == f'["{next(iter(PROJECT["project"]["scripts"]))}"]'
