"""The learning curve is drawn from the run's own numbers, and is a picture whatever is missing."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from pipelines.evaluate import PromptOutcome, Result, RunResults, summarize
from runners.curve import Curve, Mark, Point, curve_of, draw, moving_mean
from schemas.metrics import MetricsWriter
from tests.runners.written_run import RECIPE, write_run

CURVE = Curve(
    title="lakes",
    validation=[Point(0, 0.25, 0.1, 0.5), Point(50, 0.75, 0.5, 0.9)],
    training=[(step, step / 100) for step in range(60)],
    marks=[Mark("random weights", Point(0, 0.1, 0.05, 0.2)), Mark("after RL", Point(60, 0.9, 0.8, 0.95))],
    scripted=0.94,
    validation_note="64 validation prompts",
    test_note="300 test prompts",
)


def png_size(data: bytes) -> tuple[int, int]:
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")
    return struct.unpack(">II", data[16:24])


def drawn(curve: Curve, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """The figure that `draw` saves."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    draw(curve)
    return figures[0]


def test_the_picture_is_a_whole_png_of_the_promised_size() -> None:
    assert png_size(draw(CURVE)) == (1600, 960)


@pytest.mark.parametrize(
    "curve",
    [
        Curve("nothing", [], []),
        Curve("only training", [], [(0, 0.5)]),
        Curve("only a point", [Point(0, 0.5, 0.4, 0.6)], []),
        Curve("negative and large rewards", [], [(0, -3.0), (1, 12.0)]),
        Curve("not a number", [], [(0, float("nan")), (1, 0.5)]),
    ],
    ids=lambda curve: curve.title,
)
def test_what_is_missing_is_left_out_of_the_picture(curve: Curve) -> None:
    assert png_size(draw(curve)) == (1600, 960)


def test_axes_and_legend_say_what_is_shown_and_all_points_lie_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = drawn(CURVE, monkeypatch).axes[0]
    legend = axes.get_legend_handles_labels()[1]
    assert axes.get_legend() is not None
    assert len(legend) == 5
    for part in ("mean reward", "64 validation prompts", "scripted rule, 300 test prompts: 0.940", "after RL"):
        assert any(part in text for text in legend), part
    assert "policy version" in axes.get_xlabel() and "succeed" in axes.get_ylabel()
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert left <= 0 and right >= 60 and low <= 0 and high >= 1


def test_a_reward_above_one_stays_inside_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    low, high = drawn(Curve("x", [], [(0, -3.0), (1, 12.0)]), monkeypatch).axes[0].get_ylim()
    assert low < -3.0 and high > 12.0


def test_a_moving_mean_looks_back_and_never_ahead() -> None:
    assert moving_mean([1.0, 3.0, 5.0, 100.0], 2).tolist() == [1.0, 2.0, 4.0, 52.5]
    assert moving_mean([1.0, 3.0, 5.0], 1).tolist() == [1.0, 3.0, 5.0]
    assert moving_mean([2.0, 4.0], 10).tolist() == [2.0, 3.0]


def test_the_curve_of_a_run_has_its_rewards_validations_and_results(tmp_path: Path) -> None:
    store = write_run(tmp_path / "run")
    values = {"evaluate/success/fraction": 0.5, "evaluate/prompts": 64, "evaluate/samples": 64}
    MetricsWriter(store, "evaluate").write(0, values)
    MetricsWriter(store, "evaluate").write(2, values | {"evaluate/success/fraction": 0.75})
    total = summarize([PromptOutcome("p", "", 1, i % 2, 0, i % 2) for i in range(10)])
    results = RunResults(
        "test",
        (
            Result("random weights", 0, "aa", total, {}),
            Result("after RL (2 steps)", 2, "bb", total, {}),
            Result("scripted rule", None, None, total, {}),
        ),
    )
    curve = curve_of(store, RECIPE, results)
    assert [(point.version, point.success) for point in curve.validation] == [(0, 0.5), (2, 0.75)]
    assert all(point.low < point.success < point.high for point in curve.validation)
    assert list(curve.training) == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert [(mark.label, mark.point.version) for mark in curve.marks] == [
        ("random weights", 0),
        ("after RL (2 steps)", 2),
    ]
    assert (curve.scripted, curve.scripted_label) == (0.5, "scripted rule")
    assert (curve.validation_note, curve.test_note) == ("64 validation prompts", "10 test prompts")
    assert png_size(draw(curve)) == (1600, 960)


def test_of_several_scripted_rules_the_best_is_drawn(tmp_path: Path) -> None:
    summaries = [summarize([PromptOutcome("p", "", 1, i < right, 0, i < right) for i in range(10)]) for right in (2, 7)]
    rules = zip(("always '3'", "the first number + 1"), summaries, strict=True)
    results = RunResults("test", tuple(Result(label, None, None, summary, {}) for label, summary in rules))
    curve = curve_of(write_run(tmp_path / "run"), RECIPE, results)
    assert (curve.scripted, curve.scripted_label) == (0.7, "the first number + 1")
