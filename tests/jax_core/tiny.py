"""Small models and hand-made trajectories that the tests of jax_core share."""

from __future__ import annotations

import numpy as np

from jax_core.models.config import ModelConfig
from jax_core.models.decoder import Params, init_params
from schemas.identity import TrajectoryId, seed_words
from schemas.recipe import Recipe
from schemas.records import Group, Placement, Rollout, SamplingRecord, ScoredRollout, ShardContent, VersionSpan

ALPHABET = "abcdefghijklmnopqrst"
VOCAB = len(ALPHABET) + 2
CONFIG = ModelConfig.llama(
    vocab_size=VOCAB,
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    head_width=8,
    mlp_width=48,
    rope_theta=10_000.0,
    norm_epsilon=1e-5,
    tied_head=False,
)


def params(seed: int = 0, config: ModelConfig = CONFIG) -> Params:
    """Weights whose distributions are far from uniform, so that mistakes show."""
    made = init_params(config, seed)
    return {**made, "embedding": made["embedding"] * 40}


def recipe(**sections) -> Recipe:
    base = {
        "rollout": {"prompt_tokens": 12, "branch_tokens": 24, "samples_per_prompt": 4, "prompts_per_step": 2},
        "trainer": {"micro_batch_rows": 4, "row_tokens": 24},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    return Recipe(name="tiny", **merged)


def seeds(rows: int, run: int = 0) -> np.ndarray:
    return np.array([seed_words("tokens", run, row) for row in range(rows)], np.uint32)


def rollout(prompt, branch, mask, logprobs=None, *, step=0, group=0, sample=0, version=0) -> Rollout:
    """A rollout from literal prompt ids, branch ids and branch mask."""
    tokens = np.array([*prompt, *branch], np.int32)
    full_mask = np.array([False] * len(prompt) + list(mask))
    if logprobs is None:
        logprobs = np.where(mask, -1.0, 0.0)
    return Rollout(
        id=TrajectoryId(step, group, sample),
        prompt_id=f"prompt-{group}",
        task="test",
        tokens=tokens,
        loss_mask=full_mask,
        sampler_logprobs=np.array([*np.zeros(len(prompt)), *logprobs], np.float32),
        prompt_length=len(prompt),
        versions=(VersionSpan(len(prompt), len(tokens), version),) if any(mask) else (),
        turns=(),
        stop_reason="terminated",
        status="ok",
        error=None,
        environment={},
        sampling=SamplingRecord(1.0),
        generator="test",
        started_at=0.0,
        seconds=0.0,
    )


def content(groups: list[list[tuple[Rollout, float]]], *, row_tokens=24, one_a_row=False, element=0, first=0):
    """A shard of groups of (rollout, reward), packed next-fit, or one branch a row."""
    made, plans, row = [], [], -1
    for g, samples in enumerate(groups):
        used, places = row_tokens, []
        for made_rollout, _ in samples:
            trained = np.flatnonzero(made_rollout.loss_mask)
            if not len(trained):
                places.append(Placement(-1, -1))
                continue
            n = int(trained[-1]) + 1 - made_rollout.prompt_length
            if one_a_row or used + n > row_tokens:
                row, used = row + 1, 0
            places.append(Placement(row, used))
            used += n
        scored = tuple(ScoredRollout(r, reward, {}) for r, reward in samples)
        made.append(Group(first + g, f"prompt-{first + g}", scored))
        plans.append(tuple(places))
    return ShardContent(0, element, tuple(made), tuple(plans), row_tokens, row + 1)


def random_groups(rng: np.random.Generator, groups: int = 3, samples: int = 4) -> list[list[tuple[Rollout, float]]]:
    """Multi-turn trajectories of uneven lengths with mixed rewards."""
    made = []
    for g in range(groups):
        prompt = rng.integers(2, VOCAB, rng.integers(1, 12))
        group = []
        for s in range(samples):
            n = int(rng.integers(1, 24))
            mask = rng.random(n) < 0.5
            mask[0] = True
            branch = rng.integers(2, VOCAB, n)
            logprobs = np.where(mask, -rng.random(n) * 3, 0.0)
            group.append((rollout(prompt, branch, mask, logprobs, group=g, sample=s), float(rng.integers(0, 3))))
        made.append(group)
    return made
