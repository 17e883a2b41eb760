"""Metrics: only names that the table knows, any kind of number, and the last word of a retried step counts."""

from __future__ import annotations

import json
import math
import os
import re
import socket
from pathlib import Path

import numpy as np
import pytest

from schemas import run_layout
from schemas.metrics import METRIC_BY_NAME, METRICS, MetricsTail, MetricsWriter, markdown_table, read_metrics
from schemas.store import RunStore
from schemas.worker import named, process, worker

DOCS = Path(__file__).parents[2] / "docs"
LOSS, NORM = "trainer/loss", "trainer/grad_norm"


@pytest.fixture
def store() -> RunStore:
    return RunStore.in_memory()


# The table --------------------------------------------------------------------------------------------------------


def test_no_name_is_defined_twice_and_each_has_a_unit_and_a_meaning() -> None:
    assert len(METRIC_BY_NAME) == len(METRICS)
    assert all(metric.unit and metric.meaning and metric.stage for metric in METRICS)


def test_names_are_part_quantity_and_perhaps_a_statistic() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"[a-z_]+/[a-z_]+(/(mean|std|max|fraction))?", metric.name), metric.name


def test_names_that_say_a_unit_have_it() -> None:
    for metric in METRICS:
        quantity = metric.name.split("/")[1]
        if quantity.endswith("_per_second"):
            assert metric.unit.endswith("/s"), metric.name
        elif quantity.endswith("seconds"):
            assert metric.unit == "seconds", metric.name
        elif quantity.endswith("_nats"):
            assert metric.unit == "nats", metric.name
        assert metric.name.endswith("/fraction") == (metric.unit == "fraction"), metric.name


def test_docs_metrics_md_holds_the_table() -> None:
    assert markdown_table() in (DOCS / "metrics.md").read_text()


# Writing and reading ----------------------------------------------------------------------------------------------


def test_what_is_written_is_read(store: RunStore) -> None:
    MetricsWriter(store, "train", clock=lambda: 5.5).write(3, {LOSS: 0.25, NORM: 2}, element=1, host="a")
    (event,) = read_metrics(store)
    assert (event.stage, event.step, event.time) == ("train", 3, 5.5)
    assert event.values == {LOSS: 0.25, NORM: 2.0}
    assert event.labels == {"element": 1, "host": "a"}


def test_each_event_is_one_line_of_standard_json_in_the_stages_file(store: RunStore) -> None:
    writer = MetricsWriter(store, "train", clock=lambda: 5.5)
    with named("trainer"):
        writer.write(0, {LOSS: float("nan")})
        writer.write(1, {LOSS: 0.5})
    lines = store.get(run_layout.metrics("train")).splitlines()
    common = {"stage": "train", "time": 5.5, "worker": "trainer", "process": process()}
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == [
        {"step": 0, "values": {LOSS: None}, **common},
        {"step": 1, "values": {LOSS: 0.5}, **common},
    ]


@pytest.mark.parametrize(
    "value", [np.int64(2), np.float32(2), np.bool_(True) + 1, np.array(2), np.array([2.0]).sum(), True + True]
)
def test_numpy_scalars_are_numbers(store: RunStore, value: object) -> None:
    MetricsWriter(store, "train").write(0, {LOSS: value}, element=np.int32(1))
    (event,) = read_metrics(store, "train")
    assert event.values == {LOSS: 2.0} and event.labels == {"element": 1}


def test_jax_scalars_are_numbers(store: RunStore) -> None:
    jnp = pytest.importorskip("jax.numpy")
    MetricsWriter(store, "train").write(jnp.int32(3), {LOSS: jnp.float32(0.5)}, element=jnp.int32(1))
    (event,) = read_metrics(store)
    assert (event.step, event.values, event.labels) == (3, {LOSS: 0.5}, {"element": 1})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), np.float32("nan")])
def test_what_is_not_finite_is_stored_as_null_and_read_as_nan(store: RunStore, value: object) -> None:
    MetricsWriter(store, "train").write(0, {LOSS: value, NORM: 0.0})
    (event,) = read_metrics(store)
    assert math.isnan(event.values[LOSS]) and event.values[NORM] == 0.0


@pytest.mark.parametrize("value", [np.zeros(2), "much", None, [1.0, 2.0]])
def test_what_is_not_one_number_is_refused_with_its_name(store: RunStore, value: object) -> None:
    with pytest.raises(TypeError, match=r"trainer/loss: .* is not one number"):
        MetricsWriter(store, "train").write(0, {LOSS: value})


def test_an_unknown_name_is_refused_with_the_nearest_known_one_and_nothing_is_written(store: RunStore) -> None:
    with pytest.raises(ValueError, match=r"'trainer/los'.*did you mean 'trainer/loss'"):
        MetricsWriter(store, "train").write(0, {NORM: 1.0, "trainer/los": 1.0})
    assert store.list() == []


