"""Which runners can be used on this machine, and how to get the others.

Left out on purpose: trying them. A service that is not there is said by whoever asks it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType

from runners import flink
from runners.prism import HOW_TO_GET_IT, find_prism
from runners.profiles import PROFILES, RunnerProfile
from runners.report import table


@dataclass(frozen=True)
class Availability:
    """Whether a runner is usable here, and why, or what to do."""

    runner: str
    summary: str
    usable: bool
    how: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def availabilities() -> list[Availability]:
    return [Availability(p.name, p.summary, *_usable(p)) for p in PROFILES.values()]


def _usable(profile: RunnerProfile) -> tuple[bool, str]:
    if profile.beam_runner == "FnApiRunner":
        return True, "comes with Beam"
    if profile.beam_runner == "FlinkRunner":
        return flink.job_server() is not None, flink.job_server() or flink.HOW_TO_GET_IT
    if profile.beam_runner == "DataflowRunner":
        return _has_google(), "pip install 'rollstream[gcp]', and an account"
    prism = find_prism()
    if prism is not None:
        return True, prism
    return False, f"downloaded by Beam when it is first used (from GitHub), or built with Go: {HOW_TO_GET_IT}"


def _has_google() -> bool:
    try:
        return importlib.util.find_spec("google.auth") is not None
    except ModuleNotFoundError:  # no package of Google's at all
        return False


def render(rows: Sequence[Availability]) -> RenderableType:
    return table(
        "Runners",
        ("--runner", "usable here", "what it is", "where it is, or how to get it"),
        [[row.runner, "yes" if row.usable else "no", row.summary, row.how] for row in rows],
        left=4,
    )
