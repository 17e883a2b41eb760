"""Whole runs whose directory is in an object store: equal to local ones, on a store that fails, and when killed.

The S3 server is moto's, over HTTP; the store that fails is obstore's memory store with faults.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jax_core.policies import PolicyStore
from jax_core.tree_places import CACHE_VARIABLE
from pipelines.evaluate import evaluate_run, open_run
from pipelines.replay import replay
from runners import colocated
from runners.inspect import inspect_run
from schemas import object_files, run_layout
from schemas import store as store_module
from schemas.errors import UserError
from schemas.holds import Lease
from schemas.recipe_io import recipe_to_json
from schemas.store import RunStore
from stages.runtime import release
from stages.shards import orphans
from tests.faulty_store import QUICK, FaultyStore
from tests.pipelines.test_kills import NAMED, Machine, Moment, measured, sampled
from tests.pipelines.tiny_runs import Outcome, outcome, quarantined, share_parts, tiny_recipe
from tests.s3_server import BUCKET, s3_server

RECIPE = tiny_recipe()
CHAINS, BY_CLOCK = 2, 4


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture
def bucket(server: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Address of an empty place in the bucket."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{abs(hash(request.node.name))}"


@pytest.fixture(scope="module")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        share_parts(patch)
        run = tmp_path_factory.mktemp("reference") / "run"
        colocated.run(RECIPE, run)
        return run


@pytest.fixture(scope="module")
def reference(local_run: Path) -> Outcome:
    return outcome(local_run)


def shape_of(run: str | Path) -> set[str]:
    """Every key but who held the run. "*" stands for a shard's digest, which is over clocks, and for Orbax's files."""
    keys = [key for key in RunStore.open(run).list() if not key.startswith("locks/")]
    names = {re.sub(r"(?<=/[0-9a-f]{64}/).*", "*", key) for key in keys}
    return {re.sub(r"(?<=-)[0-9a-f]{64}(?=\.arrow)", "*", name) for name in names}


def test_a_run_on_s3_is_equal_to_a_local_one_bit_for_bit(
    bucket: str, local_run: Path, reference: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_parts(monkeypatch)
    colocated.run(RECIPE, bucket)
    assert outcome(bucket) == reference
    assert measured(bucket) == measured(local_run)
    assert shape_of(bucket) == shape_of(local_run)

    report = inspect_run(RunStore.open(bucket))
    assert (report.problems, report.orphans, report.quarantine, report.torn_metric_lines) == ((), (), (), {})
    shared = open_run(bucket)
    assert replay(shared, RECIPE, to=RunStore.open(f"{bucket}-replayed")).identical
    there, here = evaluate_run(shared, most_prompts=2), evaluate_run(open_run(local_run), most_prompts=2)
    assert (there.digest, there.parts) == (here.digest, here.parts)


@pytest.mark.parametrize("seed", range(2))
def test_a_run_on_a_store_that_fails_is_slow_and_lists_late_is_equal_too(
    seed: int, reference: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_parts(monkeypatch)
    objects = FaultyStore(refused=0.1, unanswered=0.1, late=3, slow_seconds=0.001, seed=seed)
    monkeypatch.setattr(store_module, "open_objects", lambda url, patience: objects)
    monkeypatch.setattr(store_module, "Patience", lambda: QUICK)
    colocated.run(RECIPE, "s3://faulty/run")
    release("s3://faulty/run")
    assert min(objects.faults[name] for name in ("refused", "unanswered", "late")) > 20
    objects.late, objects._recent = 0, []
    assert outcome("s3://faulty/run") == reference
    assert not quarantined("s3://faulty/run")


def test_a_list_that_is_late_makes_no_orphan_of_a_committed_shard(local_run: Path) -> None:
    """The data file is listed, its manifest is not yet: what looks like an orphan must not be swept."""
    objects = FaultyStore()
    store = RunStore.over(objects, "s3://bucket/run", QUICK)
    local = RunStore.open(local_run)
    for key in local.list("trajectories"):
        store.put(key, local.get(key))
    objects._recent = store.list(run_layout.manifest_prefix(1))
    assert len(objects._recent) == 2 and not store.list(run_layout.manifest_prefix(1))
    assert orphans(store) == []
    lost = run_layout.shard(1, 0, "0" * 64)
    store.put(lost, b"of a writer that was killed")
    objects._recent = store.list(run_layout.manifest_prefix(1))
    assert orphans(store) == [lost]


def test_a_run_that_is_at_work_on_s3_is_not_begun_a_second_time(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_files, "Lease", partial(Lease, seconds=0.6))
    store = RunStore.open(bucket)
    colocated.prepare_run(store, RECIPE, resume=False)
    with store.held(run_layout.CONFIG), pytest.raises(UserError, match="another process is at work"):
        colocated.run(RECIPE, bucket, resume=True)
    with pytest.raises(UserError, match="already holds a run"):
        colocated.run(RECIPE, bucket)


def test_of_two_writers_of_one_slot_on_s3_one_wins(bucket: str) -> None:
    stores = [RunStore.open(bucket) for _ in range(8)]
    start = threading.Barrier(8)

    def write(index: int, slot: str) -> bool:
        start.wait()
        return stores[index].put_new(slot, b"%d" % index)

    with ThreadPoolExecutor(8) as pool:
        for slot in ("a", "b", "c"):
            won = list(pool.map(write, range(8), [slot] * 8))
            assert sum(won) == 1 and stores[0].get(slot) == b"%d" % won.index(True)


def test_a_long_list_on_s3_comes_whole(bucket: str) -> None:
    store = RunStore.open(bucket)
    keys = [f"k/{index:04d}" for index in range(1100)]  # a page has a thousand
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
    assert store.list("k") == keys and store.folders("") == ["k"]


def test_a_large_file_on_s3_goes_up_in_parts_and_comes_back_in_pieces(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_files, "_PIECE_BYTES", 1_000_000)
    there, back = tmp_path / "there", tmp_path / "back"
    there.write_bytes(random.Random(0).randbytes(12_345_678))
    objects = RunStore.open(bucket).objects
    assert objects is not None
    objects.put_file("large", there)
    objects.get_file("large", back)
    assert back.read_bytes() == there.read_bytes()


PUBLISHING = """
import sys
from functools import partial
import numpy as np
from jax_core.policies import PolicyStore
from schemas import object_files
from schemas.holds import Lease, LostHoldError
from schemas.store import RunStore

