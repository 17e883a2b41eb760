"""A policy and an environment small enough to hold in the head, for the tests of the rollout stage.

The policy says letters that depend on its seed and on everything that was said before. The environment answers with
what it heard, in capitals, and ends the episode after `payload["turns"]` answers. What goes wrong, and for whom, is
said by `faults`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_core.chat import RawText
from jax_core.tokenizers import CharacterTokenizer
from schemas.identity import seed_int, seed_words
from schemas.recipe import Recipe
from schemas.records import Prompt, PromptBatch
from stages.rollout.environments.base import Transition

LETTERS = "abcdefgh"
TOKENIZER = CharacterTokenizer(LETTERS + LETTERS.upper())
DIALOGUE = RawText(TOKENIZER)
LIMIT = 0.2  # seconds, where something hangs
AMPLE = 60.0  # seconds that only a broken test waits
RUN_SEED = 5


def tokens_of(text: str) -> list[int]:
    """Ids of `text`, where '$' stands for a sampled <eos>."""
    return [TOKENIZER.eos_id if c == "$" else int(TOKENIZER.encode(c)[0]) for c in text]


def make_recipe(
    *, step_seconds_limit: float = AMPLE, temperature: float = 1.0, answer_tokens: int = 2, **rollout: int
) -> Recipe:
    """A recipe of 3 prompts x 2 samples with `rollout` laid over its section."""
    sizes = {"prompts_per_step": 3, "samples_per_prompt": 2, "prompt_tokens": 6, "branch_tokens": 32, "max_turns": 8}
    return Recipe.model_validate(
        {
            "name": "test",
            "seed": RUN_SEED,
            "tokenizer": {"alphabet": TOKENIZER.alphabet},
            "task": {"step_seconds_limit": step_seconds_limit, "reward_seconds_limit": AMPLE},
            "sampling": {"temperature": temperature, "answer_tokens": answer_tokens},
            "rollout": {**sizes, **rollout},
        }
    )


def make_batch(
    *texts: str, turns: int = 3, step: int = 7, version: int = 6, first_group_index: int = 10
) -> PromptBatch:
    prompts = tuple(Prompt(f"p{i}", "echo", {"text": text, "turns": turns}) for i, text in enumerate(texts))
    return PromptBatch("run", step, 0, version, first_group_index, prompts)


def environment_seed(group: int, sample: int, step: int = 7) -> int:
    return seed_int("environment", RUN_SEED, step, group, sample)


def token_seed(group: int, sample: int, step: int = 7) -> tuple[int, int]:
    return seed_words("tokens", RUN_SEED, step, group, sample)


@dataclass
class FakeAnswer:
    tokens: np.ndarray
    logprobs: np.ndarray


@dataclass
class FakeEngine:
    """`script` says a row's answers as text, by its seed words; other rows say what their history and seed decide.

    `faults`, by seed words: what becomes of a row's answer.
    """

    answer_tokens: int = 2
    script: Mapping[tuple[int, int], Sequence[str]] = field(default_factory=dict)
    faults: Mapping[tuple[int, int], Callable[[FakeAnswer], FakeAnswer]] = field(default_factory=dict)
    before_answer: Callable[[int], None] = lambda session: None
    sessions: list[FakeSession] = field(default_factory=list)

    def begin(self, params: Any, prompts: Sequence[np.ndarray], samples: int, seeds: np.ndarray) -> FakeSession:
        assert seeds.shape == (len(prompts) * samples, 2) and seeds.dtype == np.uint32
        assert all(prompt.dtype == np.int32 and len(prompt) for prompt in prompts)
        histories = [prompt.tolist() for prompt in prompts for _ in range(samples)]
        self.sessions.append(FakeSession(self, params, len(self.sessions), histories, list(map(tuple, seeds.tolist()))))
        return self.sessions[-1]


@dataclass
class FakeSession:
    engine: FakeEngine
    params: Any
    number: int
    histories: list[list[int]]  # of each row: every token so far
    seeds: list[tuple[int, int]]
    living: set[int] | None = None
    turns: int = 0
    sessions_in_call: int = 1
    closed: int = 0

    def close(self) -> None:
        self.closed += 1

    def answer(self, environment_tokens: Mapping[int, np.ndarray]) -> dict[int, FakeAnswer]:
        assert environment_tokens and (self.living is None or set(environment_tokens) <= self.living)
        self.living = set(environment_tokens)
        self.engine.before_answer(self.number)
        answers = {row: self._answer(row, tokens) for row, tokens in environment_tokens.items()}
        self.turns += 1
        return answers

    def _answer(self, row: int, environment_tokens: np.ndarray) -> FakeAnswer:
        history, seed = self.histories[row], self.seeds[row]
        history.extend(environment_tokens.tolist())
        drawn = hashlib.sha256(repr((self.params, seed, history)).encode()).digest()
        said = "".join(LETTERS[byte % len(LETTERS)] for byte in drawn[: 1 + drawn[-1] % self.engine.answer_tokens])
        tokens = tokens_of(self.engine.script[seed][self.turns] if seed in self.engine.script else said)
        history.extend(tokens)
        logprobs = [-(1 + byte) / 64 for byte in drawn[: len(tokens)]]
        answer = FakeAnswer(np.array(tokens, np.int32), np.array(logprobs, np.float32))
        return self.engine.faults.get(seed, lambda answer: answer)(answer)


@dataclass
class EchoEnvironments:
    """Makes the environments of a test, and knows what became of each.

    `faults`, by (environment seed, name of the call, how often it was called before): what happens instead. The call
    gets the answer (None for reset), and what it returns is returned.
    """

    faults: Mapping[tuple[int, str, int], Callable[[Any], Any]] = field(default_factory=dict)
    make_fault: Callable[[int], None] = lambda number: None
    before_step: Callable[[int], None] = lambda seed: None
    made: list[EchoEnvironment] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self) -> EchoEnvironment:
        with self.lock:
            number = len(self.made)
            self.made.append(EchoEnvironment(self))
        self.make_fault(number)
        return self.made[number]

    def heard(self) -> dict[int, list[str]]:
        return {environment.seed: environment.heard for environment in self.made}


@dataclass
class EchoEnvironment:
    all: EchoEnvironments
    seed: int = -1
    heard: list[str] = field(default_factory=list)
    closed: int = 0

    def reset(self, prompt: Prompt, seed: int) -> Any:
        self.seed, self.prompt = seed, prompt
        return self._call("reset", 0, None, lambda: prompt.payload["text"])

    def step(self, answer: str) -> Any:
        self.all.before_step(self.seed)
        self.heard.append(answer)
        return self._call("step", len(self.heard) - 1, answer, lambda: self._echo(answer))

    def _echo(self, answer: str) -> Transition:
        over = len(self.heard) == self.prompt.payload["turns"]
        facts = {"heard": np.int64(sum(map(len, self.heard))), "success": over}
        return Transition("" if over else answer.upper(), 0.25 * over, over, False, facts)

    def _call(self, name: str, times: int, argument: Any, usual: Callable[[], Any]) -> Any:
        fault = self.all.faults.get((self.seed, name, times))
        return usual() if fault is None else fault(argument)

    def close(self) -> None:
        self.closed += 1
        self._call("close", 0, None, lambda: None)
