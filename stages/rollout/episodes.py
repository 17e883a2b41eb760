"""Episodes: what a policy and an environment say to each other, until one of them ends it.

    reset -> prompt | answer -> step -> text | answer -> step -> text | ... | answer -> step -> the end

All samples of an element are in flight together, in cohorts of whole prompts. A cohort has a thread and a decoding
session of its own, and takes turns: every sample that goes on gets its next answer in one call to the engine, then
every one of their environments is stepped. While one cohort decodes, another's environments step.

Everything that can go wrong with one sample (its environment raises, hangs, answers nonsense; its prompt is too long;
its log-probabilities are not numbers) makes a tombstone and a `Failure`, and leaves the other samples as they were. A
fault of the engine is not one sample's: it is raised.

Tokens are a function of weights, prompts and seeds. Threads decide when things happen, never what.

Left out on purpose: sandboxes, and retries (an episode that failed can be remade from its `Failure`). The text that
ends an episode is not tokenized: no answer follows it, so nothing would ever be trained on it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from jax_core.chat import Dialogue, Said
from schemas.errors import UserError
from schemas.identity import TrajectoryId, seed_int, seed_words
from schemas.recipe import Recipe
from schemas.records import (
    Failure,
    Prompt,
    PromptBatch,
    Role,
    Rollout,
    RolloutBatch,
    SamplingRecord,
    StopReason,
    Turn,
    VersionSpan,
    tombstone,
)
from schemas.text import plain
from stages.limits import CancelledError, Outcome, attempt, call_all
from stages.numbers import finite_number
from stages.rollout.environments.base import Environment, Transition

T = TypeVar("T")

STAGE = "rollout"
INTERRUPT_POLL_SECONDS = 0.1  # how late an interrupt may be noticed
INTERRUPT_GRACE_SECONDS = 1.0  # how long an interrupted caller waits for environments to be closed
NO_TOKENS = np.zeros(0, np.int32)

_log = logging.getLogger(__name__)


class Answer(Protocol):
    """tokens int32 [n] and logprobs float32 [n] in nats, n >= 1; a sampled EOS is among them."""

    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def logprobs(self) -> np.ndarray: ...


class Session(Protocol):
    """Decodes one cohort. Rows that are left out of a call are retired."""

    @property
    def sessions_in_call(self) -> int:
        """How many sessions the engine's last call decoded together, this one included."""
        ...

    def answer(self, environment_tokens: Mapping[int, np.ndarray]) -> Mapping[int, Any]: ...

    def close(self) -> None: ...


class Engine(Protocol):
    """Starts sessions. Row r of a session is sample r % samples of prompt r // samples."""

    def begin(self, params: Any, prompts: Sequence[np.ndarray], samples: int, seeds: np.ndarray) -> Session: ...


def run_episodes(
    engine: Engine,
    params: Any,
    make_environment: Callable[[], Environment],
    dialogue: Dialogue,
    batch: PromptBatch,
    *,
    recipe: Recipe,
    generator: str = "",
) -> RolloutBatch:
    """Plays every sample of every prompt of the batch to its end.

    Args:
      engine: decodes; made for `recipe.sampling` and the lengths of `recipe.rollout`.
      params: weights of policy version `batch.policy_version`.
      make_environment: a fresh environment for each sample. It and the environment's methods are called from worker
        threads, one at a time for one environment, each within `recipe.task.step_seconds_limit` seconds.
      dialogue: a conversation that has not begun; each sample's is forked from it.
      generator: which process this is, for the record.

    Returns:
      P * G rollouts in order of group and sample, tombstones included, with their failures. `seconds` are "total" (wall
      time), "decode" and "environment" (each summed over the cohorts, which overlap). `counts` are "decode_calls" that
      the cohorts were in, and "decoded_sessions", the sessions in those calls.

    Raises:
      Exception: whatever the engine raised. Environments are closed before, as after KeyboardInterrupt.
    """
    started = time.perf_counter()
    cancelled = threading.Event()
    cohorts = [
        _Cohort(engine, params, make_environment, dialogue, batch, offsets, recipe, cancelled)
        for offsets in split_in_cohorts(len(batch.prompts), recipe.rollout.cohorts)
    ]
    _run_side_by_side([cohort.run for cohort in cohorts], cancelled)
    finish = partial(finish_episode, policy_version=batch.policy_version, recipe=recipe, generator=generator)
    finished = [finish(episode) for cohort in cohorts for episode in cohort.episodes]
    return RolloutBatch(
        batch,
        tuple(rollout for rollout, _ in finished),
        tuple(failure for _, failure in finished if failure is not None),
        {
            "total": time.perf_counter() - started,
            "decode": sum(cohort.decode_seconds for cohort in cohorts),
            "environment": sum(cohort.environment_seconds for cohort in cohorts),
        },
        {
            "decode_calls": sum(cohort.decode_calls for cohort in cohorts),
            "decoded_sessions": sum(cohort.decoded_sessions for cohort in cohorts),
        },
    )


