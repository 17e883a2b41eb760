import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jax_core import committed_trees, orbax_files, tree_places
from jax_core.policies import (
    MissingVersionError,
    PolicyCache,
    PolicyStore,
    StalePublisherError,
    TrainerStore,
    tree_digest,
)
from jax_core.tree_places import CACHE_VARIABLE
from schemas import run_layout
from schemas.errors import DamagedDataError, UserError
from schemas.store import RunStore

REPOSITORY = Path(__file__).parents[2]


def weights(seed: int = 0) -> dict:
    draw = np.random.default_rng(seed)
    return {
        "embedding": draw.normal(size=(24, 16)).astype(np.float32),
        "layers": {
            "0": {"w": draw.normal(size=(16, 16)).astype(ml_dtypes.bfloat16), "scale": np.ones(16, np.float32)},
            "1": {"w": draw.normal(size=(16, 16)).astype(ml_dtypes.bfloat16), "scale": np.ones(16, np.float32)},
        },
        "steps": np.array(seed, np.int32),
    }


@pytest.fixture
def local(tmp_path) -> RunStore:
    return RunStore.open(tmp_path / "run")


@pytest.fixture(params=["local", "objects"])
def store(request, tmp_path, monkeypatch) -> RunStore:
    """What holds of both kinds of store."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return RunStore.open(tmp_path / "run") if request.param == "local" else RunStore.in_memory()


def publish_through(policies: PolicyStore, newest: int) -> None:
    for version in range(newest + 1):
        policies.publish(version, weights(version), source="step" if version else "random")


def assert_same_bits(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def files_of(store: RunStore, folder: str) -> list[Path]:
    return [store.root / key for key in store.list(folder) if not key.endswith("COMMIT.json")]


# Round trips


def test_weights_come_back_bit_for_bit_without_a_template(store):
    nan_payloads = np.array([0x7FC01234, 0xFFC00001, 0x7F800001], np.uint32).view(np.float32)
    params = {
        "negative_zeros": np.full((3, 2), -0.0, np.float32),
        "zeros": np.zeros((3, 2), np.float32),
        "nans": nan_payloads,
        "bfloat16": np.array([0x8000, 0x7FC1, 0xFF81, 0x3F80], np.uint16).view(ml_dtypes.bfloat16),
        "integers": {"a": np.arange(5, dtype=np.int32), "b": np.array([2**63 - 1, -(2**63)])},
        "scalar": np.array(2.5, np.float32),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "10": {"x": np.ones(1, np.float32)},
        "9": {"x": np.full(1, 2, np.float32)},
    }
    PolicyStore(store).publish(0, params, source="random")
    assert_same_bits(PolicyStore(store).load(0), params)


def test_jax_arrays_come_back_as_the_numpy_arrays_of_their_bits(store):
    params = jax.tree.map(jnp.asarray, weights())
    PolicyStore(store).publish(0, params, source="random")
    loaded = PolicyStore(store).load(0)
    assert_same_bits(loaded, params)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(loaded))


def test_large_weights_lie_in_several_files_and_orbax_reads_them_by_itself(local, monkeypatch):
    monkeypatch.setattr(orbax_files, "_FILE_BYTES", 2**20)
    draw = np.random.default_rng(0)
    large = {"a": draw.normal(size=(3, 2**18)).astype(np.float32), "b": {"c": draw.normal(size=(700, 700))}}
    policies = PolicyStore(local)
    commit = policies.publish(0, large, source="random")
    assert max(path.stat().st_size for path in files_of(local, run_layout.policy(0))) < commit.bytes / 2
    assert_same_bits(policies.load(0), large)
    folder = local.root / run_layout.policy(0) / commit.digest
    assert_same_bits(ocp.PyTreeCheckpointHandler().restore(folder), large)


def test_a_commit_says_what_was_published(store):
    policies = PolicyStore(store)
    policies.publish(0, weights(0), source="warm_start")
    commit = policies.publish(1, weights(1), source="step", fencing_token="host-7")
    assert commit == PolicyStore(store).commit(1)
    assert (commit.version, commit.parent, commit.source, commit.fencing_token) == (1, 0, "step", "host-7")
    assert commit.digest == tree_digest(weights(1))
    assert commit.parameters == 24 * 16 + 2 * (16 * 16 + 16) + 1
    assert commit.bytes == 4 * 24 * 16 + 2 * (2 * 16 * 16 + 4 * 16) + 4
    assert policies.commit(0).parent is None


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"a": {}, "b": np.ones(1)},
        {"a": [np.ones(1)]},
        {1: np.ones(1)},
        {"a": np.zeros((0, 3))},
        {"a": np.array([None])},
        {"a": np.ones(1, ">f4")},
        {"a.b": np.ones(1), "a": {"b": np.zeros(1)}},
    ],
)
def test_params_that_would_not_come_back_as_they_are_are_refused(store, params):
    with pytest.raises(ValueError):
        PolicyStore(store).publish(0, params, source="random")
    assert PolicyStore(store).latest() is None


def test_the_digest_tells_names_dtypes_shapes_and_bits_apart_and_nothing_else():
    one = {"a": np.array([1.0, 2.0], np.float32), "b": np.zeros(2, np.float32)}
    others = [
        {"a": one["a"], "c": one["b"]},
        {"a": one["b"], "b": one["a"]},
        {"a": one["a"].reshape(2, 1), "b": one["b"]},
        {"a": one["a"].view(np.int32), "b": one["b"]},
        {"a": one["a"], "b": -one["b"]},
        {"a": {"b": one["a"]}, "b": one["b"]},
    ]
    assert len({tree_digest(tree) for tree in [one, *others]}) == 1 + len(others)
    backwards = {"b": jnp.zeros(2), "a": jnp.array([1.0, 2.0])}
    assert tree_digest(backwards) == tree_digest(one)


# Compare and set


@pytest.mark.parametrize("objects", ["one store object", "one a thread"])
def test_of_sixteen_publishers_of_one_version_exactly_one_wins(store, objects):
    PolicyStore(store).publish(0, weights(0), source="random")
    shared = PolicyStore(store)
    start = threading.Barrier(16)

    def publish(seed: int):
        policies = shared if objects == "one store object" else PolicyStore(store)
        start.wait()
        try:
            return policies.publish(1, weights(seed), source="step", fencing_token=str(seed))
        except StalePublisherError as error:
            return error

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(publish, range(100, 116)))
    winners = [result for result in results if not isinstance(result, StalePublisherError)]
    assert len(winners) == 1
    assert_same_bits(PolicyStore(store).load(1), weights(int(winners[0].fencing_token)))
    assert store.folders(run_layout.policy(1)) == [winners[0].digest]


def test_sixteen_publishers_of_the_same_bits_all_get_the_one_commit(store):
    PolicyStore(store).publish(0, weights(0), source="random")
    start = threading.Barrier(16)

    def publish(token: int):
        start.wait()
        return PolicyStore(store).publish(1, weights(1), source="step", fencing_token=str(token))

    with ThreadPoolExecutor(16) as pool:
        commits = list(pool.map(publish, range(16)))
    assert commits == [PolicyStore(store).commit(1)] * 16
    assert_same_bits(PolicyStore(store).load(1), weights(1))


@pytest.mark.parametrize("gap", ["policy-before-rename", "policy-before-commit"])
@pytest.mark.parametrize("rival_seed", [1, 2])
def test_a_rival_that_commits_in_any_gap_wins_and_the_other_agrees_or_is_stale(store, monkeypatch, gap, rival_seed):
    policies, rival = PolicyStore(store), PolicyStore(store)
    policies.publish(0, weights(0), source="random")

    def rival_strikes(point: str) -> None:
        if point == gap:
            for module in (committed_trees, tree_places):
                monkeypatch.setattr(module, "crash_point", lambda point: None)
            rival.publish(1, weights(rival_seed), source="step", fencing_token="rival")

    for module in (committed_trees, tree_places):
        monkeypatch.setattr(module, "crash_point", rival_strikes)
    if rival_seed == 1:
        assert policies.publish(1, weights(1), source="step", fencing_token="ours").fencing_token == "rival"
    else:
        with pytest.raises(StalePublisherError, match="policy version 1"):
            policies.publish(1, weights(1), source="step", fencing_token="ours")
    assert_same_bits(policies.load(1), weights(rival_seed))


def test_a_stale_trainer_loses(store):
    stale = PolicyStore(store)
    publish_through(stale, 1)
    other = PolicyStore(store)
    other.publish(2, weights(2), source="step")
    other.publish(3, weights(3), source="step")
    with pytest.raises(StalePublisherError, match=r"policy version 2: .*another trainer"):
        stale.publish(2, weights(99), source="step")
    assert_same_bits(stale.load(2), weights(2))
    assert stale.latest() == 3


def test_a_pruned_version_can_never_be_published_again_with_other_weights(store):
    policies = PolicyStore(store)
    publish_through(policies, 2)
    first = policies.commit(1)
    policies.prune(keep=())
    with pytest.raises(StalePublisherError):
        PolicyStore(store).publish(1, weights(99), source="step")
    assert PolicyStore(store).publish(1, weights(1), source="step") == first


def test_only_the_successor_of_the_newest_version_can_be_published(store):
    policies = PolicyStore(store)
    with pytest.raises(StalePublisherError, match="so the next is 0"):
        policies.publish(1, weights(), source="step")
    policies.publish(0, weights(), source="random")
    for version in (2, -1):
        with pytest.raises(StalePublisherError, match="so the next is 1"):
            policies.publish(version, weights(), source="step")
    assert policies.versions() == [0]


def test_publishing_the_same_bits_again_returns_the_commit_that_holds_them(store):
    policies = PolicyStore(store)
    publish_through(policies, 2)
    for version in range(3):
        assert PolicyStore(store).publish(version, weights(version), source="step") == policies.commit(version)


def test_latest_follows_other_publishers_and_never_goes_backwards(local):
    reader, publisher = PolicyStore(local), PolicyStore(local)
    assert reader.latest() is None
    publish_through(publisher, 2)
    assert reader.latest() == 2
    shutil.rmtree(local.root / run_layout.policy(2))
    assert reader.latest() == 2
    with pytest.raises(MissingVersionError, match="policy version 2"):
        reader.load(2)


# Kills


KILLS = [
    "policy-before-rename",
    "policy-before-commit",
    "after-commit",
    "trainer-before-rename",
    "trainer-before-commit",
    "after-trainer-commit",
]
# Forks: importing JAX once for all of them is most of the time. Nothing has started a thread before the forks.
RUNS_TO_KILL = """
import os, sys
import numpy as np
from jax_core.policies import PolicyStore, TrainerStore
from schemas.store import RunStore

