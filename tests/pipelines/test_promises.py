"""What the loop promises of a token and of a failure, shown on whole runs: every stage is the real one.

Tokens: the trainer's probability of a token is the sampler's; what a later turn was told begins with the ids of the
earlier ones; what the environment wrote is not trained; an EOS that was sampled is.
Failures: a sample that fails is a tombstone in a complete group and a dead letter that can be played again; the run
goes on, and every other sample is what it would have been.
Repetitions: a bundle that is run again changes nothing.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_core.models.decoder import init_params
from jax_core.sampling.engine import Engine, Session
from pipelines.evaluate import open_run
from runners import colocated
from runners.inspect import inspect_run
from runners.progress import plain_line, snapshot
from schemas.identity import TrajectoryId, seed_int
from schemas.metrics import read_metrics
from schemas.recipe import Recipe
from schemas.records import Failure, Prompt, PromptBatch, Rollout, ScoredRollout
from schemas.store import RunStore
from stages.prompts import source
from stages.prompts.source import Admission, prompt_batch
from stages.reward.base import RewardKind, RewardOptions
from stages.reward.kinds import REWARDS, make_reward
from stages.reward.reward import score_batch
from stages.rollout.environments import ENVIRONMENTS
from stages.rollout.environments.base import Environment, Transition
from stages.rollout.rollout import roll_out
from stages.runtime import Runtime, release
from stages.shards import list_manifests, read_dead_letters, read_shard
from tests.pipelines.tiny_runs import ELEMENTS, outcome, quarantined, share_parts, tiny_recipe

# Tokens

SHORT = 2  # steps


@dataclass(frozen=True)
class Told:
    """What one session of the engine heard and said: per row and call, the tokens before the answer, and the answer."""

    calls: Mapping[int, list[tuple[list[int], list[int]]]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """Listens to every session that a run begins, in order."""
    sessions: list[Told] = []
    begin, answer = Engine.begin, Session.answer
    heard: dict[int, tuple[Told, dict[int, list[int]]]] = {}

    def listen(engine: Engine, params: Any, prompts: Any, samples: int, seeds: np.ndarray) -> Session:
        session = begin(engine, params, prompts, samples, seeds)
        rows = {row: prompts[row // samples].tolist() for row in range(len(prompts) * samples)}
        sessions.append(Told({row: [] for row in rows}))
        heard[id(session)] = sessions[-1], rows
        session_alive.append(session)  # an id stays taken as long as its object lives
        return session

    def answer_and_note(session: Session, environment_tokens: Mapping[int, np.ndarray]) -> Any:
        answers = answer(session, environment_tokens)
        told, rows = heard[id(session)]
        for row, said in answers.items():
            before = [*rows[row], *environment_tokens[row].tolist()]
            told.calls[row].append((before, said.tokens.tolist()))
            rows[row] = [*before, *said.tokens.tolist()]
        return answers

    session_alive: list[Session] = []
    monkeypatch.setattr(Engine, "begin", listen)
    monkeypatch.setattr(Session, "answer", answer_and_note)
    return sessions


def begin_with_opinions(run: Path, recipe: Recipe) -> None:
    """Makes a run whose first policy is far from uniform, so that another temperature or a wrong prompt would show.

    Divided by the recipe's temperature its logits are the same for every recipe.
    """
    shared = Runtime(run, recipe)
    colocated.prepare_run(shared.store, recipe, resume=False)
    weights = init_params(shared.model_config, recipe.seed)
    head = weights["head"] * 1.5 * recipe.sampling.temperature
    shared.policies.publish(0, {**weights, "head": head}, source="random")


def stored_rollouts(shared: Runtime) -> Iterator[tuple[PromptBatch, list[Rollout], list[np.ndarray]]]:
    """Of each shard: its prompts, its trajectories, and the log-probabilities that the trainer gives their tokens."""
    for manifest in list_manifests(shared.store):
        content = read_shard(shared.store, manifest)
        rollouts = [sample.rollout for group in content.groups for sample in group.samples]
        (version,) = {span.policy_version for rollout in rollouts for span in rollout.versions}
        assert version == manifest.step
        scored = shared.trainer.score(shared.policies.load(version), [content])
        yield prompt_batch(shared, manifest.step, manifest.element_index, version), rollouts, scored


def written_by_the_environment(shared: Runtime, batch: PromptBatch, rollout: Rollout) -> list[list[int]]:
    """What a fresh environment writes, prompt first, when it hears the trajectory's answers. As token ids."""
    recipe, identity = shared.recipe, rollout.id
    kind = ENVIRONMENTS[recipe.task.environment]
    environment = kind.make(recipe.task.options)
    seed = seed_int("environment", recipe.seed, identity.step, identity.group_index, identity.sample_index)
    texts = [environment.reset(batch.prompts[identity.group_index - batch.first_group_index], seed)]
    for turn in rollout.turns:
        if turn.role == "policy":
            texts.append(environment.step(shared.tokenizer.decode(rollout.tokens[turn.start : turn.end])).text)
    return [shared.tokenizer.encode(text).tolist() for text in texts]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_every_token_of_every_shard_is_as_likely_to_the_trainer_as_to_the_sampler(
    temperature: float, told: list[Told], tmp_path: Path
) -> None:
    # Answers of up to two tokens, so that an EOS can end one.
    recipe = tiny_recipe(
        model={"tied_head": False},
        sampling={"temperature": temperature, "answer_tokens": 2},
        trainer={"steps": SHORT, "keep_policies": SHORT + 1},
    )
    begin_with_opinions(tmp_path, recipe)
    colocated.run(recipe, tmp_path, resume=True)
    shared = open_run(tmp_path)
    logprobs, trained_eos, later_turns = [], 0, 0
    for session, (batch, rollouts, scores) in zip(told, stored_rollouts(shared), strict=True):
        for row, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
            mask = rollout.loss_mask
            assert rollout.status == "ok" and mask.any()
            # The ratio of the importance weight is 1: on policy, whatever the temperature, over all turns.
            assert np.abs(np.exp(score - rollout.sampler_logprobs)[mask] - 1).max() <= 1e-5
            assert (rollout.sampler_logprobs[mask] < 0).all() and not rollout.sampler_logprobs[~mask].any()

            # Each turn was sampled from exactly the ids that the shard has before it: token in, token out.
            answers = [turn for turn in rollout.turns if turn.role == "policy"]
            assert session.calls[row] == [
                (rollout.tokens[: turn.start].tolist(), rollout.tokens[turn.start : turn.end].tolist())
                for turn in answers
            ]

            # The rest is the environment's own words, and the mask is the policy's tokens exactly.
            written = [rollout.tokens[t.start : t.end].tolist() for t in rollout.turns if t.role != "policy"]
            assert written == written_by_the_environment(shared, batch, rollout)[: len(written)]
            assert mask.tolist() == _covered(answers, len(mask))

            logprobs.append(rollout.sampler_logprobs[mask])
            trained_eos += int((rollout.tokens[mask] == shared.tokenizer.eos_id).sum())
            later_turns += len(answers) - 1
    assert np.concatenate(logprobs).std() > 0.5, "a uniform policy would hide a wrong temperature"
    assert later_turns > 50 and trained_eos > 5
    # Every token under the mask, EOS included, was in the loss.
    sampled = sum(manifest.sampled_tokens for manifest in list_manifests(shared.store))
    trained = [event.values for event in read_metrics(shared.store, "train")]
    assert sum(values["trainer/trained_tokens"] for values in trained) == sampled == sum(map(len, logprobs))
    assert all(values["trainer/sampler_logprob_gap_nats/max"] <= 1e-5 for values in trained)


