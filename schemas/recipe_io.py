"""Recipes in and out: TOML that people write, overrides on the command line, JSON that a run keeps.

What is wrong with a recipe is said all at once, each problem under its dotted path. Types are taken as written: `"8"`
and `true` are no numbers, because a recipe that is read otherwise than it was meant costs a night.

Left out on purpose: including one recipe in another, and reading the environment.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from schemas.errors import DamagedDataError, UserError
from schemas.recipe import ConflictsError, Recipe

_MOST_SHOWN = 20  # problems that fit one screen


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a recipe: where, why, and what to do instead."""

    path: str
    reason: str
    way_out: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.reason} {self.way_out}".rstrip()


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in the TOML file `path`, with `section.key=value` overrides applied in order.

    A value is read as TOML, and as a plain string where it is none: `data.name=frozen_lake_maps`.

    Raises:
      UserError: the file is missing or no TOML, or the recipe has problems: all of them, with their paths.
    """
    data = _read_toml(Path(path))
    for override in overrides:
        _apply(data, override)
    return _checked(data, str(path))


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """`recipe` with `section.key=value` overrides applied in order, read as `load_recipe` reads them.

    Raises:
      UserError: an override is none, or the recipe has problems then: all of them, with their paths.
    """
    data = recipe.model_dump(mode="json")
    for override in overrides:
        _apply(data, override)
    return _checked(data, "the changed recipe")


def recipe_to_json(recipe: Recipe) -> bytes:
    """The resolved recipe as JSON, every default written out, in the recipe's own order."""
    return json.dumps(recipe.model_dump(mode="json"), indent=2).encode() + b"\n"


def recipe_from_json(data: bytes, name: str) -> Recipe:
    """The recipe that `recipe_to_json` wrote, of this release or an earlier one.

    Raises:
      DamagedDataError: naming `name`, if `data` is torn or does not fit this program's recipe.
    """
    try:
        value = json.loads(data)
    except ValueError as error:
        raise DamagedDataError(name, f"is not whole JSON ({error}).", "Restore the file from a copy.") from error
    if not isinstance(value, dict):
        raise DamagedDataError(name, "is not a JSON object.", "Restore the file from a copy.")
    value = _in_todays_words(value)
    problems = _problems(value)
    if problems:
        said = _error(name, problems)
        raise DamagedDataError(said.offender, said.reason, said.way_out)
    return _validated(value)


def _in_todays_words(data: dict[str, Any]) -> dict[str, Any]:
    """A stored recipe with the keys that have another name now. Recipes that people write must use the new ones."""
    algorithm = data.get("algorithm")
    if not isinstance(algorithm, dict) or not isinstance(algorithm.get("skip_equal_groups"), bool):
        return data
    kept = {key: value for key, value in algorithm.items() if key != "skip_equal_groups"}
    return data | {"algorithm": {"equal_groups": "skip" if algorithm["skip_equal_groups"] else "train"} | kept}


def differences(a: Recipe, b: Recipe) -> list[str]:
    """One line for each value that differs: `trainer.optimizer.learning_rate: 0.0003 -> 0.001`."""
    before, after = dict(_leaves(a.model_dump(mode="json"))), dict(_leaves(b.model_dump(mode="json")))
    paths = [*before, *(path for path in after if path not in before)]
    return [
        f"{path}: {_shown(before, path)} -> {_shown(after, path)}"
        for path in paths
        if _shown(before, path) != _shown(after, path)
    ]


def _shown(leaves: Mapping[str, Any], path: str) -> str:
    return json.dumps(leaves[path], sort_keys=True) if path in leaves else "(absent)"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for key, item in value.items():
        yield from _leaves(item, f"{path}.{key}" if path else key)


# Reading what people wrote ----------------------------------------------------------------------------------------


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError as error:
        raise UserError(str(path), "there is no such recipe.", _others(path)) from error
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}.", "Give the path of a TOML file.") from error
    except UnicodeDecodeError as error:
        raise UserError(str(path), f"is not UTF-8 text (byte {error.start}).", "Save it as UTF-8.") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(str(path), f"is not TOML: {error}.", "Mend that place.") from error


def _others(path: Path) -> str:
    recipes = sorted(other.name for other in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.with_suffix(".toml").name, recipes, n=1)
    if near:
        return f"Did you mean {path.parent / near[0]}?"
    return f"{path.parent} has {', '.join(recipes)}." if recipes else "Give the path of a TOML file."


