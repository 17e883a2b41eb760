"""A run directory as the stages write it, without sampling or training: for the tests of those who only read one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from schemas import run_layout
from schemas.manifest import PolicyCommit, ShardManifest, TrainerCommit
from schemas.metrics import MetricsWriter
from schemas.recipe import Recipe
from schemas.recipe_io import recipe_to_json
from schemas.records import PackedBatch, ScoredBatch, ScoredRollout, VersionSpan
from schemas.store import RunStore
from stages.group import group
from stages.pack import pack
from stages.shards import freeze_step, write_dead_letters, write_shard
from tests.stages.worked_batches import RUN, failed, failure, scored, scored_batch

SAMPLES, ROW_TOKENS, STEPS = 4, 8, 3
RECIPE = Recipe(
    name="written",
    rollout={"samples_per_prompt": SAMPLES, "branch_tokens": ROW_TOKENS, "prompts_per_step": 2},
    trainer={"row_tokens": ROW_TOKENS, "steps": STEPS},
)


def write_run(folder: Path) -> RunStore:
    """Steps 0 and 1 are trained, step 2 waits. In step 1 sample 1/2 failed; in step 0 group 1 has equal rewards."""
    store = RunStore.open(folder)
    store.put_new(run_layout.CONFIG, recipe_to_json(RECIPE))
    for version in range(3):
        write_policy(store, version)
    for step in range(STEPS):
        manifest = write_shard(store, packed(step), RUN)
        write_metrics(store, step, manifest)
        if step < 2:
            freeze_step(store, step, step, [manifest])
    write_dead_letters(store, [failure(1, 2)])
    return store


def packed(step: int) -> PackedBatch:
    """2 groups of 4 with rewards 0, 1, 0, 1, sampled by policy `step`."""
    batch = scored_batch(groups=2, step=step)
    samples = [sampled_by(step, sample) for sample in batch.rollouts]
    if step == 0:
        samples[4:] = [replace(sample, reward=1.0) for sample in samples[4:]]
    if step == 1:
        samples[6] = scored(failed(1, 2, step=1))
    return pack(group(ScoredBatch(batch.prompts, tuple(samples)), samples=SAMPLES), row_tokens=ROW_TOKENS)


def sampled_by(version: int, sample: ScoredRollout) -> ScoredRollout:
    spans = tuple(VersionSpan(span.start, span.end, version) for span in sample.rollout.versions)
    return replace(sample, rollout=replace(sample.rollout, versions=spans))


def write_policy(store: RunStore, version: int) -> None:
    """A commit with something in the place of its weights; the readers in question do not open those."""
    digest = hashlib.sha256(str(version).encode()).hexdigest()
    commit = PolicyCommit(
        version=version,
        parent=version - 1 if version else None,
        digest=digest,
        bytes=4096,
        parameters=1024,
        source="step" if version else "random",
        fencing_token="",
        created_at=1000.0 + version,
    )
    store.put(f"{run_layout.policy(version)}/{digest}/weights", b"weights")
    store.put_new(run_layout.policy_commit(version), commit.to_json())
    if version == 2:
        store.put(f"{run_layout.trainer_state(version)}/{digest}/state", b"state")
        state = TrainerCommit(version=version, digest=digest, created_at=1002.5)
        store.put_new(run_layout.trainer_commit(version), state.to_json())


def write_metrics(store: RunStore, step: int, manifest: ShardManifest) -> None:
    """What the stages record of a step that took ten seconds: 4 of rollout, 2 of training."""
    start = 1000.0 + 10 * step
    _write(store, "prompts", step, start, {"groups": 2, "deferrals": 0, "deferred_seconds": 0, "lag_steps": 0})
    rollout = {
        "trajectories": 8,
        "failed_trajectories": manifest.tombstones,
        "prompt_tokens": 6,
        "sampled_tokens": manifest.sampled_tokens,
        "seconds": 4.0,
        "decode_seconds": 3.0,
        "environment_seconds": 1.0,
        "branch_tokens/mean": 2.5,
        "branch_tokens/max": 4,
    }
    _write(store, "rollout", step, start + 4, rollout)
    reward = {"trajectories": 8, "failed_trajectories": 0, "total/mean": 0.5, "success/fraction": 0.5, "seconds": 0.5}
    _write(store, "reward", step, start + 5, reward)
    _write(store, "group", step, start + 6, {"groups": 2, "duplicates": 1, "tombstones": manifest.tombstones})
    pack_values = {"trajectories": 8 - manifest.tombstones, "unplaced_trajectories": manifest.tombstones, "rows": 6}
    _write(store, "pack", step, start + 6, pack_values | {"tokens": 20})
    shards = {"bytes": manifest.bytes, "trajectories": 8, "tokens": manifest.tokens, "seconds": 0.5, "quarantined": 0}
    _write(store, "shards", step, start + 7, shards)
    if step < 2:
        train = {
            "trained_groups": 1 if step == 0 else 2,
            "equal_groups": 1 if step == 0 else 0,
            "trained_tokens": manifest.sampled_tokens,
            "loss": -0.25 * step,
            "lag_steps/max": 0,
            "seconds": 2.0,
            "update_seconds": 1.0,
            "publish_seconds": 0.5,
        }
        _write(store, "train", step, start + 10, train, part="trainer")


def _write(
    store: RunStore, stage: str, step: int, at: float, values: Mapping[str, float], part: str | None = None
) -> None:
    named = {f"{part or stage}/{name}": value for name, value in values.items()}
    labels = {} if stage == "train" else {"element": 0}
    MetricsWriter(store, stage, clock=lambda: at).write(step, named, **labels)
