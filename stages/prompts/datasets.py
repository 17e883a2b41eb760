"""Prompts by index, wherever they come from: TensorFlow Datasets, files, or generators of reasoning-gym.

Any TFDS data set whose files allow random access can be named in a recipe, and is read without TensorFlow;
`frozen_lake_maps` is ours. A data set is prepared once, in a folder of the user's cache, and shared by all runs and
processes from then on. The other sources are `stages.prompts.files` and `stages.prompts.reasoning_gym`.

Left out: TFDS's own batching and shuffling (order is `training_prompts`'s business), and data sets kept as TFRecord.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import io
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from schemas.errors import DamagedDataError, UserError
from schemas.identity import seed_int
from schemas.recipe import DataSection, TaskSection
from schemas.records import Prompt
from stages.options import checked_options
from stages.prompts.files import open_files
from stages.prompts.frozen_lake_maps import FrozenLakeMapOptions, FrozenLakeMaps, FrozenLakeMapsConfig
from stages.prompts.reasoning_gym import open_reasoning_gym
from stages.prompts.rows import RowSource

DATA_VARIABLE = "ROLLSTREAM_DATA"
# TFDS reports what a user can mend as any of these, with the explanation in its text.
TFDS_ERRORS = (ValueError, TypeError, KeyError, NotImplementedError, AssertionError, RuntimeError, ImportError, OSError)

_TFDS = threading.Lock()  # quieting TFDS changes what the whole process prints: one thread at a time


@dataclass(frozen=True, eq=False)
class PromptData:
    """A split of a data set as prompts, by index. Reads are safe from several threads.

    The payload of a prompt is its example in JSON values: bytes as text, arrays as lists. Its id is the example's
    own text feature "prompt_id" where there is one, else the data set's name and the digest of the payload.
    """

    name: str
    split: str
    task: str
    folder: str
    source: RowSource = field(repr=False)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Prompt:
        """Prompt `index`, 0 <= index < len(self).

        Raises:
          IndexError: there is no such prompt.
          DamagedDataError: the data set's files cannot be read.
          UserError: the example has values that are neither text nor JSON values.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)} ({self.name}, split {self.split})")
        where = f"{self.name}, split {self.split}, example {index}"
        payload = _json_values(_read(self.source, index, where, self.folder), where)
        if isinstance(payload.get("prompt_id"), str):
            return Prompt(payload.pop("prompt_id"), self.task, payload)
        return Prompt(_content_id(self.name, payload, where), self.task, payload)


def open_prompts(data: DataSection, task: TaskSection, split: str) -> PromptData:
    """Prompts of `split`, for episodes of `task`; prepares a TFDS data set first if that was never done.

    Two processes may prepare one data set at the same time: one does, the other waits for it. What a killed process
    left behind is not taken for a data set.

    Args:
      data: source, name and options. Options of frozen_lake_maps are `FrozenLakeMapOptions`; options of any other TFDS
        data set are arguments of `tfds.builder`: config, version, data_dir. Those of other sources are `FileOptions`
        and `ReasoningGymOptions`.
      task: the environment that the prompts are for.
      split: a split's name, or a part of one as TFDS writes it ("train[:80%]").

    Raises:
      UserError: no such data set, split or option; the data set cannot be read by random access; or the cache folder
        cannot be written.
    """
    folder, source = SOURCES[data.source](data, split)
    if not len(source):
        raise UserError(f"data set {data.name}", f"split {split!r} is empty.", "Choose another split or other options.")
    return PromptData(data.name, split, task.environment, folder, source)


def training_prompts(data: PromptData, run_seed: int, step: int, count: int) -> tuple[Prompt, ...]:
    """The `count` prompts of training step `step`: a pure function of its arguments.

    The run goes through the data epoch by epoch, each in its own seeded order, and steps need not divide an epoch.
    """
    positions = range(step * count, (step + 1) * count)
    epochs = [divmod(position, len(data)) for position in positions]
    return tuple(data[int(_epoch_order(len(data), run_seed, epoch)[place])] for epoch, place in epochs)


@functools.lru_cache(maxsize=4)
def _epoch_order(size: int, run_seed: int, epoch: int) -> np.ndarray:
    # Sorting raw bits, and not Generator.permutation, because numpy promises the same raw bits in every version.
    return np.argsort(np.random.PCG64(seed_int("prompts", run_seed, epoch)).random_raw(size), kind="stable")


