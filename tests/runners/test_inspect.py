"""What a run did can be read from its directory, whole or broken; and any token traced to who sampled it."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console, RenderableType

from runners.inspect import SERIES, Inspection, StageReport, inspect_run, merge_values, render, series_of
from runners.inspect_trajectory import inspect_trajectory, parse_path, render_trajectory, training_of
from schemas import run_layout
from schemas.errors import DamagedDataError, UserError
from schemas.identity import TrajectoryId
from schemas.manifest import ShardManifest
from schemas.metrics import METRICS, MetricEvent, read_metrics
from schemas.store import RunStore
from schemas.text import to_json
from stages.shards import write_shard
from tests.runners.written_run import RECIPE, packed, write_run
from tests.stages.worked_batches import RUN


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return write_run(tmp_path / "run")


def shown(renderable: RenderableType, width: int = 100) -> str:
    output = io.StringIO()
    Console(file=output, width=width, force_terminal=False).print(renderable)
    return output.getvalue()


def flat(text: str) -> str:
    """Without the breaks that a table's width puts in."""
    return re.sub(r"\s+", "", text)


def manifest_of(store: RunStore, step: int) -> ShardManifest:
    key = run_layout.manifest(step, 0)
    return ShardManifest.from_json(store.get(key), key)


def stage(inspection: Inspection, name: str) -> StageReport:
    return next(report for report in inspection.stages if report.stage == name)


# A whole run


def test_a_whole_run_has_no_problems(store: RunStore) -> None:
    inspection = inspect_run(store)
    assert inspection.problems == ()
    assert (inspection.name, inspection.steps_done, inspection.steps) == ("written", 2, 3)
    assert [(shard.step, shard.state, shard.use) for shard in inspection.shards] == [
        (0, "whole", "trained"),
        (1, "whole", "trained"),
        (2, "whole", "waits"),
    ]
    assert [(policy.version, policy.source, policy.stored) for policy in inspection.policies] == [
        (0, "random", True),
        (1, "step", True),
        (2, "step", True),
    ]
    assert inspection.checkpoints == (2,)
    assert (inspection.quarantine, inspection.orphans, inspection.torn_metric_lines) == ((), (), {})
    assert [letter.error for letter in inspection.dead_letters] == ["Boom: the environment broke"]


def test_records_in_are_records_out_and_dropped_with_reasons(store: RunStore) -> None:
    inspection = inspect_run(store)
    for name in ("group", "pack", "train"):
        report = stage(inspection, name)
        assert report.records_in is not None and report.records_out is not None, name
    rollout, pack, train = (stage(inspection, name) for name in ("rollout", "pack", "train"))
    assert (rollout.records_in, rollout.records_out, dict(rollout.dropped)) == (6, 24, {"failed": 1})
    assert (pack.records_in, pack.records_out, dict(pack.dropped)) == (24, 23, {"in no row": 1})
    assert dict(stage(inspection, "group").dropped) == {"came twice": 3}
    # Of 6 groups two wait for step 2's training; of the other four one had equal rewards.
    assert (train.records_in, train.records_out, dict(train.dropped)) == (6, 3, {"equal rewards": 1})


def test_seconds_rates_and_idle_shares_are_of_the_whole_run(store: RunStore) -> None:
    inspection = inspect_run(store)
    rollout = stage(inspection, "rollout")
    # From the first rollout's begin at 1000 to the last shard at 1027; three rollouts of 4 s.
    assert rollout.seconds == 12.0
    assert rollout.idle_share == pytest.approx(1 - 12 / 27)
    sampled = sum(manifest_of(store, step).sampled_tokens for step in range(3))
    assert rollout.tokens_out == sampled
    assert rollout.tokens_per_second == pytest.approx(sampled / 12)


def test_the_report_fits_a_terminal_of_100_columns(store: RunStore) -> None:
    text = shown(render(inspect_run(store)))
    assert max(map(len, text.splitlines())) <= 100
    for expected in ("Stages", "Over steps", "Shards: 3, 3 whole", "Policies: 3 versions", "Dead letters: 1"):
        assert expected in text


def test_every_metric_that_is_shown_exists() -> None:
    assert {name for name, _ in SERIES} <= {metric.name for metric in METRICS}


