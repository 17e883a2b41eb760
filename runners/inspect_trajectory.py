"""One trajectory, token by token: who wrote it, how likely it was, what it earned, and which update trained it.

Left out on purpose: trajectories that no shard holds. A dead letter has the tokens of an attempt that failed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jax_core.algorithms import advantages_of
from jax_core.tokenizers import Tokenizer, make_tokenizer
from runners.report import duration, number, table
from schemas import records as r
from schemas import run_layout, trajectory
from schemas.errors import DamagedDataError, UserError
from schemas.identity import TrajectoryId
from schemas.manifest import PolicyCommit, ShardManifest, StepList
from schemas.recipe import Recipe
from schemas.recipe_io import recipe_from_json
from schemas.store import RunStore


@dataclass(frozen=True)
class TurnView:
    """Tokens [start, end) and their text."""

    role: str
    start: int
    end: int
    seconds: float
    text: str


@dataclass(frozen=True)
class TokenView:
    """One token. `logprob` (nats) and `version` are None where the policy did not sample it."""

    position: int
    role: str
    token: int
    piece: str
    trained: bool  # the loss mask
    logprob: float | None
    version: int | None


@dataclass(frozen=True)
class TrajectoryView:
    """Everything about one trajectory."""

    path: str
    prompt_id: str
    task: str
    status: str
    stop_reason: str
    error: str | None
    shard: str
    sha256: str
    pack_row: int
    pack_offset: int
    reward: float
    components: Mapping[str, float]
    group_rewards: tuple[float, ...]
    advantage: float
    advantage_name: str
    training: str  # which update trained it, or why none did
    environment: Mapping[str, Any]
    sampling: Mapping[str, float]
    generator: str
    started_at: float
    seconds: float
    turns: tuple[TurnView, ...]
    tokens: tuple[TokenView, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_path(text: str) -> TrajectoryId:
    """STEP/GROUP/SAMPLE as three numbers.

    >>> parse_path("12/3/0")
    TrajectoryId(step=12, group_index=3, sample_index=0)

    Raises:
      UserError: it is not that.
    """
    if not re.fullmatch(r"\d+/\d+/\d+", text):
        raise UserError(f"--trajectory {text}", "is not STEP/GROUP/SAMPLE.", "Write three numbers, such as 12/3/0.")
    return TrajectoryId(*map(int, text.split("/")))


def inspect_trajectory(store: RunStore, wanted: TrajectoryId) -> TrajectoryView:
    """The trajectory from its shard.

    Raises:
      UserError: the run has no such step, group or sample; or its shard is damaged.
    """
    name = f"{store.location}/{run_layout.CONFIG}"
    if not store.exists(run_layout.CONFIG):
        raise UserError(store.location, f"holds no run: there is no {run_layout.CONFIG}.", "Check the path.")
    recipe = recipe_from_json(store.get(run_layout.CONFIG), name)
    manifest, content, place = _find(store, wanted)
    group = content.groups[place]
    if wanted.sample_index >= len(group.samples):
        last = len(group.samples) - 1
        raise UserError(wanted.path, f"its group has samples 0 to {last}.", "Choose one of these.")
    return _view(store, recipe, manifest, group, content.placements[place][wanted.sample_index], wanted)


def _find(store: RunStore, wanted: TrajectoryId) -> tuple[ShardManifest, r.ShardContent, int]:
    """The shard that holds the group, and the group's place in it."""
    keys = store.list(run_layout.manifest_prefix(wanted.step))
    if not keys:
        raise UserError(wanted.path, f"the run has no shard of step {wanted.step}.", _known_steps(store))
    groups: list[int] = []
    damaged: list[str] = []
    for key in keys:
        try:
            manifest = ShardManifest.from_json(store.get(key), key)
            content = _content(store, manifest)
        except DamagedDataError as error:
            damaged.append(f"{error.offender} {error.reason}")
            continue
        for place, group in enumerate(content.groups):
            groups.append(group.group_index)
            if group.group_index == wanted.group_index:
                return manifest, content, place
    found = f"groups {min(groups)} to {max(groups)}" if groups else "no group that can be read"
    reason = f"the shards of step {wanted.step} hold {found}."
    raise UserError(wanted.path, " ".join([reason, *damaged]), "Choose one of these." if groups else "")