def split_in_cohorts(prompts: int, cohorts: int) -> list[range]:
    """Offsets of each cohort's prompts: whole prompts, in order, sizes as equal as they can be.

    >>> split_in_cohorts(5, 2)
    [range(0, 3), range(3, 5)]
    >>> split_in_cohorts(1, 2)
    [range(0, 1)]
    """
    count = min(prompts, cohorts)
    ends = [-(-prompts * (i + 1) // count) for i in range(count)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


class Segment(NamedTuple):
    """Tokens that one side wrote in one go; lists, because segments are short and many."""

    role: Role
    tokens: list[int]  # [n]
    logprobs: list[float]  # [n], zeros unless the policy wrote them; float32 numbers, which Python's hold exactly
    seconds: float


def written_by_others(role: Role, tokens: np.ndarray, seconds: float) -> Segment:
    return Segment(role, tokens.tolist(), [0.0] * len(tokens), seconds)


class HeldEnvironment:
    """One sample's environment: made once, closed once, and never closed while a call is in it.

    If it is to be closed while a call hangs in it, the call's own thread closes it when it comes back.
    """

    def __init__(self, make: Callable[[], Environment]):
        self._make = make
        self._environment: Environment | None = None
        self._lock = threading.Lock()
        self._busy = False
        self._closing = False

    def make(self) -> None:
        self._during(self._make_now)

    def reset(self, prompt: Prompt, seed: int) -> Said:
        return check_said(self._during(lambda environment: environment.reset(prompt, seed)), "the prompt")

    def step(self, answer: str) -> Transition:
        return check_transition(self._during(lambda environment: environment.step(answer)))

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            if self._busy:
                return
        self._close_now()

    def _during(self, call: Callable[[Any], T]) -> T:
        with self._lock:
            if self._closing:
                raise CancelledError
            self._busy = True
        try:
            return call(self._environment)
        finally:
            with self._lock:
                self._busy = False
                closing = self._closing
            if closing:
                self._close_now()

    def _make_now(self, _: None) -> None:
        self._environment = self._make()

    def _close_now(self) -> None:
        if self._environment is not None:
            self._environment.close()


def check_said(said: Any, what: str) -> Said:
    if isinstance(said, str) or (isinstance(said, list | tuple) and all(isinstance(m, Mapping) for m in said)):
        return said
    raise TypeError(f"{what} must be a str or a list of messages, got {type(said).__name__}")


def check_transition(transition: Any) -> Transition:
    """The transition as it came, if it is one.

    Raises:
      TypeError, ValueError: a part is missing, of another type, or a reward that is no finite number.
    """
    check_said(transition.text, "Transition.text")
    finite_number(transition.reward, "Transition.reward")
    for name in ("terminated", "truncated"):
        if not isinstance(getattr(transition, name), (bool, np.bool_)):
            raise TypeError(f"Transition.{name} must be a bool, got {type(getattr(transition, name)).__name__}")
    if not isinstance(transition.facts, Mapping):
        raise TypeError(f"Transition.facts must be a mapping, got {type(transition.facts).__name__}")
    return transition


@dataclass(eq=False)
class Episode:
    """One sample while it is played. It runs until it has a stop reason or an error."""

    id: TrajectoryId
    prompt: Prompt
    row: int  # in its cohort's session
    token_seed: tuple[int, int]
    environment_seed: int
    environment: HeldEnvironment
    dialogue: Dialogue  # forked from its group's, once that has its prompt
    started_at: float  # seconds since the epoch
    prompt_tokens: np.ndarray = field(default_factory=lambda: NO_TOKENS)  # int32 [t]; of its group, failed or not
    reset_seconds: float = 0.0
    segments: list[Segment] = field(default_factory=list)  # the branch: what follows the prompt
    branch_length: int = 0  # tokens of the segments
    pending: np.ndarray = field(default_factory=lambda: NO_TOKENS)  # what the engine has not seen of the last segment
    answers: int = 0
    steps: int = 0
    episode_return: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the last transition
    stopped: bool = False  # the last answer ended by a stop token or stop string, and not for want of tokens
    stop_reason: StopReason | None = None
    error: str | None = None
    traceback: str = ""
    seconds: float = 0.0

    @property
    def running(self) -> bool:
        return self.stop_reason is None

    def append(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.branch_length += len(segment.tokens)

    def stop(self, reason: StopReason) -> None:
        self.stop_reason = reason
        self.seconds = time.time() - self.started_at

    def fail(self, error: str, traceback: str = "") -> None:
        self.error, self.traceback = error, traceback
        self.stop("failed")


def finish_episode(
    episode: Episode, *, policy_version: int, recipe: Recipe, generator: str
) -> tuple[Rollout, Failure | None]:
    """The episode as a record; if it failed, as a tombstone with its failure."""
    prompt = [written_by_others("prompt", episode.prompt_tokens, episode.reset_seconds)]
    segments = [segment for segment in [*prompt, *episode.segments] if len(segment.tokens)]
    tokens, mask, logprobs = join_segments(segments)
    turns = lay_turns(segments)
    rollout = Rollout(
        id=episode.id,
        prompt_id=episode.prompt.prompt_id,
        task=episode.prompt.task,
        tokens=tokens,
        loss_mask=mask,
        sampler_logprobs=logprobs,
        prompt_length=len(episode.prompt_tokens),
        versions=tuple(VersionSpan(turn.start, turn.end, policy_version) for turn in turns if turn.role == "policy"),
        turns=turns,
        stop_reason=episode.stop_reason or "failed",
        status="ok",
        error=None,
        environment=_environment_facts(episode),
        sampling=SamplingRecord(
            recipe.sampling.temperature, recipe.sampling.top_k, recipe.sampling.top_p, recipe.sampling.min_p
        ),
        generator=generator,
        started_at=episode.started_at,
        seconds=episode.seconds,
    )
    if episode.error is None:
        return rollout, None
    failure = Failure(
        id=episode.id,
        stage=STAGE,
        error=episode.error,
        traceback=episode.traceback,
        policy_version=policy_version,
        prompt=episode.prompt,
        seed=episode.token_seed,
        attempt_tokens=tuple(tokens.tolist()),
    )
    return tombstone(rollout, episode.error), failure


def join_segments(segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens int32 [T], loss_mask bool [T], sampler_logprobs float32 [T] of segments one after another; read-only."""
    tokens = np.array([token for segment in segments for token in segment.tokens], np.int32)
    mask = np.array([segment.role == "policy" for segment in segments for _ in segment.tokens], np.bool_)
    logprobs = np.array([logprob for segment in segments for logprob in segment.logprobs], np.float32)
    for array in (tokens, mask, logprobs):
        array.setflags(write=False)  # reward functions get these, and one that hangs may still hold them
    return tokens, mask, logprobs


def lay_turns(segments: Sequence[Segment]) -> tuple[Turn, ...]:
    ends = list(accumulate(len(segment.tokens) for segment in segments))
    return tuple(
        Turn(segment.role, end - len(segment.tokens), end, segment.seconds)
        for segment, end in zip(segments, ends, strict=True)
    )


def _environment_facts(episode: Episode) -> dict[str, Any]:
    counted = {"return": episode.episode_return, "steps": episode.steps, "stopped": episode.stopped}
    return {"invalid_answers": 0, **episode.facts, **counted}


class _Cohort:
    """Some prompts with all their samples, one session, one thread."""

    def __init__(
        self,
        engine: Engine,
        params: Any,
        make_environment: Callable[[], Environment],
        dialogue: Dialogue,
        batch: PromptBatch,
        offsets: range,
        recipe: Recipe,
        cancelled: threading.Event,
    ):
        self._engine = engine
        self._params = params
        self._dialogue = dialogue
        self._recipe = recipe
        self._cancelled = cancelled
        self._samples = recipe.rollout.samples_per_prompt
        self.decode_seconds = 0.0
        self.environment_seconds = 0.0
        self.decode_calls = 0
        self.decoded_sessions = 0
        rows = [(offset, sample) for offset in offsets for sample in range(self._samples)]
        self.episodes = [
            _new_episode(batch, offset, sample, row, recipe.seed, make_environment, dialogue)
            for row, (offset, sample) in enumerate(rows)
        ]

    def run(self) -> None:
        try:
            self._open()
            self._play()
        finally:
            self._close(self.episodes)

    # The beginning: every sample has an environment, every group a prompt.

    def _open(self) -> None:
        made = self._each("make", self.episodes, lambda episode: episode.environment.make())
        reset = self._each(
            "reset",
            [episode for episode, _ in made],
            lambda episode: episode.environment.reset(episode.prompt, episode.environment_seed),
        )
        texts: dict[Episode, Said] = {}
        for episode, outcome in reset:
            episode.reset_seconds = outcome.seconds
            texts[episode] = outcome.result
        for start in range(0, len(self.episodes), self._samples):
            self._share_prompt(self.episodes[start : start + self._samples], texts)

    def _share_prompt(self, group: Sequence[Episode], texts: Mapping[Episode, Said]) -> None:
        """Gives a group its one prompt; refuses samples that start from another, or all if it cannot be used."""
        opened = [episode for episode in group if episode in texts]
        if not opened:
            return
        text, dialogue = texts[opened[0]], self._dialogue.fork()
        encoded = attempt(lambda: self._encode_prompt(dialogue, text))
        for episode in group:
            if encoded.error is None:
                episode.prompt_tokens, episode.dialogue = encoded.result, dialogue.fork()
            elif episode.running:
                episode.fail(f"prompt: {encoded.error}", encoded.traceback)
        for episode in opened:
            if episode.running and texts[episode] != text:
                episode.fail(
                    f"prompt: differs from that of sample {opened[0].id.sample_index}; the samples of a group share "
                    "one prompt, so an environment's first text may not depend on its seed"
                )

    def _encode_prompt(self, dialogue: Dialogue, text: Said) -> np.ndarray:
        tokens = np.asarray(dialogue.start(text), np.int32)
        most = self._recipe.rollout.prompt_tokens
        if not 1 <= len(tokens) <= most:
            raise ValueError(f"has {len(tokens)} tokens, must have 1 to {most} (rollout.prompt_tokens); nothing is cut")
        return tokens

    # The middle: answers and steps, in turns.

    def _play(self) -> None:
        answering = [episode for episode in self.episodes if episode.running]
        if not answering:
            return
        session = self._begin()
        try:
            while answering:
                self._answer(session, answering)
                self._step([episode for episode in answering if episode.running])
                self._close([episode for episode in answering if not episode.running])
                answering = [episode for episode in answering if episode.running]
        finally:
            session.close()

    def _begin(self) -> Session:
        # A refused prompt keeps a place, so that one failure does not change the shapes the engine is compiled for.
        # Its rows are not among those that answer, which retires them.
        stand_in = np.array([self._dialogue.tokenizer.eos_id], np.int32)
        prompts = [episode.prompt_tokens for episode in self.episodes[:: self._samples]]
        seeds = np.array([episode.token_seed for episode in self.episodes], np.uint32)
        return self._timed_engine(
            lambda: self._engine.begin(
                self._params, [tokens if len(tokens) else stand_in for tokens in prompts], self._samples, seeds
            )
        )

    def _answer(self, session: Session, episodes: Sequence[Episode]) -> None:
        before = self.decode_seconds
        answers = self._timed_engine(lambda: session.answer({episode.row: episode.pending for episode in episodes}))
        seconds = self.decode_seconds - before
        self.decode_calls += 1
        self.decoded_sessions += session.sessions_in_call
        for episode in episodes:
            self._take_answer(episode, answers[episode.row], seconds)

    def _timed_engine(self, call: Callable[[], T]) -> T:
        if self._cancelled.is_set():
            raise CancelledError
        started = time.perf_counter()
        value = call()
        self.decode_seconds += time.perf_counter() - started
        return value

    def _take_answer(self, episode: Episode, answer: Answer, seconds: float) -> None:
        tokens, logprobs = np.asarray(answer.tokens, np.int32), np.asarray(answer.logprobs, np.float32)
        problem = find_answer_problem(tokens, logprobs, self._dialogue.tokenizer.vocab_size)
        episode.answers += 1
        episode.pending = NO_TOKENS
        # The tokens of a bad answer are kept for whoever looks into it; a tombstone has no log-probabilities.
        kept = [0.0] * len(tokens) if problem else logprobs.tolist()
        episode.append(Segment("policy", tokens.tolist(), kept, seconds))
        if problem:
            episode.fail(f"answer {episode.answers - 1}: {problem}")

    def _step(self, episodes: Sequence[Episode]) -> None:
        # Decoding only gives the environment something to read; the tokens stay as they were sampled.
        texts = {episode: episode.dialogue.answer_text(episode.segments[-1].tokens) for episode in episodes}
        for episode, text in texts.items():
            episode.stopped = self._is_stopped(episode.segments[-1].tokens, text)
        for episode, outcome in self._each("step", episodes, lambda e: e.environment.step(texts[e])):
            self._take_transition(episode, outcome.result, outcome.seconds)

    def _is_stopped(self, answer: Sequence[int], text: str) -> bool:
        return answer[-1] in self._dialogue.tokenizer.stop_ids or any(
            stop in text for stop in self._recipe.sampling.stop_strings
        )

    def _take_transition(self, episode: Episode, transition: Transition, seconds: float) -> None:
        episode.steps += 1
        episode.episode_return += float(transition.reward)
        reason = self._end_of(episode, transition)
        if reason is not None:
            self._end(episode, transition, reason)
            return
        observed = attempt(lambda: _reply(episode, transition.text))
        if observed.error is not None:
            episode.fail(f"text of step {episode.steps - 1}: {observed.error}", observed.traceback)
        elif not self._fits(episode, len(observed.result)):
            self._end(episode, transition, "max_tokens")
        else:
            episode.pending = observed.result
            episode.append(written_by_others("environment", observed.result, seconds))

    def _end_of(self, episode: Episode, transition: Transition) -> StopReason | None:
        if transition.terminated:
            return "terminated"
        if transition.truncated:
            return "truncated"
        return "max_turns" if episode.answers == self._recipe.rollout.max_turns else None

    def _fits(self, episode: Episode, observed: int) -> bool:
        """Whether the environment's text and a longest answer to it still have room in the branch."""
        needed = episode.branch_length + observed + self._recipe.sampling.answer_tokens
        return needed <= self._recipe.rollout.branch_tokens

    def _end(self, episode: Episode, transition: Transition, reason: StopReason) -> None:
        facts = attempt(lambda: plain(transition.facts))
        if facts.error is not None:
            episode.fail(f"facts of step {episode.steps - 1}: {facts.error}", facts.traceback)
            return
        episode.facts = facts.result
        episode.stop(reason)

    # The end: every environment is closed, however it came to it.

    def _close(self, episodes: Sequence[Episode]) -> None:
        limit = self._recipe.task.step_seconds_limit
        for episode, outcome in zip(
            episodes, call_all([episode.environment.close for episode in episodes], limit), strict=True
        ):
            if outcome.error is not None:  # what the episode yielded is good all the same
                _log.warning("environment of trajectory %s, close: %s", episode.id.path, outcome.error)

    def _each(
        self, what: str, episodes: Sequence[Episode], call: Callable[[Episode], T]
    ) -> list[tuple[Episode, Outcome[T]]]:
        """Calls each episode's environment, fails those whose call failed, and returns the others with theirs."""
        started = time.perf_counter()
        limit = self._recipe.task.step_seconds_limit
        outcomes = call_all([partial(call, episode) for episode in episodes], limit, cancelled=self._cancelled)
        self.environment_seconds += time.perf_counter() - started
        for episode, outcome in zip(episodes, outcomes, strict=True):
            if outcome.error is not None:
                episode.fail(f"{what}: {outcome.error}", outcome.traceback)
        return [(e, outcome) for e, outcome in zip(episodes, outcomes, strict=True) if outcome.error is None]


def _reply(episode: Episode, text: Said) -> np.ndarray:
    """Ids, int32 [n], of what follows the episode's last answer, up to where the policy speaks again."""
    tokens = np.asarray(episode.dialogue.reply(np.array(episode.segments[-1].tokens, np.int32), text), np.int32)
    if episode.dialogue.branches:
        raise UserError(
            f"chat.history='split', after answer {episode.answers - 1}",
            "the template rewrites what was said, and an episode is one branch.",
            "Use a chat.template that leaves earlier turns as they were.",
        )
    return tokens


def find_answer_problem(tokens: np.ndarray, logprobs: np.ndarray, vocab_size: int) -> str | None:
    """Why an answer (tokens int32 [n], logprobs float32 [n]) cannot be trained on; None if it can."""
    if tokens.ndim != 1 or tokens.shape != logprobs.shape or not len(tokens):
        return f"has tokens of shape {tokens.shape} and log-probabilities of shape {logprobs.shape}"
    # Plain Python: answers are many and short, where one NumPy reduction costs more than a loop over the answer.
    ids = tokens.tolist()
    if min(ids) < 0 or max(ids) >= vocab_size:
        return f"has token ids {min(ids)} to {max(ids)}, of a vocabulary of {vocab_size}"
    for logprob in logprobs.tolist():
        if not -math.inf < logprob <= 0.0:  # NaN is in no interval
            return f"has a log-probability of {logprob}"
    return None


def _new_episode(
    batch: PromptBatch,
    offset: int,
    sample: int,
    row: int,
    run_seed: int,
    make_environment: Callable[[], Environment],
    dialogue: Dialogue,
) -> Episode:
    identity = TrajectoryId(batch.step, batch.first_group_index + offset, sample)
    whose = (run_seed, identity.step, identity.group_index, identity.sample_index)
    return Episode(
        id=identity,
        prompt=batch.prompts[offset],
        row=row,
        token_seed=seed_words("tokens", *whose),
        environment_seed=seed_int("environment", *whose),
        environment=HeldEnvironment(make_environment),
        dialogue=dialogue,
        started_at=time.time(),
    )


def _run_side_by_side(jobs: Sequence[Callable[[], None]], cancelled: threading.Event) -> None:
    """Runs each job in a thread; once one has failed, or the caller is interrupted, the others are told to stop.

    Raises:
      BaseException: of the first job, in their order, that failed; or the caller's KeyboardInterrupt.
    """
    errors: list[BaseException | None] = [None] * len(jobs)
    ended = [threading.Event() for _ in jobs]

    def work(index: int) -> None:
        try:
            jobs[index]()
        except BaseException as error:
            errors[index] = error
            cancelled.set()
        finally:
            ended[index].set()

    try:
        for index in range(len(jobs)):
            threading.Thread(target=work, args=(index,), name=f"cohort-{index}", daemon=True).start()
        # Not Thread.join: it can sleep through an interrupt, and one that hits it makes a living thread look dead.
        for event in ended:
            while not event.wait(INTERRUPT_POLL_SECONDS):
                pass
    except BaseException:
        cancelled.set()
        deadline = time.monotonic() + INTERRUPT_GRACE_SECONDS
        for event in ended:
            event.wait(max(0.0, deadline - time.monotonic()))
        raise
    failed = [error for error in errors if error is not None and not isinstance(error, CancelledError)]
    if failed:
        raise failed[0]