def test_long_tables_show_their_ends_and_what_is_damaged(tmp_path: Path) -> None:
    store = RunStore.open(tmp_path / "run")
    write_run(tmp_path / "run")
    for step in range(3, 30):
        write_shard(store, packed(step), RUN)
    store.put(manifest_of(store, 15).key, b"torn")
    text, everything = (shown(render(inspect_run(store), every_row=every_row)) for every_row in (False, True))
    assert [line.split()[0] for line in text.splitlines() if re.match(r"\d+/0 ", line)] == [
        f"{step}/0" for step in (0, 1, 2, 15, 27, 28, 29)
    ]
    assert "23 more rows" in text and "more rows" not in everything
    assert len([line for line in everything.splitlines() if re.match(r"\d+/0 ", line)]) >= 30


def test_json_holds_what_the_tables_show(store: RunStore) -> None:
    report = json.loads(to_json(inspect_run(store).to_json()))
    assert [shard["sha256"] for shard in report["shards"]] == [manifest_of(store, step).sha256 for step in range(3)]
    assert {stage["stage"]: stage["idle_share"] for stage in report["stages"]}["rollout"] == pytest.approx(15 / 27)
    assert report["series"]["reward/total/mean"] == [[0, 0.5], [1, 0.5], [2, 0.5]]


def test_a_replays_directory_says_so_and_misses_nothing(tmp_path: Path, store: RunStore) -> None:
    for folder in ("trajectories", "steps", "metrics"):
        for key in store.list(folder):
            store.delete(key)
    store.put(
        run_layout.REPLAY, json.dumps({"run": "runs/a", "changes": ["algorithm.advantage: grpo -> rloo"]}).encode()
    )
    inspection = inspect_run(store)
    assert inspection.problems == ()
    assert "replay of runs/a: algorithm.advantage: grpo -> rloo" in shown(render(inspection))


# A live or broken run


def flip(store: RunStore, key: str) -> None:
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))


def shard_key(store: RunStore) -> str:
    return manifest_of(store, 1).key


def make_newer(store: RunStore) -> None:
    newer = manifest_of(store, 1).model_copy(update={"version": 2})
    store.put(run_layout.manifest(1, 0), newer.to_json())


DAMAGES: list[tuple[str, Callable[[RunStore], None], str]] = [
    ("a bit of a shard", lambda s: flip(s, shard_key(s)), "damaged: not the bytes that were committed"),
    ("half of a shard", lambda s: s.put(shard_key(s), s.get(shard_key(s))[:100]), "damaged: 100 of"),
    ("a shard", lambda s: s.delete(shard_key(s)), "missing"),
    ("a program's age", make_newer, "too new: of version 2, and this program reads up to version 1"),
    (
        "a manifest's bytes",
        lambda s: s.put(run_layout.manifest(1, 0), b'{"schema'),
        "manifests/step-00000001/0000.json",
    ),
    ("a manifest", lambda s: s.delete(run_layout.manifest(1, 0)), "manifests/step-00000001/0000.json: is missing"),
    ("a step list", lambda s: s.delete(run_layout.step_list(0)), "steps/00000000.json: is missing"),
    ("a step list's bytes", lambda s: s.put(run_layout.step_list(0), b"\xff"), "steps/00000000.json"),
    ("a policy's commit", lambda s: s.delete(run_layout.policy_commit(1)), "policies/00000001/COMMIT.json: is missing"),
    ("a commit's bytes", lambda s: s.put(run_layout.policy_commit(2), b"[]"), "policies/00000002/COMMIT.json"),
    ("a trainer's commit", lambda s: s.put(run_layout.trainer_commit(2), b""), "trainer/00000002/COMMIT.json"),
    ("the recipe", lambda s: s.delete(run_layout.CONFIG), "config.json: is missing"),
    ("the recipe's bytes", lambda s: s.put(run_layout.CONFIG, b"{}"), "config.json"),
    ("a stage's metrics", lambda s: s.delete(run_layout.metrics("reward")), "metrics/reward.jsonl: is missing"),
    (
        "the first weights",
        lambda s: s.delete(next(key for key in s.list(run_layout.policy(0)) if key.endswith("weights"))),
        "policies/00000000: is committed, and its weights are missing",
    ),
]


