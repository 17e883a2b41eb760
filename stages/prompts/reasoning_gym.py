"""Prompts from reasoning-gym: any of its generators by name, split so that nothing held out is ever trained on.

Each question has a *key*: itself, its numbers, or something of its metadata. A key belongs to one split, by its hash:

    place(key) in [0, 1)     test | validation | train ...          the first `hold_out` of keys are held out

So however much is drawn, no key is in two splits. Training questions are drawn as they come, repeats included, and
those with a held-out key are drawn again; a held-out split has each question once, unless it is asked to be drawn
likewise. Draw n of a split is a function of seed, split and n alone, so training questions are made when they are asked
for, and processes need not agree first.

Left out: curricula, and judges that need a model.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import enum
import functools
import hashlib
import importlib.util
import json
import re
import threading
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import Field, field_validator

from schemas.errors import UserError
from schemas.identity import seed_int
from schemas.recipe import DataSection, Section
from stages.options import checked_options
from stages.prompts.rows import RowSource, all_rows

SPLITS = ("train", "validation", "test")
# Where an entry has no "answer", because many are right, some generators keep one of them under these names.
KNOWN_ANSWERS = ("possible_answer", "example_answer", "example_correct_answer")
CHUNK = 1000  # draws of one generator; some make all of theirs when they are opened
KEY_DRAWS = 4000  # draws that tell which keys there are
DRAWS_PER_QUESTION = 200  # a split gives up after so many draws for one more question
GENERATORS_KEPT = 32


class ReasoningGymOptions(Section):
    """Options of the data source (`data.options`)."""

    config: dict[str, Any] = Field(
        default_factory=dict, description="the generator's own configuration; enumerations by name"
    )
    seed: Annotated[int, Field(ge=0)] = Field(0, description="which questions are drawn")
    train_size: Annotated[int, Field(ge=1)] = Field(20_000, description="questions of an epoch, repeats included")
    validation_size: Annotated[int, Field(ge=1)] = Field(100, description="questions, if so many turn up")
    test_size: Annotated[int, Field(ge=1)] = Field(300, description="questions, if so many turn up")
    held_out_repeats: bool = Field(
        False,
        description="held-out questions, too, come as they are drawn: each kind has its share; else each is there once",
    )
    hold_out: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.2, description="share of distinct keys that are never trained on; half of them are for test"
    )
    key: str = Field(
        "question", description='what is held out: "question", "numbers" (of the question) or "metadata.<name>"'
    )

    @field_validator("config")
    @classmethod
    def _not_ours(cls, config: dict[str, Any]) -> dict[str, Any]:
        if ours := {"seed", "size"} & set(config):
            raise ValueError(f"{sorted(ours)} are set by the splits; use options.seed and options.train_size")
        return config

    @field_validator("key")
    @classmethod
    def _a_key(cls, key: str) -> str:
        if key not in ("question", "numbers") and not key.startswith("metadata."):
            raise ValueError(f"{key!r} is not 'question', 'numbers' or 'metadata.<name>'")
        return key


def open_reasoning_gym(data: DataSection, split: str) -> RowSource:
    """The questions of `split`: rows of "question", "answer", "metadata" (JSON values) and "prompt_id".

    Raises:
      UserError: no such generator, configuration, option or split; or the generator has too few questions to hold any
        out.
    """
    options = checked_options(ReasoningGymOptions, data.options, "data.options")
    if split not in SPLITS:
        raise UserError(f"data set {data.name}", f"it has no split {split!r}.", f"Its splits: {', '.join(SPLITS)}.")
    return _opened(data.name, options.model_dump_json(), split)


@functools.lru_cache(maxsize=16)
def _opened(name: str, options_json: str, split: str) -> RowSource:
    options = ReasoningGymOptions.model_validate_json(options_json)
    draws = Draws(name, options)
    # Metadata may differ between two questions of the same text; then the text alone decides, for test first.
    others = SPLITS[SPLITS.index(split) + 1 :] if options.key.startswith("metadata.") else ()
    taken = frozenset(row["question"] for other in others for row in all_rows(_opened(name, options_json, other)))
    if split == "train":
        return _TrainingQuestions(draws, taken)
    return tuple(held_out_questions(draws, split, taken))


@dataclass(frozen=True, eq=False)
class Draws:
    """Questions of a generator by number, and the split that each belongs to. Safe from several threads."""

    name: str
    options: ReasoningGymOptions
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _generators: dict[tuple[str, int], Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.entry("train", 0)  # says at once what is wrong with name and configuration

    def entry(self, stream: str, number: int) -> dict[str, Any]:
        """Draw `number` of `stream`, as a row."""
        chunk, place = divmod(number, CHUNK)
        with self._lock:  # generators promise nothing about threads
            if (stream, chunk) not in self._generators:
                if len(self._generators) >= GENERATORS_KEPT:
                    self._generators.pop(next(iter(self._generators)))
                self._generators[stream, chunk] = self._generator(stream, chunk)
            return row_of(self.name, self._generators[stream, chunk][place])

    def _generator(self, stream: str, chunk: int) -> Any:
        seed = seed_int("reasoning_gym", self.name, self.options.seed, stream, chunk) % 2**31
        return open_generator(self.name, self.options.config, seed=seed, size=CHUNK)

    def home_split(self, row: Mapping[str, Any]) -> str:
        """The one split that a question belongs to, by its key."""
        place = key_place(key_of(row, self.options.key))
        test, held_out = self.bounds
        return "test" if place < test else "validation" if place < held_out else "train"

    @functools.cached_property
    def bounds(self) -> tuple[float, float]:
        """Places below the first belong to test, those below the second to a held-out split."""
        if self.options.key == "question":
            return self.options.hold_out / 2, self.options.hold_out
        # By counting, because keys may be few: 0.25 of 36 number pairs are exactly 9.
        keys = {key_of(self.entry("keys", number), self.options.key) for number in range(KEY_DRAWS)}
        return exact_bounds([key_place(key) for key in keys], self.options.hold_out)


def exact_bounds(places: Sequence[float], share: float) -> tuple[float, float]:
    """Bounds below which lie half (rounded up) and all of `share` of the places.

    Raises:
      UserError: there are too few to hold one out for test and one for validation, and to train on another.

    >>> exact_bounds([0.1, 0.3, 0.5, 0.7, 0.9], 0.6)
    (0.4, 0.6)
    """
    ordered = sorted(places)
    held_out = round(share * len(ordered))
    if held_out < 2 or held_out == len(ordered):
        raise UserError(
            f"data.options.hold_out={share:g}",
            f"is {held_out} of {len(ordered)} keys: test, validation and training need one each.",
            "Change hold_out, or choose another key.",
        )
    middle = [(ordered[i - 1] + ordered[i]) / 2 for i in (-(-held_out // 2), held_out)]
    return middle[0], middle[1]


class _TrainingQuestions:
    """Questions with no held-out key, as they come: question i is the first such one of draws of its own."""

    def __init__(self, draws: Draws, taken: frozenset[str] = frozenset()):
        self._draws = draws
        self._taken = taken
        self._size = draws.options.train_size
        self[0]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        for attempt in range(DRAWS_PER_QUESTION):
            # Every draw is one question's; a prime step, because some metadata repeats in chunks, as sizes may.
            row = self._draws.entry("train", attempt * self._size + (index + attempt * 7919) % self._size)
            if self._draws.home_split(row) == "train" and row["question"] not in self._taken:
                return row
        raise UserError(
            f"data set {self._draws.name}",
            f"{DRAWS_PER_QUESTION} draws in a row were of keys that are held out.",
            "Lower data.options.hold_out, or configure a generator of more questions.",
        )


def held_out_questions(draws: Draws, split: str, taken: frozenset[str] = frozenset()) -> Iterator[Mapping[str, Any]]:
    """Questions of a held-out split, none of `taken`: as many as the options want, or as many as turn up."""
    wanted = draws.options.test_size if split == "test" else draws.options.validation_size
    seen = set(taken)
    found = number = since_last = 0
    while found < wanted and since_last < DRAWS_PER_QUESTION:
        row = draws.entry(split, number)
        number, since_last = number + 1, since_last + 1
        if draws.home_split(row) == split and row["question"] not in seen:
            if not draws.options.held_out_repeats:
                seen.add(row["question"])
            found, since_last = found + 1, 0
            yield row


def key_of(row: Mapping[str, Any], key: str) -> str:
    """What is held out together, as text.

    >>> key_of({"question": "Ann has 3 brothers and 12 sisters."}, "numbers")
    '3 12'
    """
    if key == "question":
        return str(row["question"])
    if key == "numbers":
        return " ".join(numbers_in(row["question"]))
    value: Any = row
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if value is None:
        known = ", ".join(f"metadata.{name}" for name in row["metadata"])
        raise UserError(f"data.options.key={key!r}", "is in no question's metadata.", f"There are: {known}.")
    return json.dumps(value, sort_keys=True)


def numbers_in(text: str) -> list[str]:
    """The numbers in a text, in order.

    >>> numbers_in("3 + -4.5 = ?")
    ['3', '-4.5']
    """
    return re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", text)


def key_place(key: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:13], 16) / 16**13


# Generators -------------------------------------------------------------------------------------------------------


def open_generator(name: str, config: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """The generator `name` with `config`, whose enumerations, tuples and nested tables are as TOML and JSON have them.

    Raises:
      UserError: reasoning-gym is not installed; there is no such generator or option; or a value cannot be.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(
            "data.source='reasoning_gym'", "needs the package reasoning-gym.", "pip install 'rollstream[tasks]'"
        )
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        said = f"Did you mean {near[0]}?" if near else "See reasoning-gym's gallery for what there is."
        raise UserError(f"data.name={name!r}", "is no data set of reasoning-gym.", said)
    known = {one.name for one in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    if unknown := sorted(set(config) - known):
        near = difflib.get_close_matches(unknown[0], known, n=1)
        said = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(sorted(known))}."
        raise UserError(f"data.options.config.{unknown[0]}", f"is no option of {name}.", said)
    kinds = typing.get_type_hints(DATASETS[name][1])
    values = {option: typed_value(value, kinds[option], option) for option, value in config.items()}
    try:
        return reasoning_gym.create_dataset(name, **values, seed=seed, size=size)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"data.options.config of {name}", f"{said}.", "Change those values.") from error


