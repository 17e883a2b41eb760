"""Progress is what the metrics files say: of this process's run or of another's, on a terminal or in a log."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from runners.progress import Progress, Snapshot, panel, plain_line, seconds_left, snapshot
from schemas import run_layout
from schemas.metrics import MetricsWriter, read_metrics
from schemas.recipe import Recipe
from schemas.store import RunStore
from tests.runners.written_run import RECIPE, write_run

WARMING = Recipe(name="warming", warm_start={"steps": 40}, trainer={"steps": 10})


def shown(renderable: RenderableType) -> str:
    output = io.StringIO()
    Console(file=output, width=100).print(renderable)
    return output.getvalue()


def of_written_run(tmp_path: Path) -> Snapshot:
    return snapshot(read_metrics(write_run(tmp_path / "run")), RECIPE)


def test_a_snapshot_is_of_the_newest_trained_step(tmp_path: Path) -> None:
    # Step 2 is sampled and not trained: its reward is not shown as if it were.
    store = write_run(tmp_path / "run")
    MetricsWriter(store, "reward").write(2, {"reward/total/mean": 0.99, "reward/success/fraction": 0.9}, element=0)
    now = snapshot(read_metrics(store), RECIPE)
    assert (now.steps_done, now.steps) == (2, 3)
    assert (now.reward, now.success, now.lag) == (0.5, 0.5, 0.0)
    assert now.rewards == [0.5, 0.5]


def test_tokens_per_second_are_of_the_middle_step_so_one_that_compiled_does_not_show() -> None:
    store = RunStore.in_memory()
    for step, (tokens, seconds) in enumerate([(100, 50.0), (100, 1.0), (300, 2.0)]):
        rollout = {"rollout/sampled_tokens": tokens / 2, "rollout/seconds": seconds / 2}
        for element in range(2):
            MetricsWriter(store, "rollout").write(step, rollout, element=element)
        train = {"trainer/trained_tokens": tokens, "trainer/update_seconds": seconds, "trainer/publish_seconds": 0.1}
        MetricsWriter(store, "train").write(step, train)
    now = snapshot(read_metrics(store), RECIPE)
    assert now.sampled_per_second == now.trained_per_second == 100.0


def test_a_step_whose_policy_is_not_published_yet_is_not_done(tmp_path: Path) -> None:
    store = write_run(tmp_path / "run")
    MetricsWriter(store, "train").write(2, {"trainer/loss": 0.0, "trainer/trained_tokens": 5})
    assert snapshot(read_metrics(store), RECIPE).steps_done == 2


def test_the_time_left_is_the_median_pace_times_the_steps_left(tmp_path: Path) -> None:
    # One slow step (the first compiles) moves nothing.
    assert seconds_left([0.0, 90.0, 92.0, 94.0, 96.0], 10) == 20.0
    assert seconds_left([5.0], 10) is None
    assert seconds_left([], 10) is None
    assert seconds_left([0.0, 2.0], 0) == 0.0
    assert of_written_run(tmp_path).seconds_left == 10.0


def test_before_the_first_step_the_warm_start_is_shown() -> None:
    store = RunStore.in_memory()
    assert plain_line(snapshot(read_metrics(store), WARMING)) == ""
    assert "getting ready" in shown(panel(snapshot(read_metrics(store), WARMING), "t", 3.0))
    MetricsWriter(store, "warm_start").write(11, {"warm_start/loss": 1.25})
    now = snapshot(read_metrics(store), WARMING)
    assert plain_line(now) == "warm start 12/40  loss 1.250"
    assert "warm start 12/40" in shown(panel(now, "t", 3.0))


def test_the_panel_says_what_the_line_says(tmp_path: Path) -> None:
    store = write_run(tmp_path / "run")
    MetricsWriter(store, "evaluate").write(2, {"evaluate/success/fraction": 0.625})
    now = snapshot(read_metrics(store), RECIPE)
    line, text = plain_line(now), shown(panel(now, "written", 20.0))
    for part in ("step 2/3", "0.500", "0.625 (version 2)", "tokens/s", "10.0 s"):
        assert part in line and part in text, part
    assert max(map(len, text.splitlines())) <= 100


def test_a_log_gets_plain_lines_and_the_last_state_even_of_a_short_run(tmp_path: Path) -> None:
    store = write_run(tmp_path / "run")
    output = io.StringIO()
    console = Console(file=output, width=40, force_terminal=False)
    with Progress(store, RECIPE, console):
        pass
    lines = output.getvalue().splitlines()
    assert len(lines) == 1 and lines[0].startswith("step 2/3  reward 0.500")
    assert "\x1b" not in lines[0]


def test_a_run_of_another_process_is_followed_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runners.progress.SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr("runners.progress.SECONDS_BETWEEN_LINES", 0.0)
    store = RunStore.open(tmp_path / "run")
    output = io.StringIO()
    console = Console(file=output, width=200, force_terminal=False)
    with Progress(store, RECIPE, console):
        for step in range(2):
            MetricsWriter(store, "train").write(step, {"trainer/publish_seconds": 0.1})
            wait_for(partial(is_written, output, f"step {step + 1}/3"))
        with store.local_path(run_layout.metrics("train")).open("ab") as lines:
            lines.write(b'{"torn')
    assert [line.split("  ")[0] for line in output.getvalue().splitlines()] == ["step 1/3", "step 2/3"]


def is_written(output: io.StringIO, text: str) -> bool:
    return text in output.getvalue()


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def test_a_terminal_is_drawn_in_place_and_left_with_the_last_state(tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(file=output, width=100, force_terminal=True)
    with Progress(write_run(tmp_path / "run"), RECIPE, console):
        pass
    written = output.getvalue()
    assert "step 2/3" in written and "written" in written
    assert written.endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.parametrize("terminal", [True, False])
def test_a_fault_of_the_display_is_said_and_does_not_stop_the_run(tmp_path: Path, terminal: bool) -> None:
    output = io.StringIO()
    console = Console(file=output, width=200, force_terminal=terminal)
    not_a_recipe: Any = None
    progress = Progress(write_run(tmp_path / "run"), RECIPE, console)
    progress._recipe = not_a_recipe
    with progress:
        pass
    assert "the run goes on" in output.getvalue()


def test_an_output_that_is_gone_does_not_stop_the_run(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    gone = io.StringIO()
    gone.close()
    with Progress(write_run(tmp_path / "run"), RECIPE, Console(file=gone, width=80, force_terminal=False)):
        pass
    assert not [warning for warning in recwarn if "thread" in str(warning.message).lower()]