@pytest.mark.parametrize(("damage", "said"), [case[1:] for case in DAMAGES], ids=[case[0] for case in DAMAGES])
def test_what_is_damaged_or_missing_is_named_and_the_rest_is_shown(
    store: RunStore, damage: Callable[[RunStore], None], said: str
) -> None:
    damage(store)
    inspection = inspect_run(store)
    assert any(said in problem for problem in inspection.problems), inspection.problems
    text = shown(render(inspection))
    assert flat(said) in flat(text)
    assert "Shards" in text and "Policies" in text
    json.loads(to_json(inspection.to_json()))


def test_a_torn_metrics_line_is_passed_over_and_counted(store: RunStore) -> None:
    path = store.local_path(run_layout.metrics("reward"))
    path.write_bytes(path.read_bytes() + b'{"stage":"reward","step":3,"val')
    inspection = inspect_run(store)
    assert inspection.torn_metric_lines == {"metrics/reward.jsonl": 1}
    assert [step for step, _ in inspection.series["reward/total/mean"]] == [0, 1, 2]
    assert "1 torn line" in shown(render(inspection))


def test_a_damaged_dead_letter_is_listed_as_damaged(store: RunStore) -> None:
    store.put(run_layout.dead_letter(0, 0, 0, "reward"), b"{")
    assert [letter.error for letter in inspect_run(store).dead_letters] == [
        "the file is damaged",
        "Boom: the environment broke",
    ]


def test_orphans_and_quarantine_are_listed(store: RunStore) -> None:
    store.put(run_layout.shard(1, 0, "0" * 64), b"of a killed writer")
    store.put(run_layout.quarantine(1, 0, "1" * 64), b"of a retry that differs")
    inspection = inspect_run(store)
    assert inspection.orphans == (run_layout.shard(1, 0, "0" * 64),)
    assert inspection.quarantine == (run_layout.quarantine(1, 0, "1" * 64),)
    assert flat("0" * 64) in flat(shown(render(inspection)))


def test_a_run_that_has_just_begun_is_no_error(tmp_path: Path, store: RunStore) -> None:
    young = RunStore.open(tmp_path / "young")
    young.put_new(run_layout.CONFIG, store.get(run_layout.CONFIG))
    inspection = inspect_run(young)
    assert inspection.problems == () and inspection.steps_done == 0
    assert "none yet" in shown(render(inspection))