def _covered(turns: list[Any], length: int) -> list[bool]:
    return [any(turn.start <= position < turn.end for turn in turns) for position in range(length)]


# Failures

TROUBLED = 1  # the step in which something goes wrong
RECIPE = tiny_recipe(
    trainer={"steps": 3, "keep_policies": 4}, task={"step_seconds_limit": 1.0, "reward_seconds_limit": 1.0}
)
Trouble = Callable[[], Any]  # what happens instead


def fail() -> None:
    raise OSError("the simulator is gone")


def identity(group: int, sample: int) -> TrajectoryId:
    return TrajectoryId(TROUBLED, group, sample)


def environment_seed(of: TrajectoryId) -> int:
    return seed_int("environment", RECIPE.seed, of.step, of.group_index, of.sample_index)


@dataclass
class TroubledLake:
    """A real lake; for the samples in `troubles` something else happens when it is reset, or at the first answer."""

    lake: Environment
    troubles: Mapping[tuple[int, str], Trouble]
    seed: int = -1

    def reset(self, prompt: Prompt, seed: int) -> str:
        self.seed = seed
        return self.troubles.get((seed, "reset"), lambda: self.lake.reset(prompt, seed))()

    def step(self, answer: str) -> Transition:
        return self.troubles.get((self.seed, "step"), lambda: self.lake.step(answer))()

    def close(self) -> None:
        self.lake.close()