def typed_value(value: Any, kind: Any, where: str) -> Any:
    """`value` of a recipe as what a configuration declares: enumerations by name or value, tuples, nested tables.

    Raises:
      UserError: an enumeration has no such member, or a table lacks a key.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [one for one in arguments if one is not type(None)]
        return value if value is None or len(inner) != 1 else typed_value(value, inner[0], where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _member(value, kind, where)
    if isinstance(value, list):
        items = [typed_value(item, arguments[0], where) for item in value] if arguments else value
        return tuple(items) if origin is tuple or kind is tuple else items
    if isinstance(value, Mapping) and dataclasses.is_dataclass(kind) and isinstance(kind, type):
        kinds = typing.get_type_hints(kind)
        try:
            return kind(**{name: typed_value(item, kinds.get(name, Any), where) for name, item in value.items()})
        except TypeError as error:  # a key is missing, or is none
            raise UserError(f"data.options.config.{where}", f"{error}.", "Mend that table.") from None
    return value


def _member(value: Any, kind: type[enum.Enum], where: str) -> enum.Enum:
    for member in kind:
        if value == member.value or str(value).lower() == member.name.lower():
            return member
    names = ", ".join(member.name for member in kind)
    raise UserError(f"data.options.config.{where}", f"{value!r} is no {kind.__name__}.", f"There are: {names}.")


# Entries as JSON --------------------------------------------------------------------------------------------------

_TYPE = "__type__"  # of a value that JSON has no word for


def row_of(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of a generator as a row: JSON values only, and an id by what is asked."""
    question, answer = str(entry["question"]), entry["answer"]
    digest = hashlib.sha256(json.dumps([question, str(answer)]).encode()).hexdigest()[:12]
    return {
        "question": question,
        "answer": json_value(answer),
        "metadata": json_value(entry["metadata"]),
        "prompt_id": f"{name}/{digest}",
    }