def test_an_empty_folder_holds_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        inspect_run(RunStore.open(tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()


# Numbers of several elements


def test_elements_of_a_step_are_added_averaged_or_compared_by_what_they_measure() -> None:
    assert merge_values("rollout/sampled_tokens", [3, 5]) == 8
    assert merge_values("rollout/seconds", [3, 5]) == 8
    assert merge_values("reward/total/mean", [0.2, 0.4]) == pytest.approx(0.3)
    assert merge_values("rollout/branch_tokens/max", [3, 5]) == 5
    assert merge_values("rollout/policy_version", [3, 3]) == 3
    assert merge_values("reward/total/mean", [float("nan"), 0.5]) == 0.5
    assert merge_values("reward/total/mean", [float("nan")]) is None


def test_every_metric_that_is_not_a_count_is_averaged_or_a_maximum() -> None:
    added = {m.unit for m in METRICS if merge_values(m.name, [1.0, 1.0]) == 2.0}
    assert added.isdisjoint({"fraction", "tokens/s", "nats", "ratio", "reward", "1", "loss", "version", "norm"})


def test_a_series_is_in_order_of_step_whatever_the_order_of_events() -> None:
    events = [MetricEvent("reward", step, 0.0, {"reward/total/mean": step / 10}) for step in (2, 0, 1)]
    assert series_of(events, "reward/total/mean") == [(0, 0.0), (1, 0.1), (2, 0.2)]


# One trajectory


def test_a_trajectory_shows_each_token_with_mask_logprob_and_version(store: RunStore) -> None:
    view = inspect_trajectory(store, TrajectoryId(1, 0, 1))
    # P P P A A: the sample's own tokens are 10 and 11.
    assert [token.token for token in view.tokens] == [11, 12, 13, 10, 11]
    assert [token.trained for token in view.tokens] == [False] * 3 + [True] * 2
    assert [token.logprob for token in view.tokens] == [None] * 3 + [-0.5] * 2
    assert [token.version for token in view.tokens] == [None] * 3 + [1, 1]
    assert [token.role for token in view.tokens] == ["prompt"] * 3 + ["policy"] * 2
    assert "".join(token.piece for token in view.tokens[:3]) == view.turns[0].text
    assert (view.reward, view.group_rewards) == (1.0, (0.0, 1.0, 0.0, 1.0))


def test_the_advantage_is_the_one_that_the_recipe_trains_with(store: RunStore) -> None:
    advantages = [inspect_trajectory(store, TrajectoryId(1, 0, i)).advantage for i in range(4)]
    # Rewards 0, 1, 0, 1: mean 1/2, standard deviation with one degree of freedom less sqrt(1/3).
    assert advantages == pytest.approx([-(0.75**0.5), 0.75**0.5] * 2, rel=1e-5)


def test_the_update_that_trained_a_trajectory_is_named_with_its_digest(store: RunStore) -> None:
    digest = next(policy.digest for policy in inspect_run(store).policies if policy.version == 2)
    assert inspect_trajectory(store, TrajectoryId(1, 0, 0)).training == (
        f"update of step 1: version 1 -> 2, digest {digest[:16]}"
    )


@pytest.mark.parametrize(
    ("path", "reason"),
    [("0/1/0", "equal rewards"), ("1/1/2", "it failed"), ("2/0/0", "not yet")],
)
def test_what_no_update_trained_says_why(store: RunStore, path: str, reason: str) -> None:
    assert reason in inspect_trajectory(store, parse_path(path)).training


def test_a_group_that_is_too_old_says_so(store: RunStore) -> None:
    key = run_layout.manifest(1, 0)
    manifest = ShardManifest.from_json(store.get(key), key)
    sampled_by_version_0 = packed(0)
    said = training_of(
        store, RECIPE, manifest, sampled_by_version_0.groups[0], 0, sampled_by_version_0.placements[0][0], np.ones(4)
    )
    assert said == "left out: its group was sampled by version 0, more than max_lag=0 steps ago"


def test_a_tombstone_shows_its_error_and_no_trained_token(store: RunStore) -> None:
    view = inspect_trajectory(store, TrajectoryId(1, 1, 2))
    assert (view.status, view.error) == ("failed", "Boom: the environment broke")
    assert not any(token.trained for token in view.tokens)
    assert "Boom" in shown(render_trajectory(view))


def test_a_trajectory_fits_a_terminal_and_is_json(store: RunStore) -> None:
    view = inspect_trajectory(store, TrajectoryId(1, 0, 3))
    text = shown(render_trajectory(view))
    assert max(map(len, text.splitlines())) <= 100
    for token in view.tokens:
        assert re.search(rf"^{token.position} .*{token.role}.*{token.token}", text, re.MULTILINE)
    assert json.loads(to_json(view.to_json()))["tokens"][4]["logprob"] == -0.5


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("9/0/0", "has steps 0 to 2"),
        ("1/7/0", "hold groups 0 to 1"),
        ("1/0/9", "samples 0 to 3"),
        ("1/0", "not STEP/GROUP/SAMPLE"),
        ("a/b/c", "not STEP/GROUP/SAMPLE"),
    ],
)
def test_a_trajectory_that_does_not_exist_is_refused_with_what_does(store: RunStore, path: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        inspect_trajectory(store, parse_path(path))


def test_a_trajectory_in_a_damaged_shard_is_refused_by_the_shards_name(store: RunStore) -> None:
    flip(store, shard_key(store))
    with pytest.raises(UserError) as caught:
        inspect_trajectory(store, TrajectoryId(1, 0, 0))
    assert not isinstance(caught.value, DamagedDataError)
    assert shard_key(store) in caught.value.reason


def test_the_metrics_of_the_written_run_are_what_readers_get(store: RunStore) -> None:
    # Else the tests above would read an empty run.
    assert {event.stage for event in read_metrics(store)} == {
        "prompts",
        "rollout",
        "reward",
        "group",
        "pack",
        "shards",
        "train",
    }