def trouble_environments(patch: pytest.MonkeyPatch, troubles: Mapping[tuple[int, str], Trouble]) -> None:
    kind = ENVIRONMENTS["frozen_lake"]
    patch.setitem(
        ENVIRONMENTS, "frozen_lake", replace(kind, make=lambda options: TroubledLake(kind.make(options), troubles))
    )


def varied(rollout: Rollout) -> float:
    """A reward that differs inside every group, so that every step trains."""
    return len(set(rollout.tokens.tolist())) + len(rollout.tokens) / 100


def trouble_rewards(patch: pytest.MonkeyPatch, troubles: Mapping[TrajectoryId, Trouble]) -> None:
    judge = lambda rollout: troubles.get(rollout.id, lambda: varied(rollout))()
    patch.setitem(REWARDS, "environment_return", RewardKind(RewardOptions, lambda options, recipe: judge))


@dataclass(frozen=True)
class Case:
    """A kind of failure: whose, in which stage, and what its tombstone says."""

    id: TrajectoryId
    stage: str
    error: str


CASES = [
    Case(identity(0, 1), "rollout", "reset: OSError: the simulator is gone"),
    Case(identity(0, 2), "rollout", "step: OSError: the simulator is gone"),
    Case(identity(1, 0), "rollout", "step: TimeoutError: took longer than 1 s"),
    Case(identity(1, 3), "reward", "OSError: the simulator is gone"),
    Case(identity(2, 3), "reward", "TypeError"),
    Case(identity(3, 0), "reward", "ValueError"),
]


@pytest.fixture(scope="module")
def released() -> Iterator[threading.Event]:
    """What the environment that hangs waits for."""
    event = threading.Event()
    yield event
    event.set()


def make_trouble(patch: pytest.MonkeyPatch, released: threading.Event) -> None:
    raised_at_reset, raised, hung, *rewards = [case.id for case in CASES]
    trouble_environments(
        patch,
        {
            (environment_seed(raised_at_reset), "reset"): fail,
            (environment_seed(raised), "step"): fail,
            (environment_seed(hung), "step"): released.wait,
        },
    )
    trouble_rewards(patch, dict(zip(rewards, (fail, lambda: None, lambda: math.nan), strict=True)))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        share_parts(patch)
        trouble_rewards(patch, {})
        run = tmp_path_factory.mktemp("undisturbed") / "run"
        colocated.run(RECIPE, run)
        return run


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory, released: threading.Event) -> Path:
    """A run in which one sample of each kind failed."""
    with pytest.MonkeyPatch.context() as patch:
        share_parts(patch)
        make_trouble(patch, released)
        run = tmp_path_factory.mktemp("troubled") / "run"
        colocated.run(RECIPE, run)
        return run


@pytest.fixture(autouse=True)
def compiled_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "temperature" not in request.fixturenames:  # which is compiled in
        share_parts(monkeypatch)


def samples_of(run: Path, step: int) -> dict[TrajectoryId, ScoredRollout]:
    store = RunStore.open(run)
    groups = [group for m in list_manifests(store, step) for group in read_shard(store, m).groups]
    assert [len(group.samples) for group in groups] == [RECIPE.rollout.samples_per_prompt] * len(groups)
    assert len(groups) == RECIPE.rollout.prompts_per_step
    return {sample.rollout.id: sample for group in groups for sample in group.samples}


def summed(run: Path, stage: str, step: int, name: str) -> float:
    return sum(event.values[name] for event in read_metrics(RunStore.open(run), stage) if event.step == step)


def test_a_sample_that_fails_is_a_tombstone_in_a_complete_group_and_no_other_sample_notices(
    troubled: Path, undisturbed: Path
) -> None:
    found, usual = samples_of(troubled, TROUBLED), samples_of(undisturbed, TROUBLED)
    errors = {case.id: case.error for case in CASES}
    assert found.keys() == usual.keys()
    for id, sample in found.items():
        rollout = sample.rollout
        if id in errors:
            assert rollout.status == "failed" and errors[id] in (rollout.error or "")
            assert not rollout.loss_mask.any() and sample.reward == 0.0 and not sample.components
        else:
            assert rollout.status == "ok" and rollout.error is None
            assert rollout.tokens.tobytes() == usual[id].rollout.tokens.tobytes()
            assert rollout.sampler_logprobs.tobytes() == usual[id].rollout.sampler_logprobs.tobytes()
            assert sample.reward == usual[id].reward


