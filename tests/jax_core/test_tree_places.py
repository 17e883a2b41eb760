"""Weights in an object store: objects under digests, COMMIT last, and a cache of whole trees that is never trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from obstore.store import MemoryStore

from jax_core import committed_trees, orbax_files, tree_places
from jax_core.policies import MissingVersionError, PolicyStore, TrainerStore
from jax_core.tree_places import CACHE_SIZE_VARIABLE, CACHE_VARIABLE, TreeCache
from jax_core.trees import tree_digest
from schemas import run_layout
from schemas.errors import DamagedDataError, UserError
from schemas.holds import Lease, LostHoldError
from schemas.store import RunStore
from tests.faulty_store import QUICK, FaultyStore


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TreeCache:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return TreeCache.of_this_machine()


@pytest.fixture
def store() -> RunStore:
    return RunStore.in_memory()


def weights(seed: int) -> dict[str, np.ndarray]:
    return {name: np.random.default_rng(seed).normal(size=(20, 10)).astype(np.float32) for name in "abc"}


def publish_through(store: RunStore, newest: int) -> PolicyStore:
    policies = PolicyStore(store)
    for version in range(newest + 1):
        policies.publish(version, weights(version), source="step" if version else "random")
    return policies


def is_equal(one: object, other: object) -> bool:
    return tree_digest(one) == tree_digest(other)


def empty(cache: TreeCache) -> None:
    subprocess.run(["rm", "-rf", str(cache.folder)], check=True)


def cached(cache: TreeCache) -> set[str]:
    return {path.name for path in cache.folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize("seed", range(3))
def test_versions_are_published_loaded_and_pruned_on_a_store_that_fails_and_lists_late(
    seed: int, cache: TreeCache
) -> None:
    objects = FaultyStore(refused=0.15, unanswered=0.1, late=2, seed=seed)
    store = RunStore.over(objects, "s3://bucket/run", QUICK)
    policies, states = publish_through(store, 4), TrainerStore(store)
    for version in range(5):
        states.save(version, weights(10 + version))
    assert PolicyStore(store).latest() == 4
    empty(cache)
    assert all(is_equal(PolicyStore(store).load(version), weights(version)) for version in range(5))
    policies.prune(keep=[0, 3])
    states.prune(keep=[])
    objects.late = 0
    objects._recent = []
    policies.prune(keep=[0, 3])  # what the list did not name the first time
    states.prune(keep=[])
    assert PolicyStore(store).versions() == [0, 3, 4] and states.newest_at_most(9) == 4
    for version in (1, 2):
        assert store.list(run_layout.policy(version)) == [run_layout.policy_commit(version)]
        assert not policies.is_stored(version)
        with pytest.raises(MissingVersionError, match="pruned"):
            PolicyStore(store).load(version)
    assert objects.faults["refused"] > 10 and objects.faults["late"] > 0


def test_the_newest_version_is_found_though_no_list_names_any() -> None:
    store = RunStore.over(FaultyStore(late=1000), "s3://bucket/run", QUICK)
    publish_through(store, 2)
    assert store.list() == []
    assert PolicyStore(store).latest() == 2 and PolicyStore(store).is_stored(2)


def test_who_lost_its_hold_while_it_wrote_publishes_nothing(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other has published nothing yet, so that the version is still free."""
    policies = publish_through(store, 0)
    assert store.objects is not None

    def taken_over(point: str) -> None:
        if point == "policy-before-commit":
            with monkeypatch.context() as patch:
                patch.setattr("schemas.holds._is_gone", lambda record: True)
                Lease(store.objects, store.location, "trainer")._take()

    with store.hold("trainer"):
        policies.publish(1, weights(1), source="step")
        assert policies.commit(1).fencing_token == "trainer:0"
        monkeypatch.setattr(committed_trees, "crash_point", taken_over)
        with pytest.raises(LostHoldError):
            policies.publish(2, weights(2), source="step")
    assert PolicyStore(store).latest() == 1
    assert is_equal(PolicyStore(store).load(1), weights(1))


def test_who_lost_its_hold_prunes_nothing(store: RunStore) -> None:
    """What it would keep is of the past: it would take away what the new holder needs."""
    policies = publish_through(store, 4)
    assert store.objects is not None
    with store.hold("trainer") as hold:
        store.objects.put_new(f"{run_layout.lock('trainer')}/{hold.token + 1:08d}.json", b"of another process")
        with pytest.raises(LostHoldError):
            policies.prune(keep=[0])
    assert policies.versions() == [0, 1, 2, 3, 4]


def test_files_of_two_writers_of_one_tree_are_never_mixed(store: RunStore, cache: TreeCache) -> None:
    """Orbax gives the files of equal trees other names, and other bytes, each time."""
    policies = PolicyStore(store)
    policies.publish(0, weights(0), source="random")
    first = set(store.list(run_layout.policy(0)))
    PolicyStore(store)._trees.place.write(run_layout.policy(0), weights(0), "a gap of no name")
    assert set(store.list(run_layout.policy(0))) > first, "both wrote the same files, so this test tests nothing"
    empty(cache)
    assert is_equal(policies.load(0), weights(0))
    policies.sweep()
    assert set(store.list(run_layout.policy(0))) == first


