"""Text and JSON that may hold anything a model or an environment wrote, made safe to store.

A sampler can stop inside an emoji and an environment can answer with half of one; Python then holds a lone surrogate,
which UTF-8 cannot encode. Stored text shows it as `\\ud83d`; JSON escapes it and gives it back as it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def storable_text(text: str) -> str:
    """`text` with every lone surrogate written out, so that it encodes as UTF-8.

    >>> storable_text("half an emoji: \\ud83d")
    'half an emoji: \\\\ud83d'
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def to_json(value: Any, *, indent: int | None = None) -> str:
    """ASCII JSON with sorted keys: equal values give equal text.

    NumPy and JAX scalars and arrays become numbers and lists, tuples become lists, keys become strings. NaN and
    infinity become null, because JSON has no such numbers.

    Raises:
      TypeError: a value that is none of these.
    """
    separators = (",", ":") if indent is None else None
    return json.dumps(plain(value), sort_keys=True, allow_nan=False, indent=indent, separators=separators)


def plain(value: Any) -> Any:
    """`value` as dicts, lists, strings, finite numbers, booleans and None."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy and JAX arrays and scalars
        return plain(value.tolist())
    raise TypeError(f"{value!r} of type {type(value).__name__} is not a JSON value")