def data_folder() -> Path:
    """Where data sets are kept: $ROLLSTREAM_DATA, or ~/.cache/rollstream/datasets."""
    return Path(os.environ.get(DATA_VARIABLE) or "~/.cache/rollstream/datasets").expanduser()


def open_tfds(data: DataSection, split: str) -> tuple[str, RowSource]:
    """The folder and the examples of a split of a TFDS data set; see `open_prompts`."""
    with _TFDS, _tfds_notices_off():
        builder = _prepared(lambda: _builder(data), data)
        return str(builder.data_dir), _source(builder, data, split)


SOURCES: dict[str, Callable[[DataSection, str], tuple[str, RowSource]]] = {
    "tfds": open_tfds,
    "files": lambda data, split: ("", open_files(data, split)),
    "reasoning_gym": lambda data, split: ("", open_reasoning_gym(data, split)),
}


def _builder(data: DataSection) -> tfds.core.DatasetBuilder:
    if data.name == FrozenLakeMaps.name:
        options = checked_options(FrozenLakeMapOptions, data.options, "data.options")
        config = FrozenLakeMapsConfig(options=options)
        return FrozenLakeMaps(config=config, data_dir=data_folder(), file_format="array_record")
    with _tfds_errors(data):
        arguments = {"data_dir": data_folder(), "file_format": "array_record", **data.options}
        return tfds.builder(data.name, **arguments)


def _prepared(make: Callable[[], tfds.core.DatasetBuilder], data: DataSection) -> tfds.core.DatasetBuilder:
    builder = make()
    if builder.is_prepared():
        return builder
    with _locked(Path(builder.data_dir_root) / f".{builder.name}.lock"), _tfds_errors(data):
        builder = make()  # again, behind the lock: another process may have prepared it, and builders look only once
        with contextlib.redirect_stdout(io.StringIO()):  # TFDS greets on stdout, which belongs to the command line
            builder.download_and_prepare()
        return builder


def _source(builder: tfds.core.DatasetBuilder, data: DataSection, split: str) -> RowSource:
    known = ", ".join(builder.info.splits)
    if split.split("[")[0] not in builder.info.splits:
        raise UserError(f"data set {data.name}", f"it has no split {split!r}.", f"Its splits: {known}.")
    with _tfds_errors(data):
        return builder.as_data_source(split=split)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path`; the system frees it when its holder dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise UserError(
            str(path.parent),
            f"data sets cannot be kept there ({error.strerror}).",
            f"Set {DATA_VARIABLE} to a folder that can be written.",
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _tfds_errors(data: DataSection) -> Iterator[None]:
    """Turns what TFDS raises into the user's error, with the first line of TFDS's explanation."""
    try:
        yield
    except TFDS_ERRORS as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(
            f"data set {data.name}", f"{message}.", "See data.name and data.options in the recipe."
        ) from error


@contextlib.contextmanager
def _tfds_notices_off() -> Iterator[None]:
    """Keeps TFDS's progress bars and notices off the terminal; errors still come as exceptions."""
    tfds.disable_progress_bar()
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _read(source: RowSource, index: int, where: str, folder: str) -> Mapping[str, Any]:
    try:
        return source[index]
    except UserError:
        raise
    except Exception as error:  # the readers raise whatever their C++ parts and the decoders do
        raise DamagedDataError(
            where, f"its files cannot be read ({error}).", f"Delete {folder}, and it will be prepared again."
        ) from error


def _json_values(value: Any, where: str) -> Any:
    """`value`, as TFDS decodes examples, in JSON values."""
    if isinstance(value, Mapping):
        return {str(key): _json_values(item, where) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _json_values(value.tolist(), where)
    if isinstance(value, list | tuple):
        return [_json_values(item, where) for item in value]
    if isinstance(value, bytes):
        return _text(value, where)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise UserError(where, f"a {type(value).__name__} is no JSON value.", "Choose a data set of texts and numbers.")


def _text(value: bytes, where: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise UserError(
            where, "it has bytes that are not UTF-8 text.", "Choose a data set of texts and numbers."
        ) from None


def _content_id(name: str, payload: Mapping[str, Any], where: str) -> str:
    try:
        text = json.dumps(payload, sort_keys=True, allow_nan=False)
    except ValueError:
        raise UserError(where, "it has NaN or infinity.", "Choose a data set of texts and finite numbers.") from None
    return f"{name}/{hashlib.sha256(text.encode()).hexdigest()[:12]}"