def test_what_a_killed_writer_left_is_no_tree_and_is_swept_away(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(point: str) -> None:
        if point == "policy-before-rename":
            raise Killed

    policies = publish_through(store, 0)
    before = store.list()
    monkeypatch.setattr(tree_places, "crash_point", kill)
    with pytest.raises(Killed):
        policies.publish(1, weights(1), source="step")
    assert len(store.list(run_layout.policy(1))) > 2
    assert (PolicyStore(store).latest(), PolicyStore(store).versions()) == (0, [0])
    PolicyStore(store).sweep()
    assert store.list() == before


def test_damage_to_any_object_is_refused_by_the_version(store: RunStore, cache: TreeCache) -> None:
    policies = publish_through(store, 0)
    keys = [key for key in store.list(run_layout.policy(0)) if not key.endswith("COMMIT.json")]
    assert len(keys) > 3
    for key in keys:
        whole = store.get(key)
        for damaged in (whole[:-1], b"", bytes([whole[0] ^ 1]) + whole[1:], None):
            store.delete(key) if damaged is None else store.put(key, damaged)
            empty(cache)
            with pytest.raises((DamagedDataError, MissingVersionError), match="policy version 0"):
                policies.load(0)
        store.put(key, whole)
    assert is_equal(policies.load(0), weights(0))


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "d/../../outside"])
def test_a_listing_that_names_files_elsewhere_writes_nothing_there(
    store: RunStore, cache: TreeCache, name: str, tmp_path: Path
) -> None:
    policies = publish_through(store, 0)
    key = f"{run_layout.policy(0)}/{policies.commit(0).digest}/{orbax_files.FILES}"
    store.put(key, json.dumps({name: next(iter(json.loads(store.get(key)).values()))}).encode())
    empty(cache)
    with pytest.raises(DamagedDataError, match="no file of a tree"):
        policies.load(0)
    assert not list(tmp_path.rglob("outside"))


# The cache


def test_a_version_is_fetched_once_and_not_at_all_where_it_was_written(cache: TreeCache) -> None:
    objects = FaultyStore()
    store = RunStore.over(objects, "s3://bucket/run", QUICK)
    publish_through(store, 0)
    PolicyStore(store).load(0)
    assert objects.calls["get_range"] == 0
    empty(cache)
    for _ in range(3):
        assert is_equal(PolicyStore(store).load(0), weights(0))
    listing = f"{run_layout.policy(0)}/{tree_digest(weights(0))}/{orbax_files.FILES}"
    assert objects.calls["get_range"] == len(json.loads(store.get(listing)))


def test_a_damaged_tree_in_the_cache_is_fetched_again(store: RunStore, cache: TreeCache) -> None:
    policies = publish_through(store, 0)
    for path in (cache.folder / policies.commit(0).digest).rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1])
    assert is_equal(policies.load(0), weights(0))
    assert cached(cache) == {policies.commit(0).digest}


def test_the_cache_keeps_what_was_used_last_within_its_bound(store: RunStore, cache: TreeCache, tmp_path: Path) -> None:
    policies = publish_through(store, 3)
    digests = [policies.commit(version).digest for version in range(4)]
    sizes = [sum(path.stat().st_size for path in (cache.folder / d).rglob("*") if path.is_file()) for d in digests]
    for used, version in enumerate((2, 0, 3, 1)):
        os.utime(cache.folder / digests[version], (used, used))
    TreeCache(cache.folder, most_bytes=sizes[1] + sizes[3]).prune(keep=digests[1])
    assert cached(cache) == {digests[3], digests[1]}
    TreeCache(cache.folder, most_bytes=0).prune(keep=digests[3])
    assert cached(cache) == {digests[3]}, "what was asked for stays, however large"


HALF_FETCHED = """
import os, sys
from pathlib import Path
from jax_core.tree_places import TreeCache
with TreeCache(Path(sys.argv[1]), 1e9).staging() as staging:
    (staging / "half").write_bytes(b"half a file")
    print("staged", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_reader_left_is_removed_by_the_next_and_a_living_ones_stays(cache: TreeCache) -> None:
    repository = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", HALF_FETCHED, str(cache.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=repository,
    ) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "staged\n"
        with cache.staging() as ours:
            assert set(cache.folder.glob(".writing-*")) > {ours}
        reader.kill()
    with cache.staging() as ours:
        assert list(cache.folder.glob(".writing-*")) == [ours]
    assert not list(cache.folder.glob(".writing-*"))


def test_loaded_weights_are_numpy_arrays_of_the_published_bits(store: RunStore, cache: TreeCache) -> None:
    policies = publish_through(store, 0)
    empty(cache)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(policies.load(0)))


def test_a_full_disk_under_the_cache_is_said_and_is_no_damage_to_the_run(
    store: RunStore, cache: TreeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = publish_through(store, 0)
    empty(cache)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(
            UserError, match=f"{cache.folder}: cannot be written .No space left.*ROLLSTREAM_CACHE"
        ) as said:
            policies.load(0)
        assert not isinstance(said.value, DamagedDataError)
    assert is_equal(policies.load(0), weights(0)) and not list(cache.folder.glob(".writing-*"))


def test_a_size_of_the_cache_that_is_no_number_is_refused(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_SIZE_VARIABLE, "much")
    with pytest.raises(UserError, match="ROLLSTREAM_CACHE_GB=much"):
        PolicyStore(store).latest()


def test_a_store_object_of_many_parts_comes_back_in_pieces(
    store: RunStore, monkeypatch: pytest.MonkeyPatch, cache: TreeCache
) -> None:
    monkeypatch.setattr("schemas.object_files._PIECE_BYTES", 100)
    policies = publish_through(store, 0)
    empty(cache)
    assert is_equal(policies.load(0), weights(0))


def test_two_runs_with_equal_weights_share_them_in_the_cache(cache: TreeCache) -> None:
    stores = [RunStore.over(MemoryStore(), f"s3://bucket/{name}") for name in "ab"]
    for store in stores:
        publish_through(store, 0)
    assert len(cached(cache)) == 1