def entry_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The entry that `row_of` made a row of, as its generator's scorer takes it."""
    return {name: python_value(row[name]) for name in ("question", "answer", "metadata")}


def json_value(value: Any) -> Any:
    """`value` in JSON; tuples, sets, dates and tables with keys that are no texts are named, so that they come back.

    >>> json_value({"grid": (1, 2)})
    {'grid': {'__type__': 'tuple', 'items': [1, 2]}}
    """
    if isinstance(value, enum.Enum):
        return json_value(value.value)
    if isinstance(value, np.ndarray | np.generic):
        return json_value(value.tolist())
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [json_value(item) for item in value]
    if isinstance(value, tuple | set | frozenset):
        kind, items = ("tuple", list(value)) if isinstance(value, tuple) else ("set", sorted(value, key=repr))
        return {_TYPE: kind, "items": [json_value(item) for item in items]}
    if isinstance(value, datetime.date | datetime.datetime):
        kind = "datetime" if isinstance(value, datetime.datetime) else "date"
        return {_TYPE: kind, "items": [value.isoformat()]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return json_value(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: json_value(item) for key, item in value.items()}
        return {_TYPE: "table", "items": [[json_value(key), json_value(item)] for key, item in value.items()]}
    return str(value)


def python_value(value: Any) -> Any:
    """What `json_value` was given, but for enumerations, arrays and objects: those stay what JSON has for them."""
    if isinstance(value, list):
        return [python_value(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if _TYPE not in value:
        return {key: python_value(item) for key, item in value.items()}
    items = [python_value(item) for item in value["items"]]
    makers: dict[str, Any] = {
        "tuple": tuple,
        "set": set,
        "table": dict,
        "date": lambda texts: datetime.date.fromisoformat(texts[0]),
        "datetime": lambda texts: datetime.datetime.fromisoformat(texts[0]),
    }
    return makers[value[_TYPE]](items)
