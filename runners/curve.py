"""The learning curve of a run as one picture: success over steps, what training saw, and before and after.

Left out on purpose: anything interactive, and every other metric (`rollstream inspect` shows those).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from runners.inspect import series_of
from schemas.metrics import read_metrics
from schemas.recipe import Recipe
from schemas.store import RunStore

if TYPE_CHECKING:
    from pipelines.evaluate import RunResults

# Okabe and Ito's colours: told apart by readers with any of the common colour deficiencies, and in grey print.
BLUE, ORANGE, GREEN, BLACK, GREY = "#0072B2", "#E69F00", "#009E73", "#000000", "#767676"


@dataclass(frozen=True)
class Point:
    """Success at one policy version. `low` and `high` bound it (fractions in [0, 1])."""

    version: int
    success: float
    low: float
    high: float


@dataclass(frozen=True)
class Mark:
    """A result on the test split that the curve is marked with: "random weights", "warm start", "after RL"."""

    label: str
    point: Point


@dataclass(frozen=True)
class Curve:
    """What is drawn. `training` are (step, mean reward) of the trajectories that each step trained on."""

    title: str
    validation: Sequence[Point]
    training: Sequence[tuple[int, float]]
    marks: Sequence[Mark] = ()
    scripted: float | None = None  # success of the best scripted rule on the test split
    scripted_label: str = "scripted rule"
    validation_note: str = "validation"
    test_note: str = "test"


def curve_of(store: RunStore, recipe: Recipe, results: RunResults) -> Curve:
    """The curve of a run, from its metrics and its results on the test split."""
    # evaluate.py's imports take seconds, and whoever only draws a `Curve` needs none of them.
    from pipelines.evaluate import wilson_interval

    events = read_metrics(store)
    validation = []
    for event in (event for event in events if event.stage == "evaluate"):
        share, samples = event.values["evaluate/success/fraction"], event.values["evaluate/samples"]
        interval = wilson_interval(share * samples, samples)
        validation.append(Point(event.step, share, interval.low, interval.high))
    of_policies = [result for result in results.results if result.version is not None]
    marks = [
        Mark(r.label, Point(r.version or 0, r.total.success, r.total.interval.low, r.total.interval.high))
        for r in of_policies
    ]
    scripted = [(result.total.success, result.label) for result in results.results if result.version is None]
    prompts = {int(event.values["evaluate/prompts"]) for event in events if event.stage == "evaluate"}
    return Curve(
        title=f"{recipe.name}: success on prompts that were never trained on",
        validation=validation,
        training=[(s, v) for s, v in series_of(events, "reward/total/mean") if v is not None],
        marks=marks,
        scripted=max(scripted)[0] if scripted else None,
        scripted_label=max(scripted)[1] if scripted else "",
        validation_note=f"{max(prompts)} validation prompts" if prompts else "validation",
        test_note=f"{results.results[0].total.prompts} {results.split} prompts",
    )


def moving_mean(values: Sequence[float], window: int) -> np.ndarray:
    """Mean of each value and up to `window - 1` before it, [N] -> [N]; it never looks ahead.

    >>> moving_mean([1.0, 3.0, 5.0], 2).tolist()
    [1.0, 2.0, 4.0]
    """
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, np.float64)]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw(curve: Curve) -> bytes:
    """The picture as PNG bytes, 1600 x 960 pixels. Series without points are left out of picture and legend."""
    # A bare Figure: pyplot would keep global state and choose a window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    _draw_training(axes, curve.training)
    _draw_validation(axes, curve)
    _draw_scripted(axes, curve)
    _draw_marks(axes, curve)
    _dress(axes, curve)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_training(axes, training: Sequence[tuple[int, float]]) -> None:
    if not training:
        return
    steps, rewards = zip(*training, strict=True)
    window = max(1, len(steps) // 20)
    axes.plot(steps, rewards, color=ORANGE, linewidth=0.8, alpha=0.45, label="_each step")
    axes.plot(
        steps,
        moving_mean(rewards, window),
        color=ORANGE,
        linewidth=2.0,
        label="mean reward in training" + (f" (mean of {window} steps; thin: each step)" if window > 1 else ""),
    )


def _draw_validation(axes, curve: Curve) -> None:
    if not curve.validation:
        return
    versions = [p.version for p in curve.validation]
    lows, highs = [p.low for p in curve.validation], [p.high for p in curve.validation]
    axes.fill_between(versions, lows, highs, color=BLUE, alpha=0.15, linewidth=0, label="_95 % interval")
    axes.plot(
        versions,
        [p.success for p in curve.validation],
        color=BLUE,
        linewidth=2.2,
        marker="o",
        markersize=5,
        label=f"success, {curve.validation_note} (band: 95 % interval)",
    )


def _draw_scripted(axes, curve: Curve) -> None:
    if curve.scripted is None:
        return
    axes.axhline(
        curve.scripted,
        color=GREY,
        linestyle=(0, (5, 3)),
        linewidth=1.4,
        label=f"{curve.scripted_label}, {curve.test_note}: {curve.scripted:.3f}",
    )


def _draw_marks(axes, curve: Curve) -> None:
    for mark, shape, colour in zip(curve.marks, "vs*^DP", [BLACK, GREEN, BLACK, GREEN, BLACK, GREEN], strict=False):
        point = mark.point
        axes.errorbar(
            [point.version],
            [point.success],
            yerr=[[point.success - point.low], [point.high - point.success]],
            fmt=shape,
            color=colour,
            markersize=15 if shape == "*" else 9,
            markeredgecolor="white",
            markeredgewidth=0.8,
            elinewidth=1.6,
            capsize=4,
            clip_on=False,
            zorder=5,
            label=f"{mark.label}, {curve.test_note}: {point.success:.3f}",
        )


def _dress(axes, curve: Curve) -> None:
    axes.set_title(curve.title, loc="left", fontsize=13, fontweight="bold")
    axes.set_xlabel("policy version (optimizer steps of RL)", fontsize=11)
    axes.set_ylabel("share of episodes that succeed; mean reward", fontsize=11)
    _set_limits(axes, curve)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=10)
    if axes.get_legend_handles_labels()[1]:
        # Below the axes: no place inside is free for every curve.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.11), ncol=2, frameon=False, fontsize=10)


def _set_limits(axes, curve: Curve) -> None:
    rewards = [reward for _, reward in curve.training if np.isfinite(reward)]
    low, high = min([0.0, *rewards]), max([1.0, *rewards])
    margin = 0.03 * (high - low)
    axes.set_ylim(low - margin, high + margin)
    last = max([1, *(p.version for p in curve.validation), *(s for s, _ in curve.training)])
    last = max([last, *(m.point.version for m in curve.marks)])
    axes.set_xlim(-0.02 * last, 1.02 * last)
    axes.xaxis.get_major_locator().set_params(integer=True)