def test_the_run_goes_on_trains_what_did_not_fail_and_counts_the_rest(troubled: Path) -> None:
    store = RunStore.open(troubled)
    assert Runtime(troubled, RECIPE).policies.latest() == RECIPE.trainer.steps
    kept = [s.rollout for s in samples_of(troubled, TROUBLED).values() if s.rollout.status == "ok"]
    trained = summed(troubled, "train", TROUBLED, "trainer/trained_tokens")
    assert trained == sum(int(rollout.loss_mask.sum()) for rollout in kept) > 0
    assert summed(troubled, "rollout", TROUBLED, "rollout/failed_trajectories") == 3
    assert summed(troubled, "reward", TROUBLED, "reward/failed_trajectories") == 3
    assert summed(troubled, "group", TROUBLED, "group/tombstones") == len(CASES)
    assert summed(troubled, "shards", TROUBLED, "shards/dead_letters") == len(CASES)
    report = inspect_run(store)
    dropped = {stage.stage: stage.dropped for stage in report.stages}
    assert dropped["rollout"] == dropped["reward"] == {"failed": 3}
    assert dropped["pack"] == {"in no row": len(CASES)}
    assert len(report.dead_letters) == len(CASES) and report.problems == ()


def play_again(run: Path, letter: Failure) -> tuple[ScoredRollout, Failure | None]:
    """Plays a dead letter's sample again, among siblings, from the letter and the run's recipe and weights."""
    release(run)
    shared = open_run(run)
    batch = PromptBatch(
        run_id=shared.run_id,
        step=letter.id.step,
        element_index=0,
        policy_version=letter.policy_version,
        first_group_index=letter.id.group_index,
        prompts=(letter.prompt,),
    )
    task = shared.recipe.task
    rolled = roll_out(shared, shared.recipe, batch)
    scored = score_batch(rolled, make_reward(shared.recipe), task.reward_seconds_limit, run_seed=shared.recipe.seed)
    (sample,) = [sample for sample in scored.rollouts if sample.rollout.id == letter.id]
    return sample, next((failure for failure in scored.failures if failure.id == letter.id), None)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.stage}-{case.id.group_index}-{case.id.sample_index}")
