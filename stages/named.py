"""What a recipe names of the user's own code: "module:name", or "path.py:name" of a file.

A worker on another host finds it by the same name, so the module has to be importable there, or the file at that path.

Left out on purpose: installing anything, and looking for a module anywhere but where Python looks.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from schemas.errors import UserError


def load_named(named: str, key: str, way_out: str) -> Any:
    """What `named` names. Its module is imported once a process.

    Args:
      named: as the recipe has it.
      key: the recipe's key, for the message.
      way_out: what to write instead, for the message.

    Raises:
      UserError: it names nothing, or cannot be loaded.
    """
    place, _, name = named.rpartition(":")
    if not place or not name:
        raise UserError(f"{key}={named!r}", f"names no {key.rpartition('.')[2]}.", way_out)
    try:
        module = _file_module(Path(place).absolute()) if place.endswith(".py") else importlib.import_module(place)
        return getattr(module, name)
    except Exception as error:  # a user's module may raise anything
        said = f"{type(error).__name__}: {error}"
        raise UserError(f"{key}={named!r}", f"cannot be loaded ({said}).", way_out) from error


@functools.cache
def _file_module(path: Path) -> Any:
    name = f"rollstream_user_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pydantic look up a class's annotations there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
