"""The rooms and their doors: which package may import which, and what importing them may do."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
ROOMS = ("schemas", "jax_core", "stages", "pipelines", "runners")  # each may import those before it
SCHEMAS_MAY_IMPORT = {"numpy", "obstore", "pyarrow", "pydantic"}
WHERE_IT_RUNS = {"FnApiRunner", "PipelineOptions", "DirectOptions", "StandardOptions", "SetupOptions"}


def modules_of(room: str) -> list[Path]:
    return sorted((REPOSITORY / room).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of whatever a module imports, wherever in it: for types only, in functions, by a string."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):  # a relative one cannot leave its room
                yield node.lineno, module
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield node.lineno, module


def imports_of(room: str) -> Iterator[tuple[str, str]]:
    """(file:line, package imported) of every import in a room."""
    for path in modules_of(room):
        for line, name in imports(path.read_text()):
            yield f"{path.relative_to(REPOSITORY)}:{line}", name.split(".")[0]


def test_an_import_is_found_wherever_it_stands() -> None:
    source = (
        "import stages.pack as p, jax\n"
        "if TYPE_CHECKING:\n    from runners.cli import app\n"
        "def late():\n    from pipelines import online\n    import_module('apache_beam')\n"
        "    importlib.import_module('stages.train')\n"
    )
    assert list(imports(source)) == [
        (1, "stages.pack"),
        (1, "jax"),
        (3, "runners.cli"),
        (5, "pipelines"),
        (6, "apache_beam"),
        (7, "stages.train"),
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room: str) -> None:
    behind = {*ROOMS[ROOMS.index(room) + 1 :], "tests", "benchmarks"}
    assert modules_of(room)
    assert [found for found in imports_of(room) if found[1] in behind] == []


def test_schemas_import_little_besides_the_standard_library() -> None:
    allowed = SCHEMAS_MAY_IMPORT | set(sys.stdlib_module_names) | {"schemas"}
    assert [found for found in imports_of("schemas") if found[1] not in allowed] == []


def test_jax_core_knows_no_beam() -> None:
    assert [found for found in imports_of("jax_core") if found[1] == "apache_beam"] == []


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "runners"])
def test_only_runners_name_a_runner_or_its_options(room: str) -> None:
    found = []
    for path in modules_of(room):
        for node in ast.walk(ast.parse(path.read_text())):
            named = {getattr(node, part, None) for part in ("id", "attr", "name")}
            found += [f"{path.relative_to(REPOSITORY)}: {name}" for name in named & WHERE_IT_RUNS]
    assert found == []


IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "importing the product started JAX's devices"
import jax
jax.numpy.zeros(1)
assert xla_bridge.backends_are_initialized(), "this check would not have noticed"
"""


def test_importing_every_module_starts_no_device_of_jax() -> None:
    names = [name_of(path) for room in ROOMS for path in modules_of(room)]
    assert {"runners.cli", "runners.colocated", "pipelines.online"} <= set(names)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