object_files.Lease = partial(Lease, seconds=1.0)
store = RunStore.open(sys.argv[1])
with store.hold("trainer"):
    PolicyStore(store).publish(0, {"w": np.zeros(3)}, source="random")
    print("published", flush=True)
    sys.stdin.readline()
    try:
        PolicyStore(store).publish(1, {"w": np.ones(3)}, source="step")
    except LostHoldError as error:
        print(error, flush=True)
"""


def test_a_trainer_that_hung_until_another_took_over_publishes_nothing_when_it_wakes(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_files, "Lease", partial(Lease, seconds=1.0))
    with subprocess.Popen(
        [sys.executable, "-c", PUBLISHING, bucket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as hung:
        assert hung.stdout is not None and hung.stdout.readline() == "published\n"
        os.kill(hung.pid, signal.SIGSTOP)
        monkeypatch.setattr("schemas.holds._machine", lambda: "another machine")
        store = RunStore.open(bucket)
        with store.hold("trainer") as hold:
            assert hold.token == 1
            os.kill(hung.pid, signal.SIGCONT)
            said, _ = hung.communicate("\n")
            assert "hold 0 of 'trainer': was taken over by another process" in said
            assert PolicyStore(store).latest() == 0
            commit = PolicyStore(store).publish(1, {"w": np.full(3, 2.0)}, source="step")
            assert commit.fencing_token == "trainer:1"


@pytest.mark.slow
def test_a_run_on_s3_that_is_killed_at_any_moment_and_resumed_ends_as_if_it_had_not_been(
    bucket: str, local_run: Path, reference: Outcome, tmp_path: Path, own_cache: Path
) -> None:
    machine = Machine(tmp_path)
    (tmp_path / "recipe.json").write_bytes(recipe_to_json(RECIPE))
    draw = random.Random(21)
    moments = [Moment(point=point) for point in NAMED]
    moments += [Moment(seconds=draw.uniform(0.0, 3.0)) for _ in range(BY_CLOCK)]
    draw.shuffle(moments)

    def chain(index: int) -> list[str]:
        """Every moment kills a run once. Returns the runs, all of them through."""
        runs = [f"{bucket}/{index}-0"]
        for moment in moments[index::CHAINS]:
            if not machine.is_killed(runs[-1], moment):
                runs.append(f"{bucket}/{index}-{len(runs)}")
                assert machine.is_killed(runs[-1], moment), f"{moment} never came"
        machine.finish(runs[-1])
        return runs

    machine.finish(f"{bucket}/first")  # compiles what all the others find compiled
    with ThreadPoolExecutor(CHAINS) as pool:
        runs = [run for chained in pool.map(chain, range(CHAINS)) for run in chained]
    for run in runs:
        assert outcome(run) == reference
        assert sampled(run) == sampled(local_run)
        assert measured(run) == measured(local_run)
        assert shape_of(run) == shape_of(local_run)
        report = inspect_run(RunStore.open(run))
        assert (report.problems, report.orphans, report.quarantine) == ((), (), ())
    assert not list((own_cache / "trees").glob(".writing-*"))
