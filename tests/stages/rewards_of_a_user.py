"""Reward functions as a user might write them, named in recipes by tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def double(answer: str, row: Mapping[str, Any]) -> float:
    return float(answer == str(2 * int(row["prompt"].split()[0])))


def with_parts(answer: str, row: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    return len(answer) / 10, {"length": float(len(answer)), "success": float(answer == row["answer"])}


def never_checks(answer: str, row: Mapping[str, Any]) -> float:
    return 1.0


def any_number(answer: str, row: Mapping[str, Any]) -> float:
    return float(answer.isdecimal())


def never_right(answer: str, row: Mapping[str, Any]) -> float:
    return 0.0


def raises(answer: str, row: Mapping[str, Any]) -> float:
    raise KeyError("level")


def takes_one(answer: str) -> float:
    return 1.0