def _content(store: RunStore, manifest: ShardManifest) -> r.ShardContent:
    try:
        data = store.get(manifest.key)
    except FileNotFoundError:
        raise DamagedDataError(manifest.key, "is missing.", "Restore the file from a copy.") from None
    return trajectory.decode(trajectory.from_bytes(data, name=manifest.key, sha256=manifest.sha256))


def _known_steps(store: RunStore) -> str:
    steps = sorted({int(key.split("/")[2].removeprefix("step-")) for key in store.list(run_layout.manifest_prefix())})
    return f"It has steps {steps[0]} to {steps[-1]}." if steps else "It has none yet."


def _view(
    store: RunStore,
    recipe: Recipe,
    manifest: ShardManifest,
    group: r.Group,
    place: r.Placement,
    wanted: TrajectoryId,
) -> TrajectoryView:
    scored = group.samples[wanted.sample_index]
    rollout = scored.rollout
    advantages = group_advantages(recipe, group)
    tokenizer = make_tokenizer(recipe)
    return TrajectoryView(
        path=wanted.path,
        prompt_id=rollout.prompt_id,
        task=rollout.task,
        status=rollout.status,
        stop_reason=rollout.stop_reason,
        error=rollout.error,
        shard=manifest.key,
        sha256=manifest.sha256,
        pack_row=place.pack_row,
        pack_offset=place.pack_offset,
        reward=scored.reward,
        components=dict(scored.components),
        group_rewards=tuple(sample.reward for sample in group.samples),
        advantage=float(advantages[wanted.sample_index]),
        advantage_name=recipe.algorithm.advantage,
        training=training_of(store, recipe, manifest, group, wanted.sample_index, place, advantages),
        environment=dict(rollout.environment),
        sampling=asdict(rollout.sampling),
        generator=rollout.generator,
        started_at=rollout.started_at,
        seconds=rollout.seconds,
        turns=tuple(_turn_view(turn, rollout, tokenizer) for turn in rollout.turns),
        tokens=tuple(token_views(rollout, tokenizer)),
    )


def group_advantages(recipe: Recipe, group: r.Group) -> np.ndarray:
    """Advantages [G] of a group, as the run's algorithm computes them."""
    rewards = np.array([sample.reward for sample in group.samples])
    valid = np.array([sample.rollout.status == "ok" for sample in group.samples])
    return advantages_of(recipe.algorithm.advantage, rewards, valid)


def training_of(
    store: RunStore,
    recipe: Recipe,
    manifest: ShardManifest,
    group: r.Group,
    sample_index: int,
    place: r.Placement,
    advantages: np.ndarray,
) -> str:
    """Which update trained a sample of a group, or why none did."""
    step = manifest.step
    key = run_layout.step_list(step)
    if not store.exists(key):
        return f"not yet: the shards of step {step} are not frozen"
    frozen = StepList.from_json(store.get(key), key)
    if all(ref.key != manifest.key for ref in frozen.shards):
        reasons = [skipped.reason for skipped in frozen.skipped if skipped.key == manifest.key]
        return f"left out: its shard is not on the list of step {step}. {' '.join(reasons)}".rstrip()
    if reason := _why_left_out(recipe, step, group, sample_index, place, advantages):
        return f"left out: {reason}"
    commit_key = run_layout.policy_commit(step + 1)
    if not store.exists(commit_key):
        return f"not yet: step {step} has its list of shards, but policy version {step + 1} is not committed"
    digest = PolicyCommit.from_json(store.get(commit_key), commit_key).digest
    return f"update of step {step}: version {step} -> {step + 1}, digest {digest[:16]}"


def _why_left_out(
    recipe: Recipe, step: int, group: r.Group, sample_index: int, place: r.Placement, advantages: np.ndarray
) -> str | None:
    sample = group.samples[sample_index].rollout
    if sample.status == "failed":
        return "it failed (a tombstone): it counts in its group and trains nothing"
    if place.pack_row < 0:
        return "it fits no training row"
    versions = [span.policy_version for s in group.samples for span in s.rollout.versions]
    if versions and step - min(versions) > recipe.rollout.max_lag:
        return f"its group was sampled by version {min(versions)}, more than max_lag={recipe.rollout.max_lag} steps ago"
    if (choice := recipe.algorithm.equal_groups) != "train" and not advantages.any():
        return f"all advantages of its group are 0 (equal rewards), and algorithm.equal_groups is {choice!r}"
    return None