def _apply(data: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UserError(override, "is not an override.", "Write section.key=value, such as trainer.steps=10.")
    section = data
    for depth, key in enumerate(keys[:-1], start=1):
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise UserError(override, f"{'.'.join(keys[:depth])} is a value, not a section.", "Override that value.")
    section[keys[-1]] = _value(text.strip())


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


# Finding what is wrong --------------------------------------------------------------------------------------------


def _validated(data: Mapping[str, Any]) -> Recipe:
    # Strict, and as JSON: Python's strict mode would refuse a TOML array where a tuple is meant.
    return Recipe.model_validate_json(json.dumps(data, default=str), strict=True)


def _checked(data: Mapping[str, Any], name: str) -> Recipe:
    problems = _problems(data)
    if problems:
        raise _error(name, problems)
    return _validated(data)


def _problems(data: Mapping[str, Any]) -> list[Problem]:
    """Everything that is wrong with `data`.

    pydantic checks a section's rules only once its values are right, and the recipe's rules only once all sections are.
    So what was complained about is taken out, for its default to take its place, and the rest is checked again. A rule
    that speaks of something taken out is passed over: it would speak of a default that nobody asked for.
    """
    rest = deepcopy(dict(data))
    problems = _dates(data)
    removed = [tuple(problem.path.split(".")) for problem in problems]
    for location in removed:
        _take_out(rest, location)
    while True:
        found = _complaints(rest)
        for item in found:
            said = _problems_of(item)
            problems += [p for p in said if not any(_mentions(p.reason, location) for location in removed)]
        locations = [_location(item["loc"]) for item in found]
        if not found or () in locations or set(locations) <= set(removed):
            return problems
        removed += locations
        for location in locations:
            _take_out(rest, location)


def _complaints(data: Mapping[str, Any]) -> Sequence[Any]:
    try:
        _validated(data)
    except ValidationError as error:
        return error.errors()
    return ()


def _dates(data: Mapping[str, Any]) -> list[Problem]:
    """TOML has dates and times, and JSON and recipes have none."""
    return [
        Problem(path, "is a date or time, and recipes have none.", f'Write it in quotes: "{value}".')
        for path, value in _leaves(data)
        if isinstance(value, date | time)
    ]


def _location(loc: tuple[Any, ...]) -> tuple[str, ...]:
    """The part of `loc` that can be taken out: a whole key of a section, not an element of its list."""
    keys: list[str] = []
    annotation: Any = Recipe
    for part in loc:
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        keys.append(str(part))
        field = annotation.model_fields.get(str(part))
        annotation = field.annotation if field else None
    return tuple(keys)


def _take_out(data: dict[str, Any], location: tuple[str, ...]) -> None:
    section: Any = data
    for key in location[:-1]:
        section = section.get(key, {})
    if location == ("name",):
        data["name"] = "unnamed"  # the one key without a default
    elif isinstance(section, dict):
        section.pop(location[-1], None)


def _mentions(reason: str, path: tuple[str, ...]) -> bool:
    return re.search(rf"\b{re.escape(path[-1])}\b", reason) is not None


def _problems_of(item: Any) -> list[Problem]:
    conflicts = item.get("ctx", {}).get("error")
    if isinstance(conflicts, ConflictsError):
        return [Problem("the recipe", reason) for reason in conflicts.reasons]
    return [_problem(item)]


def _problem(item: Any) -> Problem:
    path = ".".join(map(str, item["loc"])) or "the recipe"
    kind, given = item["type"], item["input"]
    if kind == "extra_forbidden":
        return Problem(path, "is no key of a recipe.", _nearest(tuple(map(str, item["loc"]))))
    if kind == "missing":
        return Problem(path, "is missing.", "Every recipe needs it.")
    if kind == "value_error":
        return Problem(path, str(item["ctx"]["error"]))
    if kind == "model_type":
        return Problem(path, f"is a section, and {_described(given)} was given.", f"Write its keys under [{path}].")
    if kind == "literal_error":
        return Problem(path, f"{_described(given)} is not one of {item['ctx']['expected']}.", _near_choice(item))
    way_out = f"Write it in quotes: {json.dumps(str(given))}." if kind == "string_type" else ""
    return Problem(path, f"{item['msg'].removeprefix('Input ')}, and {_described(given)} was given.", way_out)


def _described(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "table"}
    text = json.dumps(value, default=str)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kinds.get(type(value), 'null')})"


def _near_choice(item: Any) -> str:
    choices = re.findall(r"'([^']*)'", item["ctx"]["expected"])
    near = difflib.get_close_matches(str(item["input"]), choices, n=1)
    return f"Did you mean {near[0]!r}?" if near else ""


def _nearest(location: tuple[str, ...]) -> str:
    """The known key that was probably meant, by its dotted path.

    A key of the same name in another section comes first (it was put in the wrong place), then one spelled alike in the
    same section, then one spelled alike anywhere.
    """
    known = list(_known_paths(Recipe))
    path, (*section, leaf) = ".".join(location), location
    same_leaf = [other for other in known if other.split(".")[-1] == leaf]
    siblings = [other for other in known if other.split(".")[:-1] == section]
    near = _best(path, same_leaf) or _alike(leaf, siblings) or _alike(leaf, known)
    if near:
        return f"Did you mean {near}?"
    names = [other.split(".")[-1] for other in siblings]
    return f"Known there: {', '.join(names)}."


def _best(path: str, candidates: Sequence[str]) -> str | None:
    return max(candidates, key=lambda other: difflib.SequenceMatcher(None, path, other).ratio(), default=None)


def _alike(leaf: str, candidates: Sequence[str]) -> str | None:
    by_leaf: dict[str, str] = {}
    for other in candidates:
        by_leaf.setdefault(other.split(".")[-1], other)
    near = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)
    return by_leaf[near[0]] if near else None


def _known_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _known_paths(field.annotation, f"{prefix}{name}.")


def _error(name: str, problems: Sequence[Problem]) -> UserError:
    if len(problems) == 1:
        return UserError(f"{name}: {problems[0].path}", problems[0].reason, problems[0].way_out)
    lines = [f"\n  {problem}" for problem in problems[:_MOST_SHOWN]]
    if len(problems) > _MOST_SHOWN:
        lines.append(f"\n  and {len(problems) - _MOST_SHOWN} more")
    return UserError(name, f"has {len(problems)} problems:{''.join(lines)}", "")