def test_a_label_cannot_take_the_place_of_an_events_own_key(store: RunStore) -> None:
    with pytest.raises(ValueError, match="'time' is a key of every event"):
        MetricsWriter(store, "train").write(0, {LOSS: 1.0}, time=3)


def test_a_stage_names_a_file(store: RunStore) -> None:
    with pytest.raises(ValueError, match="names a file"):
        MetricsWriter(store, "../train")


def test_a_retried_step_replaces_what_it_said_before(store: RunStore) -> None:
    writer = MetricsWriter(store, "train")
    for step, value in [(0, 1.0), (1, 2.0), (1, 3.0), (0, 4.0)]:
        writer.write(step, {LOSS: value})
    assert [(event.step, event.values[LOSS]) for event in read_metrics(store)] == [(0, 4.0), (1, 3.0)]


def test_elements_of_one_step_stand_side_by_side(store: RunStore) -> None:
    writer = MetricsWriter(store, "pack")
    for element, rows in [(10, 1.0), (2, 2.0), (10, 3.0)]:
        writer.write(0, {"pack/rows": rows}, element=element)
    assert [(event.labels["element"], event.values["pack/rows"]) for event in read_metrics(store)] == [
        (2, 2.0),
        (10, 3.0),
    ]


def test_an_event_says_which_worker_and_which_process_wrote_it(store: RunStore) -> None:
    with named("generator-2/4"):
        MetricsWriter(store, "pack").write(0, {"pack/rows": 1.0})
    MetricsWriter(store, "pack").write(1, {"pack/rows": 1.0})
    assert worker() == process()
    assert [event.worker for event in read_metrics(store)] == ["generator-2/4", worker()]
    assert {event.process for event in read_metrics(store)} == {f"{socket.gethostname()}:{os.getpid()}"}


def test_an_event_of_before_there_were_names_is_read_without_one(store: RunStore) -> None:
    store.append_line("metrics/train.jsonl", b'{"stage":"train","step":3,"time":5.5,"values":{"trainer/loss":1}}')
    (event,) = read_metrics(store)
    assert (event.step, event.values, event.worker, event.process) == (3, {LOSS: 1.0}, "", "")


def test_of_two_processes_at_one_element_the_last_counts_and_both_can_be_read(store: RunStore) -> None:
    for writer, rows in [("a:1", 1.0), ("b:1", 2.0), ("a:1", 3.0)]:
        line = {"stage": "pack", "step": 0, "time": 5.5, "values": {"pack/rows": rows}, "element": 0}
        store.append_line("metrics/pack.jsonl", json.dumps(line | {"worker": "w", "process": writer}).encode())
    tail = MetricsTail(store)
    assert [event.values["pack/rows"] for event in tail.read()] == [3.0]
    assert [(event.process, event.values["pack/rows"]) for event in tail.read_of_processes()] == [
        ("a:1", 3.0),
        ("b:1", 2.0),
    ]


def test_one_stage_or_all_can_be_read(store: RunStore) -> None:
    MetricsWriter(store, "train").write(0, {LOSS: 1.0})
    MetricsWriter(store, "pack").write(0, {"pack/rows": 1.0})
    assert [event.stage for event in read_metrics(store)] == ["pack", "train"]
    assert [event.stage for event in read_metrics(store, "train")] == ["train"]
    assert read_metrics(store, "reward") == []


def test_a_torn_line_is_passed_over_wherever_it_is(tmp_path: Path) -> None:
    store = RunStore.open(tmp_path)
    writer = MetricsWriter(store, "train")
    writer.write(0, {LOSS: 1.0})
    file = tmp_path / "metrics" / "train.jsonl"
    whole = file.read_bytes()
    next_line = whole.replace(b'"step":0', b'"step":9')
    for length in range(len(next_line) - 1):
        file.write_bytes(whole + next_line[:length])
        assert [event.step for event in read_metrics(store)] == [0]
    writer.write(1, {LOSS: 2.0})
    assert [event.step for event in read_metrics(store)] == [0, 1]


def test_a_tail_sees_what_was_added_and_a_line_that_was_still_in_the_writing():
    store = RunStore.in_memory()
    MetricsWriter(store, "train").write(0, {"trainer/loss": 1.0})
    tail = MetricsTail(store)
    assert [event.step for event in tail.read()] == [0]
    whole = store.get("metrics/train.jsonl")
    store.put(
        "metrics/train.jsonl", whole + whole.replace(b'"step":0', b'"step":1').replace(b'"step": 0', b'"step": 1')[:-9]
    )
    assert [event.step for event in tail.read()] == [0]
    store.put(
        "metrics/train.jsonl", whole + whole.replace(b'"step":0', b'"step":1').replace(b'"step": 0', b'"step": 1')
    )
    assert [event.step for event in tail.read()] == [0, 1]