def test_a_dead_letter_is_enough_to_play_its_sample_again(
    case: Case,
    troubled: Path,
    undisturbed: Path,
    released: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    letters = read_dead_letters(RunStore.open(troubled))
    assert [(letter.id, letter.stage) for letter in letters] == [(case.id, case.stage) for case in CASES]
    letter = next(letter for letter in letters if letter.id == case.id)
    assert case.error in letter.error and letter.traceback

    # Where nothing was mended, it fails in the same way, having said the same tokens.
    with pytest.MonkeyPatch.context() as patch:
        make_trouble(patch, released)
        _, again = play_again(troubled, letter)
    assert again is not None
    assert (again.stage, again.error, again.seed) == (letter.stage, letter.error, letter.seed)
    assert again.attempt_tokens == letter.attempt_tokens

    # Where it was, it is the sample that the run would have had.
    trouble_rewards(monkeypatch, {})
    mended, failure = play_again(troubled, letter)
    usual = samples_of(undisturbed, TROUBLED)[case.id]
    assert failure is None
    assert tuple(mended.rollout.tokens[: len(letter.attempt_tokens)].tolist()) == letter.attempt_tokens
    assert mended.rollout.tokens.tobytes() == usual.rollout.tokens.tobytes()
    assert mended.reward == usual.reward


def every_sample() -> list[TrajectoryId]:
    rollout = RECIPE.rollout
    return [identity(g, s) for g in range(rollout.prompts_per_step) for s in range(rollout.samples_per_prompt)]


@pytest.mark.parametrize("stage", ["rollout", "reward"])
def test_that_all_samples_of_a_step_fail_is_survived_and_reported(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone = every_sample()
    trouble_environments(monkeypatch, {(environment_seed(id), "reset"): fail for id in everyone if stage == "rollout"})
    trouble_rewards(monkeypatch, dict.fromkeys(everyone if stage == "reward" else (), fail))
    lines: list[str] = []
    colocated.run(
        RECIPE,
        tmp_path,
        after_step=[lambda _: lines.append(plain_line(snapshot(read_metrics(RunStore.open(tmp_path)), RECIPE)))],
    )
    # The step made the next version, from nothing: the same weights. The step after it learned again.
    policies = Runtime(tmp_path, RECIPE).policies
    digests = [policies.commit(version).digest for version in range(RECIPE.trainer.steps + 1)]
    assert digests[TROUBLED] == digests[TROUBLED + 1]
    assert len(set(digests)) == len(digests) - 1

    assert all(sample.rollout.status == "failed" for sample in samples_of(tmp_path, TROUBLED).values())
    assert len(read_dead_letters(RunStore.open(tmp_path))) == len(everyone)
    assert summed(tmp_path, stage, TROUBLED, f"{stage}/failed_trajectories") == len(everyone)
    assert summed(tmp_path, "group", TROUBLED, "group/tombstones") == len(everyone)
    assert summed(tmp_path, "train", TROUBLED, "trainer/trained_tokens") == 0
    means = [
        e.values["reward/total/mean"] for e in read_metrics(RunStore.open(tmp_path), "reward") if e.step == TROUBLED
    ]
    assert len(means) == ELEMENTS and all(math.isnan(mean) for mean in means)
    # Whoever watches is shown a step without a reward, and whoever inspects the number and the reason.
    assert "reward ·  success ·" in lines[TROUBLED]
    report = inspect_run(RunStore.open(tmp_path))
    assert {s.stage: s.dropped for s in report.stages}[stage] == {"failed": len(everyone)}
    assert report.series["reward/total/mean"][TROUBLED] == (TROUBLED, None)
    assert len(report.dead_letters) == len(everyone)
    assert all(letter.error.endswith("OSError: the simulator is gone") for letter in report.dead_letters)


def test_a_live_run_can_be_inspected_at_any_step(tmp_path: Path) -> None:
    reports: list[tuple[int, int, list[tuple[str, str]], tuple[str, ...]]] = []

    def look(_: object) -> None:
        report = inspect_run(RunStore.open(tmp_path))
        workers = [(worker.worker, worker.part) for worker in report.workers if worker.busy > 0 and worker.idle > 0]
        reports.append((report.steps_done, len(report.shards), workers, report.problems))

    colocated.run(RECIPE, tmp_path, after_step=[look])
    both = [("colocated", "generator"), ("colocated", "trainer")]
    assert reports == [(step, ELEMENTS * step, both, ()) for step in range(1, RECIPE.trainer.steps + 1)]


# Repeated bundles


def repeated(
    run: Path, monkeypatch: pytest.MonkeyPatch, decide: Callable[[Admission], Admission]
) -> Counter[Admission]:
    """Runs with every bundle twice, and the source's decisions passed through `decide`; returns what they were."""
    decisions: Counter[Admission] = Counter()
    usual = source.admit

    def admit(step: int, newest: int | None, **facts: Any) -> Admission:
        decision = usual(step, newest, **facts)
        decisions[decision] += 1
        return decide(decision)

    monkeypatch.setattr(source, "admit", admit)
    trouble_rewards(monkeypatch, {})
    colocated.run(RECIPE, run, beam_flags=["--direct_runner_bundle_repeat=1"])
    return decisions


def test_the_source_passes_over_what_a_repeated_bundle_has_done_already(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions = repeated(tmp_path, monkeypatch, lambda decision: decision)
    # Every bundle came twice: the second time its element was committed, or its step even trained.
    assert decisions["admitted"] == RECIPE.positions == decisions["committed"] + decisions["trained"]
    assert outcome(tmp_path) == outcome(undisturbed)
    assert not quarantined(tmp_path)


def test_what_is_sampled_twice_is_sampled_alike_and_committed_once(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harder repetition: a second attempt that does not know of the first goes through every stage again."""
    repeated(tmp_path, monkeypatch, lambda decision: "admitted")
    assert (tmp_path / "metrics/rollout.jsonl").read_text().count("\n") == 2 * RECIPE.positions
    second = [event.values["shards/already_committed"] for event in read_metrics(RunStore.open(tmp_path), "shards")]
    assert second == [1.0] * RECIPE.positions
    assert outcome(tmp_path) == outcome(undisturbed)
    assert not quarantined(tmp_path)