def publish_two_versions(store):
    for version in (0, 1):
        tree = {"w": np.full(4, version, np.float32)}
        PolicyStore(store).publish(version, tree, source="step")
        TrainerStore(store).save(version, tree)

for point in sys.argv[2:]:
    if os.fork() == 0:
        os.environ["ROLLSTREAM_CRASH_AT"] = point + ":2"
        publish_two_versions(RunStore.open(os.path.join(sys.argv[1], point)))
        os._exit(0)
    print(point, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory) -> dict[str, Path]:
    """One run a gap: version 0 is whole, and the process was killed in that gap of version 1."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-c", RUNS_TO_KILL, str(folder), *KILLS]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=REPOSITORY)
    assert finished.stdout.splitlines() == [f"{point} {-signal.SIGKILL}" for point in KILLS]
    return {point: folder / point for point in KILLS}


def version_one(seed: float = 1) -> dict:
    return {"w": np.full(4, seed, np.float32)}


@pytest.mark.parametrize("repeated_exactly", [True, False])
@pytest.mark.parametrize("point", KILLS[:2])
def test_a_publish_killed_before_its_commit_is_not_seen_and_is_replaced(killed_runs, tmp_path, point, repeated_exactly):
    shutil.copytree(killed_runs[point], tmp_path / "run")
    store = RunStore.open(tmp_path / "run")
    policies, params = PolicyStore(store), version_one(1 if repeated_exactly else 7)
    assert files_of(store, run_layout.policy(1)), "the kill left nothing behind, so this test tests nothing"
    assert (policies.latest(), policies.versions()) == (0, [0])
    with pytest.raises(MissingVersionError):
        policies.load(1)

    commit = policies.publish(1, params, source="step")
    assert_same_bits(PolicyStore(store).load(1), params)
    left = {path.name for path in (store.root / run_layout.policy(1)).iterdir()}
    assert left == {"COMMIT.json", commit.digest}


def test_a_publish_killed_after_its_commit_is_published(killed_runs):
    policies = PolicyStore(RunStore.open(killed_runs["after-commit"]))
    assert policies.latest() == 1
    assert_same_bits(policies.load(1), version_one())
    assert policies.publish(1, version_one(), source="step") == policies.commit(1)


@pytest.mark.parametrize("point", KILLS[3:])
def test_a_killed_save_of_the_trainer_state_is_whole_or_not_there_and_can_be_repeated(killed_runs, tmp_path, point):
    shutil.copytree(killed_runs[point], tmp_path / "run")
    states = TrainerStore(RunStore.open(tmp_path / "run"))
    assert states.newest_at_most(1) == (1 if point == "after-trainer-commit" else 0)
    states.save(1, version_one())
    assert states.newest_at_most(1) == 1
    assert_same_bits(states.load(1, like=version_one()), version_one())


@pytest.mark.parametrize("point", KILLS)
def test_a_sweep_removes_what_a_kill_left_and_nothing_that_was_committed(killed_runs, tmp_path, point):
    shutil.copytree(killed_runs[point], tmp_path / "run")
    store = RunStore.open(tmp_path / "run")
    policies, states = PolicyStore(store), TrainerStore(store)
    # As two more kills would have: in the middle of a pruning, and of a write whose version was then committed.
    for hidden in (f"{run_layout.policy(0)}/.pruned-1/weights", f"{run_layout.trainer_state(0)}/.writing-2/state"):
        store.put(hidden, b"half a file")
    committed = policies.versions(), states.newest_at_most(9)
    policies.sweep()
    states.sweep()
    assert (policies.versions(), states.newest_at_most(9)) == committed
    for version in [*(store.root / "policies").iterdir(), *(store.root / "trainer").iterdir()]:
        digest = json.loads((version / "COMMIT.json").read_bytes())["digest"]
        assert {path.name for path in version.iterdir()} == {"COMMIT.json", digest}
    assert_same_bits(policies.load(0), version_one(0))


def test_a_damaged_leftover_is_not_adopted(killed_runs, tmp_path):
    shutil.copytree(killed_runs["policy-before-commit"], tmp_path / "run")
    store = RunStore.open(tmp_path / "run")
    for path in files_of(store, run_layout.policy(1)):
        path.write_bytes(path.read_bytes()[:-1])
    PolicyStore(store).publish(1, version_one(), source="step")
    assert_same_bits(PolicyStore(store).load(1), version_one())


# Damage


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]


def damaged_files(whole: bytes) -> list[bytes]:
    """`whole` with one bit flipped, in some places from the first byte to the last, and cut, and longer."""
    places = {*range(0, len(whole), max(1, len(whole) // 10)), len(whole) - 1}
    return [*(flipped(whole, place) for place in places), whole[: len(whole) // 2], whole[:-1], b"", whole + b"\0"]


def test_damage_to_any_stored_file_is_refused_by_the_version_and_never_half_read(local):
    policies = PolicyStore(local)
    policies.publish(0, weights(), source="random")
    files = files_of(local, run_layout.policy(0))
    assert len(files) > 3
    for path in files:
        whole = path.read_bytes()
        for damaged in damaged_files(whole):
            path.write_bytes(damaged)
            with pytest.raises(DamagedDataError, match="policy version 0"):
                policies.load(0)
        path.unlink()
        with pytest.raises(DamagedDataError, match="policy version 0"):
            policies.load(0)
        path.write_bytes(whole)
    assert_same_bits(policies.load(0), weights())


def test_whole_files_of_other_weights_are_refused(local):
    policies = PolicyStore(local)
    publish_through(policies, 1)
    zero, one = (local.root / run_layout.policy(version) / policies.commit(version).digest for version in (0, 1))
    shutil.rmtree(one)
    shutil.copytree(zero, one)
    with pytest.raises(DamagedDataError, match=r"policy version 1 .*digest"):
        policies.load(1)


def test_a_commit_that_is_torn_or_of_another_version_is_refused_by_name(store):
    policies = PolicyStore(store)
    publish_through(policies, 1)
    commit = store.get(run_layout.policy_commit(1))
    for data in (commit[:-20], store.get(run_layout.policy_commit(0))):
        store.put(run_layout.policy_commit(1), data)
        with pytest.raises(DamagedDataError, match=r"policies/00000001/COMMIT\.json"):
            policies.load(1)
    store.put(run_layout.policy_commit(1), commit)
    promised, other = policies.commit(1).digest.encode(), policies.commit(0).digest.encode()
    store.put(run_layout.policy_commit(1), commit.replace(promised, other))
    with pytest.raises(DamagedDataError, match="policy version 1"):
        policies.load(1)


# Pruning


def test_prune_keeps_what_is_asked_and_always_the_newest(store):
    policies = PolicyStore(store)
    publish_through(policies, 4)
    policies.prune(keep=[0, 2, 77])
    assert policies.versions() == PolicyStore(store).versions() == [0, 2, 4]
    policies.prune(keep=[])
    assert policies.versions() == PolicyStore(store).versions() == [4]
    assert_same_bits(policies.load(4), weights(4))


def test_a_pruned_version_is_missing_by_name_and_its_commit_stays(local):
    policies = PolicyStore(local)
    publish_through(policies, 2)
    policies.prune(keep=[])
    with pytest.raises(MissingVersionError, match=r"policy version 1: .*pruned\. Stored: 2"):
        policies.load(1)
    assert policies.commit(1).digest == tree_digest(weights(1))
    assert local.list(run_layout.policy(1)) == [run_layout.policy_commit(1)]
    assert PolicyStore(local).latest() == 2
    with pytest.raises(MissingVersionError, match=r"policy version 3: was never committed"):
        policies.load(3)


# Manners


QUIET_AND_FULL = """
import logging, resource, sys
logging.basicConfig(level=logging.INFO)
logging.getLogger("absl").setLevel(logging.INFO)
logging.getLogger("jax").setLevel(logging.WARNING)
from jax_core.policies import PolicyStore
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "the import started a device"
import numpy as np
from schemas.errors import DamagedDataError, UserError
from schemas.store import RunStore
store = RunStore.open(sys.argv[1])
policies = PolicyStore(store)
params = {f"w{i}": np.random.default_rng(i).normal(size=(50, 20)).astype(np.float32) for i in range(40)}
policies.publish(0, params, source="random")
assert policies.load(0)["w7"].tobytes() == params["w7"].tobytes()
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit in (100, 60_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
    try:
        policies.publish(1, params, source="step")
    except UserError as error:
        assert "policies/00000001" in str(error) and "could not be written" in str(error), error
    else:
        raise AssertionError("the disk was not full")
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert not list((store.root / "policies/00000001").iterdir())
assert policies.versions() == [0] and not any(key.startswith("policies/00000001") for key in store.list())
policies.publish(1, params, source="step")
largest = max((store.root / "policies/00000001").rglob("*"), key=lambda path: path.stat().st_size)
largest.write_bytes(b"")
try:
    policies.load(1)
except DamagedDataError:
    print("done")
"""


def test_nothing_is_logged_or_warned_and_a_full_disk_is_one_error_that_leaves_nothing(tmp_path):
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", QUIET_AND_FULL, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "done\n", "")


# Optimizer states


def optimizer_state() -> tuple[optax.GradientTransformation, dict]:
    """An optimizer, and a state of it with arbitrary numbers."""
    schedule = optax.linear_schedule(1e-3, 1e-4, 10)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, mu_dtype=jnp.bfloat16))
    draw = np.random.default_rng(0)
    shapes = jax.eval_shape(optimizer.init, weights())
    state = jax.tree.map(lambda leaf: np.asarray(draw.normal(size=leaf.shape) * 100).astype(leaf.dtype), shapes)
    return optimizer, {"params": weights(), "opt_state": state, "position": 17}


def test_an_optimizer_state_comes_back_in_its_own_structure_bit_for_bit(store):
    optimizer, tree = optimizer_state()
    commit = TrainerStore(store).save(3, tree)
    assert commit.digest == tree_digest(tree)
    concrete = {"params": weights(1), "opt_state": optimizer.init(weights(1)), "position": 0}
    abstract = concrete | {"opt_state": jax.eval_shape(optimizer.init, weights(1))}
    for like in (concrete, abstract):
        loaded = TrainerStore(store).load(3, like=like)
        assert_same_bits(loaded, tree)
        assert type(loaded["position"]) is int


def test_a_state_of_another_optimizer_or_model_is_refused_by_the_leaf_that_differs(store):
    _, tree = optimizer_state()
    states = TrainerStore(store)
    states.save(3, tree)
    params = tree["params"]
    with pytest.raises(UserError, match=r"trainer state 3: .*opt_state/"):
        states.load(3, like=tree | {"opt_state": optax.sgd(1.0).init(params)})
    with pytest.raises(UserError, match=r"params/extra is missing"):
        states.load(3, like=tree | {"params": params | {"extra": jnp.ones(1)}})
    with pytest.raises(UserError, match=r"params/embedding is float32\(24, 16\), not float32\(24, 17\)"):
        states.load(3, like=tree | {"params": params | {"embedding": jnp.ones((24, 17))}})


def test_a_state_without_arrays_can_be_saved(store):
    state = optax.sgd(0.1).init(weights())
    assert not jax.tree.leaves(state)
    TrainerStore(store).save(0, state)
    assert TrainerStore(store).newest_at_most(0) == 0
    assert TrainerStore(store).load(0, like=state) == state


def test_a_resume_starts_at_the_newest_state_that_is_not_ahead_of_the_weights(store):
    states = TrainerStore(store)
    assert states.newest_at_most(100) is None
    for version in (0, 10, 20):
        states.save(version, weights(version))
    assert [states.newest_at_most(version) for version in (0, 9, 10, 19, 20, 21)] == [0, 0, 10, 10, 20, 20]
    states.prune(keep=[0])
    assert [states.newest_at_most(version) for version in (19, 20)] == [0, 20]


def test_a_state_saved_again_is_harmless_and_another_content_is_stale(store):
    states = TrainerStore(store)
    first = states.save(5, weights(5))
    assert TrainerStore(store).save(5, weights(5)) == first
    with pytest.raises(StalePublisherError, match="trainer state 5"):
        states.save(5, weights(6))
    assert_same_bits(states.load(5, like=weights(5)), weights(5))


def test_a_pruned_state_that_is_made_again_is_stored_again(store):
    states = TrainerStore(store)
    first = states.save(5, weights(5))
    states.save(6, weights(6))
    states.prune(keep=[])
    assert states.newest_at_most(5) is None
    assert states.save(5, weights(5)) == first
    assert_same_bits(states.load(5, like=weights(5)), weights(5))
    assert states.newest_at_most(5) == 5


def test_policies_and_trainer_states_do_not_share_a_name(store):
    PolicyStore(store).publish(0, weights(1), source="random")
    TrainerStore(store).save(0, weights(2))
    assert_same_bits(PolicyStore(store).load(0), weights(1))
    assert_same_bits(TrainerStore(store).load(0, like=weights(2)), weights(2))


def test_a_damaged_trainer_state_is_refused_by_name(local):
    states = TrainerStore(local)
    states.save(4, weights())
    for path in files_of(local, run_layout.trainer_state(4)):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedDataError, match=r"trainer state 4 \(trainer/00000004\)"):
        states.load(4, like=weights())


# The cache


@dataclasses.dataclass
class CountedPolicies:
    """A PolicyStore that counts its loads."""

    policies: PolicyStore
    loads: list[int] = dataclasses.field(default_factory=list)

    def load(self, version: int) -> dict:
        self.loads.append(version)
        return self.policies.load(version)


def test_eight_threads_load_a_version_once(store):
    publish_through(PolicyStore(store), 1)
    counted = CountedPolicies(PolicyStore(store))
    cache = PolicyCache(counted, size=2)
    start = threading.Barrier(8)

    def ask(thread: int) -> list:
        start.wait()
        return [cache.get((thread + turn) % 2) for turn in range(20)]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert sorted(counted.loads) == [0, 1]
    for thread, params in enumerate(answers):
        assert all(params[turn] is cache.get((thread + turn) % 2) for turn in range(20))
    assert_same_bits(cache.get(1), weights(1))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(cache.get(1)))


def test_the_least_recently_used_policy_goes_first(store):
    publish_through(PolicyStore(store), 2)
    counted = CountedPolicies(PolicyStore(store))
    cache = PolicyCache(counted, size=2)
    for version in (0, 1, 0, 2, 0, 1):
        cache.get(version)
    assert counted.loads == [0, 1, 2, 1]


def test_params_that_were_put_are_served_without_a_load(store):
    counted = CountedPolicies(PolicyStore(store))
    cache, params = PolicyCache(counted), weights()
    cache.put(7, params)
    assert cache.get(7) is params
    assert counted.loads == []


def test_a_failed_load_reaches_every_asker_and_is_tried_again(store):
    policies = PolicyStore(store)
    cache = PolicyCache(policies)
    with pytest.raises(MissingVersionError):
        cache.get(0)
    publish_through(policies, 0)
    assert_same_bits(cache.get(0), weights(0))
