"""Each worker's time is divided into work, waiting and the rest, by its own events; its stages add up to the run's."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runners.inspect import inspect_run, render
from runners.workers import PartTime, ProcessTime, WorkerReport, covered, merged, stage_times, worker_reports
from schemas.metrics import MetricEvent, MetricsTail
from schemas.store import RunStore
from schemas.text import to_json
from tests.runners.written_run import write_run

GENERATORS = ("generator-1/2", "generator-2/2")


def event(
    stage: str,
    at: float,
    values: Mapping[str, float],
    *,
    step: int = 0,
    element: int = 0,
    worker: str = "generator-1/1",
) -> MetricEvent:
    """An event written at second `at`, of a worker with one process, "<worker>@1"."""
    labels = {} if stage == "train" else {"element": element}
    part = "trainer" if stage == "train" else stage
    named = {f"{part}/{name}": value for name, value in values.items()}
    return MetricEvent(stage, step, at, named, labels, worker, f"{worker}@1")


def step_of(generator: str, step: int, element: int, begin: float, waited: float) -> list[MetricEvent]:
    """An element: `waited` seconds for its policy until `begin`, 4 s of rollout, 1 s of reward, 1 s of nothing, 1 s of
    commit."""
    facts: dict[str, Any] = {"step": step, "element": element, "worker": generator}
    return [
        event("prompts", begin, {"groups": 2, "deferrals": 3 if waited else 0, "deferred_seconds": waited}, **facts),
        event(
            "rollout", begin + 4, {"seconds": 4.0, "trajectories": 8, "sampled_tokens": 80, "prompt_tokens": 6}, **facts
        ),
        event("reward", begin + 5, {"seconds": 1.0, "trajectories": 8, "failed_trajectories": 1}, **facts),
        event("shards", begin + 7, {"seconds": 1.0, "trajectories": 8, "tokens": 100}, **facts),
    ]


def report_of(reports: list[WorkerReport], worker: str) -> WorkerReport:
    (found,) = (report for report in reports if report.worker == worker)
    return found


# Intervals


def test_times_that_overlap_or_touch_count_once() -> None:
    assert merged([(5.0, 6.0), (0.0, 1.0), (1.0, 2.0), (0.5, 1.5)]) == [(0.0, 2.0), (5.0, 6.0)]
    assert covered([(0.0, 4.0), (2.0, 6.0), (1.0, 2.0), (8.0, 9.0)]) == 7.0
    assert covered([]) == 0


# Work, waiting and the rest


def test_a_generator_is_idle_while_it_waits_for_a_policy_and_work_idle_and_rest_are_all_its_time() -> None:
    # Second 0 to 7: an element, of which 6 s are work. 7 to 17: 9 s of waiting after 1 s of nothing. 17 to 24: another.
    events = [*step_of("generator-1/1", 0, 0, 0.0, 0.0), *step_of("generator-1/1", 1, 0, 17.0, 9.0)]
    time = ProcessTime(events).part("generator")
    assert time == PartTime(span=24.0, busy=12.0, idle=9.0)
    assert time.other == 3.0


def test_the_wait_for_the_first_policy_is_in_the_span_and_idle() -> None:
    assert ProcessTime(step_of("generator-1/1", 0, 0, 10.0, 10.0)).part("generator") == PartTime(17.0, 6.0, 10.0)


def test_elements_side_by_side_are_work_once_and_what_waits_beside_them_is_not_idle() -> None:
    # Two elements from 0 to 4 and 2 to 6; the source waits from 1 to 9, and samples from 9 to 10.
    events = [
        event("rollout", 4.0, {"seconds": 4.0}, element=0),
        event("rollout", 6.0, {"seconds": 4.0}, element=1),
        event("prompts", 9.0, {"deferred_seconds": 8.0}, element=2),
        event("rollout", 10.0, {"seconds": 1.0}, element=2),
    ]
    assert ProcessTime(events).part("generator") == PartTime(span=10.0, busy=7.0, idle=3.0)


def test_a_trainer_is_idle_until_the_steps_shards_are_there() -> None:
    # Waits 0 to 5, trains 5 to 8; 1 s of hooks; waits 9 to 11, trains 11 to 14.
    events = [
        event("train", 8.0, {"seconds": 3.0, "idle_seconds": 5.0}, step=0, worker="trainer"),
        event("train", 14.0, {"seconds": 3.0, "idle_seconds": 2.0}, step=1, worker="trainer"),
    ]
    time = ProcessTime(events).part("trainer")
    assert time == PartTime(span=14.0, busy=6.0, idle=7.0)
    assert time.other == 1.0


def test_in_one_process_each_part_is_idle_while_the_other_has_its_turn() -> None:
    # 0 to 7 sampling (6 s of work), 7 to 10 training; twice.
    events = [
        *step_of("colocated", 0, 0, 0.0, 0.0),
        event("train", 10.0, {"seconds": 3.0, "idle_seconds": 7.0}, step=0, worker="colocated"),
        *step_of("colocated", 1, 0, 10.0, 0.0),
        event("train", 20.0, {"seconds": 3.0, "idle_seconds": 7.0}, step=1, worker="colocated"),
    ]
    time = ProcessTime(events)
    assert time.part("generator") == PartTime(span=20.0, busy=12.0, idle=6.0)
    assert time.part("trainer") == PartTime(span=20.0, busy=6.0, idle=14.0)
    # What is neither is Beam's, between the stages of an element: 1 s each.
    assert (time.part("generator").other, time.part("trainer").other) == (2.0, 0.0)


def test_what_is_not_known_is_neither_work_nor_waiting() -> None:
    unknown = event("rollout", 5.0, {"seconds": math.nan}, element=1)
    assert ProcessTime([*step_of("generator-1/1", 0, 0, 0.0, 0.0), unknown]).part("generator").busy == 6.0


def test_a_worker_that_was_started_again_was_not_there_in_between() -> None:
    first = step_of("generator-1/1", 0, 0, 0.0, 0.0)
    again = [
        MetricEvent(e.stage, e.step, e.time, e.values, e.labels, e.worker, "elsewhere:2")
        for e in step_of("generator-1/1", 1, 0, 1000.0, 0.0)
    ]
    (report,) = worker_reports(first + again, first + again, None)
    assert report.processes == ("elsewhere:2", "generator-1/1@1")
    assert (report.span, report.busy, report.idle, report.other) == (14.0, 12.0, 0.0, 2.0)


def test_a_stage_of_several_workers_is_idle_by_all_their_time() -> None:
    # Two generators of 7 s each, side by side, in which rollout takes 4 s each.
    events = [e for i, worker in enumerate(GENERATORS) for e in step_of(worker, 0, i, 0.0, 0.0)]
    time = stage_times(events)["rollout"]
    assert (time.busy, time.span) == (8.0, 14.0)
    assert set(stage_times(events)) == {"rollout", "reward", "shards"}


# What each did


def two_generators_and_a_trainer() -> list[MetricEvent]:
    events = [*step_of(GENERATORS[0], 0, 0, 0.0, 0.0), *step_of(GENERATORS[1], 0, 1, 0.0, 0.0)]
    events += [event("group", 5.0, {"groups": 2}, element=i, worker=worker) for i, worker in enumerate(GENERATORS)]
    trained = {"trained_groups": 3, "too_old_groups": 1, "trained_tokens": 120, "seconds": 2.0, "idle_seconds": 7.0}
    return [*events, event("train", 9.0, trained, worker="trainer")]


def test_what_a_stage_of_a_worker_was_given_is_what_the_one_before_said_of_the_same_elements() -> None:
    events = two_generators_and_a_trainer()
    reports = worker_reports(events, events, None)
    assert [(report.worker, report.part) for report in reports] == [
        *((worker, "generator") for worker in GENERATORS),
        ("trainer", "trainer"),
    ]
    for worker in GENERATORS:
        stages = {stage.stage: stage for stage in report_of(reports, worker).stages}
        assert (stages["rollout"].records_in, stages["rollout"].records_out) == (2, 8)
        assert (stages["reward"].records_in, dict(stages["reward"].dropped)) == (8, {"failed": 1})
        assert (stages["rollout"].tokens_out, stages["rollout"].seconds) == (80, 4.0)
        assert stages["rollout"].tokens_per_second == 20.0
        assert stages["rollout"].idle_share == pytest.approx(3 / 7)
    (train,) = report_of(reports, "trainer").stages
    assert (train.records_in, train.records_out, dict(train.dropped)) == (4, 3, {"too old": 1})
    assert (train.tokens_per_second, train.idle_share) == (60.0, pytest.approx(7 / 9))


def test_an_element_that_two_workers_sampled_is_the_work_of_both_and_once_in_the_run() -> None:
    events = [*step_of(GENERATORS[0], 0, 0, 0.0, 0.0), *step_of(GENERATORS[1], 0, 0, 1.0, 0.0)]
    ledger = step_of(GENERATORS[1], 0, 0, 1.0, 0.0)
    for worker in GENERATORS:
        stages = {stage.stage: stage for stage in report_of(worker_reports(events, ledger, None), worker).stages}
        assert (stages["rollout"].records_in, stages["rollout"].records_out) == (2, 8)


def test_workers_are_in_order_of_their_numbers() -> None:
    events = [e for i in (9, 10, 1) for e in step_of(f"generator-{i}/16", 0, i, 0.0, 0.0)]
    assert [report.worker for report in worker_reports(events, events, None)] == [
        f"generator-{i}/16" for i in (1, 9, 10)
    ]


# In the report


def shown(store: RunStore, width: int) -> str:
    output = io.StringIO()
    Console(file=output, width=width, force_terminal=False).print(render(inspect_run(store)))
    return output.getvalue()


def written(events: list[MetricEvent]) -> RunStore:
    store = RunStore.in_memory()
    for e in events:
        facts = {"stage": e.stage, "step": e.step, "time": e.time, "values": e.values, **e.labels}
        line = to_json(facts | {"worker": e.worker, "process": e.process})
        store.append_line(f"metrics/{e.stage}.jsonl", line.encode())
    return store


def test_the_report_and_its_json_have_every_worker_also_where_the_run_has_nothing_but_metrics() -> None:
    store = written(two_generators_and_a_trainer())
    report = json.loads(to_json(inspect_run(store).to_json()))
    assert [(w["worker"], w["part"], w["busy_share"], w["idle_share"]) for w in report["workers"]] == [
        ("generator-1/2", "generator", pytest.approx(6 / 7), 0.0),
        ("generator-2/2", "generator", pytest.approx(6 / 7), 0.0),
        ("trainer", "trainer", pytest.approx(2 / 9), pytest.approx(7 / 9)),
    ]
    assert [stage["stage"] for stage in report["workers"][0]["stages"]] == [
        *("prompts", "rollout", "reward", "group", "shards")
    ]
    text = shown(store, 120)
    assert "Workers" in text and "Stages of each worker" in text
    assert re.search(r"^generator-2/2\s*\n  prompts .*\n  rollout +2 +8 +0 ", text, re.MULTILINE)


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_the_terminal_and_break_no_name(width: int) -> None:
    text = shown(written(two_generators_and_a_trainer()), width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("generator-2/2") == 2  # a row of each table


def test_a_run_of_before_workers_had_names_is_read_and_its_worker_unknown(tmp_path: Path) -> None:
    store = write_run(tmp_path / "run")
    for key in store.list("metrics"):
        lines = [json.loads(line) for line in store.get(key).splitlines()]
        old = [{name: value for name, value in line.items() if name not in ("worker", "process")} for line in lines]
        store.put(key, b"".join(to_json(line).encode() + b"\n" for line in old))
    assert {e.worker for e in MetricsTail(store).read()} == {""}
    inspection = inspect_run(store)
    assert [(report.worker, report.part) for report in inspection.workers] == [("?", "generator"), ("?", "trainer")]
    assert inspection.problems == ()
    # One worker did everything, so the stages of each would be the table of stages again.
    assert "Stages of each worker" not in shown(store, 100)
