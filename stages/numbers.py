"""Numbers that come from code that is not ours: rewards of environments and of reward functions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def finite_number(value: Any, what: str) -> float:
    """`value` as a float: a Python, NumPy or JAX scalar, booleans included.

    >>> finite_number(True, "the reward")
    1.0

    Raises:
      TypeError: it is not a number (None, a string, an array of several).
      ValueError: it is NaN or infinite.
    """
    if type(value) is float and math.isfinite(value):
        return value
    if np.ndim(value) or np.asarray(value).dtype.kind not in "biuf":
        raise TypeError(f"{what} must be a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{what} must be finite, got {value}")
    return float(value)