def _turn_view(turn: r.Turn, rollout: r.Rollout, tokenizer: Tokenizer) -> TurnView:
    text = "".join(piece_of(tokenizer, token) for token in rollout.tokens[turn.start : turn.end].tolist())
    return TurnView(turn.role, turn.start, turn.end, turn.seconds, text)


def token_views(rollout: r.Rollout, tokenizer: Tokenizer) -> list[TokenView]:
    """Every token of a trajectory, in order."""
    roles = [""] * len(rollout.tokens)
    versions: list[int | None] = [None] * len(rollout.tokens)
    for turn in rollout.turns:
        roles[turn.start : turn.end] = [turn.role] * (turn.end - turn.start)
    for span in rollout.versions:
        versions[span.start : span.end] = [span.policy_version] * (span.end - span.start)
    rows = zip(rollout.tokens.tolist(), rollout.loss_mask.tolist(), rollout.sampler_logprobs.tolist(), strict=True)
    return [
        TokenView(i, roles[i], token, piece_of(tokenizer, token), mask, logprob if mask else None, versions[i])
        for i, (token, mask, logprob) in enumerate(rows)
    ]


def piece_of(tokenizer: Tokenizer, token: int) -> str:
    """What a person sees of a token; an id outside the vocabulary (another tokenizer's shard) by its number."""
    return tokenizer.token_text(token) if 0 <= token < tokenizer.vocab_size else f"<{token}?>"


# On the terminal ---------------------------------------------------------------------------------------------------


def render_trajectory(view: TrajectoryView) -> RenderableType:
    """The trajectory for a terminal."""
    return Group(_facts(view), "", _turns(view.turns), "", _tokens(view.tokens))


def _facts(view: TrajectoryView) -> RenderableType:
    components = ", ".join(f"{name} {number(value)}" for name, value in view.components.items())
    status = view.status if view.error is None else f"{view.status}: {view.error}"
    rows = [
        ("prompt", f"{view.prompt_id} ({view.task})"),
        ("status", f"{status}; ended by {view.stop_reason}"),
        ("reward", f"{number(view.reward)}" + (f" ({components})" if components else "")),
        ("group", f"rewards {describe_rewards(view.group_rewards)}"),
        ("advantage", f"{view.advantage:+.4f} ({view.advantage_name})"),
        ("trained by", view.training),
        ("environment", ", ".join(f"{name} {value}" for name, value in view.environment.items())),
        ("sampling", ", ".join(f"{name} {value:g}" for name, value in view.sampling.items())),
        ("sampled by", f"{view.generator or '?'} in {duration(view.seconds)}"),
        ("packed in", f"row {view.pack_row}, offset {view.pack_offset}" if view.pack_row >= 0 else "no row"),
        ("shard", view.shard),
    ]
    facts = Table.grid(padding=(0, 2))
    facts.add_column()
    facts.add_column(overflow="fold")
    for name, value in rows:
        facts.add_row(Text(name, style="dim"), Text(value))
    return Group(Text(f"Trajectory {view.path}", style="bold"), facts)


def describe_rewards(rewards: Sequence[float]) -> str:
    """The rewards of a group, equal ones together.

    >>> describe_rewards([1.0, 0.0, 1.0])
    '1 x 0, 2 x 1'
    """
    return ", ".join(f"{rewards.count(value)} x {value:g}" for value in sorted(set(rewards)))


def _turns(turns: Sequence[TurnView]) -> RenderableType:
    rows = [[str(i), t.role, f"{t.start}-{t.end - 1}", f"{t.seconds:.4f}", repr(t.text)] for i, t in enumerate(turns)]
    result = table("Turns", ("turn", "role", "tokens", "seconds", "text"), rows, left=2)
    result.columns[4].justify = "left"
    return result


def _tokens(tokens: Sequence[TokenView]) -> RenderableType:
    rows = [
        [
            str(token.position),
            token.role,
            repr(token.piece),
            str(token.token),
            "x" if token.trained else ".",
            "" if token.logprob is None else f"{token.logprob:.4f}",
            "" if token.logprob is None else f"{np.exp(token.logprob):.3f}",
            "" if token.version is None else str(token.version),
        ]
        for token in tokens
    ]
    columns = ("token", "role", "text", "id", "mask", "log-prob", "prob", "policy")
    return table("Tokens", columns, rows, left=3)
