"""Sampling of many conversations at once: prompts prefilled once a group, answers decoded by one compiled call.

    session = engine.begin(params, prompts, samples, seeds)
    answers = session.answer({row: environment_tokens, ...})     # once a turn

All rows of a session take their turns together. A row that is left out of a call is retired: its slot is computed on
until so many slots are free that the session moves the others together into a quarter of the space. When this happens
depends on the rows alone, never on time, so a session always gives the same bits.

Left out: sessions decoded together (`shared.py`), paged caches, several devices.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_core.models.config import ModelConfig
from jax_core.models.decoder import Params, bind
from jax_core.models.passes import Cache, Layers, Prefix, empty_cache, extend, prefill, take_rows, widen, write
from jax_core.sampling.distribution import draw, sampling_logprobs
from jax_core.tokenizers import Tokenizer
from schemas.records import SamplingRecord

_FIRST_COLUMNS = 32
_FEWEST_SLOTS = 32
_SHRINK = 4  # slots are given up in such steps: each new number of slots is compiled once, for seconds


@dataclass(frozen=True)
class Answer:
    """What the policy said in one turn. A stop token that was sampled is part of it."""

    tokens: np.ndarray  # int32 [n], n >= 1
    logprobs: np.ndarray  # float32 [n], nats, of the distribution each token was drawn from
    stop: Literal["stop_token", "stop_string", "max_tokens"]


class Engine:
    """Samples from one model. Holds no weights and no state of a session; safe from many threads.

    Args:
      answer_tokens: most tokens of one answer.
      stop_strings: an answer also ends with the first token that completes one of these.
      prompt_tokens: every prompt is padded to this, so that there is one compiled prefill.
      branch_tokens: most tokens after the prompt; bounds the cache.
      greedy: the most likely token instead of a drawn one (log-probs stay those of the distribution).
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        sampling: SamplingRecord,
        *,
        answer_tokens: int,
        stop_strings: Sequence[str] = (),
        prompt_tokens: int,
        branch_tokens: int,
        greedy: bool = False,
    ):
        self.config = config
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.answer_tokens = answer_tokens
        self.stop_strings = tuple(stop_strings)
        self.prompt_tokens = prompt_tokens
        self.branch_tokens = branch_tokens
        self.greedy = greedy

    @property
    def static(self) -> tuple[Any, ...]:
        """What the compiled decoding is specialised to. Engines that agree in it share their compiled functions."""
        return self.config, self.sampling, self.answer_tokens, self.greedy, self.tokenizer.stop_ids

    def begin(self, params: Params, prompts: Sequence[np.ndarray], samples: int, seeds: np.ndarray) -> Session:
        """Starts `samples` conversations on each prompt.

        Args:
          prompts: int32 [t] each, 1 <= t <= prompt_tokens.
          seeds: uint32 [P * samples, 2], one a row; row = prompt * samples + sample.
        """
        return Session(self, params, prompts, samples, seeds)

    # The parts of a session, for those who put other sessions together.

    def prefill(self, params: Params, prompts: Sequence[np.ndarray]) -> Prefix:
        """Runs the prompts without their last tokens.

        Raises:
          ValueError: a prompt is empty, or longer than `prompt_tokens`.
        """
        lengths = np.array([len(p) for p in prompts], np.int32)
        if lengths.min() < 1 or lengths.max() > self.prompt_tokens:
            raise ValueError(f"prompts of {lengths.tolist()} tokens; the engine takes 1 to {self.prompt_tokens}")
        padded = np.full((len(prompts), self.prompt_tokens), self.tokenizer.pad_id, np.int32)
        for i, prompt in enumerate(prompts):
            padded[i, : len(prompt)] = prompt
        with _compiling(("prefill", self.config, padded.shape)):
            return _prefill(self.config, params, padded[:, :-1], lengths - 1)

    def decode(
        self,
        params: Params,
        prefix: Prefix,
        cache: Cache[np.ndarray],
        column: int,
        chunk: np.ndarray,
        lengths: np.ndarray,
        positions: np.ndarray,
        seeds: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, Layers]:
        """Runs a chunk, then samples an answer of each row, in one compiled call.

        Args:
          cache: what each row has behind its prefix. Its layers are given away.
          column: the first free column of the cache; columns are needed for the chunk and an answer but its last token.
          chunk: int32 [B, C], of which `lengths` int32 [B] tokens are real; rows with none are computed, for nothing.
          positions: int32 [B], of the chunk's first token.
          seeds: uint32 [B, 2].

        Returns:
          tokens int32 [B, N], logprobs float32 [B, N], how many of them are real, int32 [B], and the cache's layers
          with the new columns.
        """
        shapes = (self.static, prefix.shape, cache.valid.shape, chunk.shape)
        arguments = (params, prefix, cache.layers, cache.valid, column, chunk, lengths, positions, seeds)
        with _compiling(shapes):
            tokens, logprobs, counts, layers = _decode(*self.static, *arguments)
        return np.asarray(tokens), np.asarray(logprobs), np.array(counts), layers

    def finish(self, tokens: np.ndarray, logprobs: np.ndarray) -> Answer:
        """Cuts an answer after its first stop string. What was sampled behind it is forgotten, not masked."""
        for end in range(1, len(tokens) + 1) if self.stop_strings else ():
            text = self.tokenizer.decode(tokens[:end])
            if any(stop in text for stop in self.stop_strings):
                return Answer(tokens[:end].copy(), logprobs[:end].copy(), "stop_string")
        stopped = tokens[-1] in self.tokenizer.stop_ids
        return Answer(tokens.copy(), logprobs.copy(), "stop_token" if stopped else "max_tokens")


class Session:
    """Conversations in flight. Use from one thread; different sessions may run in different threads.

    Attributes:
      sessions_in_call: how many sessions the last answers' call decoded. Here it is always this one alone.
    """

    sessions_in_call = 1

    def __init__(self, engine: Engine, params: Params, prompts: Sequence[np.ndarray], samples: int, seeds: np.ndarray):
        rows = len(prompts) * samples
        lengths = np.array([len(p) for p in prompts], np.int32)
        self._engine = engine
        self._params = params
        self._prefix = engine.prefill(params, prompts)
        self._rows = np.arange(rows)  # row of each slot
        self._alive = np.ones(rows, bool)
        self._pending = np.repeat([p[-1] for p in prompts], samples).astype(np.int32)  # seen, not yet run
        self._positions = np.repeat(lengths - 1, samples).astype(np.int32)  # of the pending token
        self._seeds = np.asarray(seeds, np.uint32)
        self._columns = 0  # used columns of the cache
        self._cache = empty_cache(engine.config, rows, _FIRST_COLUMNS)

    def answer(self, environment_tokens: Mapping[int, np.ndarray]) -> dict[int, Answer]:
        """One answer of each named row, after the tokens that the environment wrote since its last answer.

        Rows that are not named are retired for good.
        """
        self._retire(environment_tokens)
        chunk, lengths = self._chunk(environment_tokens)
        self._make_room(chunk.shape[1] + self._engine.answer_tokens - 1)
        state = (self._cache, self._columns, chunk, lengths, self._positions, self._seeds)
        tokens, logprobs, counts, layers = self._engine.decode(self._params, self._prefix, *state)
        self._cache = Cache(layers, self._cache.valid)
        answers = {}
        for slot in np.flatnonzero(self._alive):
            answer = self._engine.finish(tokens[slot, : counts[slot]], logprobs[slot, : counts[slot]])
            counts[slot] = len(answer.tokens)
            answers[int(self._rows[slot])] = answer
        self._advance(lengths, counts, tokens, chunk.shape[1])
        return answers

    def close(self) -> None:
        """Retires all rows. The memory goes with the session."""
        self._alive[:] = False

    def _retire(self, going_on: Mapping[int, np.ndarray]) -> None:
        self._alive &= np.isin(self._rows, list(going_on))
        if self._alive.sum() != len(going_on):
            raise ValueError("a retired or unknown row was named; rows that sit out a turn are retired for good")
        slots = len(self._rows)
        while slots // _SHRINK >= max(len(going_on), _FEWEST_SLOTS):
            slots //= _SHRINK
        if slots < len(self._rows):
            self._move_together(slots)

    def _move_together(self, slots: int) -> None:
        """Keeps the living rows, in `slots` slots. Prompts are copied to each, since groups have become ragged."""
        keep = np.flatnonzero(self._alive)
        keep = np.concatenate([keep, np.flatnonzero(~self._alive)[: slots - len(keep)]])
        group = keep // (len(self._rows) // self._prefix.shape[0])
        self._prefix = Prefix(take_rows(self._prefix.layers, group), self._prefix.lengths[group])
        self._cache = Cache(take_rows(self._cache.layers, keep), self._cache.valid[keep])
        self._rows, self._alive, self._pending = self._rows[keep], self._alive[keep], self._pending[keep]
        self._positions, self._seeds = self._positions[keep], self._seeds[keep]

    def _chunk(self, environment_tokens: Mapping[int, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The pending token and the environment's text of each living row: tokens [B, C], lengths [B] (0: retired)."""
        width = round_up(1 + max((len(t) for t in environment_tokens.values()), default=0))
        chunk = np.full((len(self._rows), width), self._engine.tokenizer.pad_id, np.int32)
        lengths = np.zeros(len(self._rows), np.int32)
        chunk[:, 0] = self._pending
        for slot in np.flatnonzero(self._alive):
            text = environment_tokens[int(self._rows[slot])]
            chunk[slot, 1 : 1 + len(text)] = text
            lengths[slot] = 1 + len(text)
        return chunk, lengths

    def _advance(self, lengths: np.ndarray, counts: np.ndarray, tokens: np.ndarray, chunk: int) -> None:
        """Marks which new cache columns hold tokens; the last token of an answer is sampled but not yet run."""
        columns = np.arange(self._cache.valid.shape[1])[None]
        fed = np.maximum(counts - 1, 0)
        in_chunk = (columns >= self._columns) & (columns < self._columns + lengths[:, None])
        start = self._columns + chunk
        in_answer = (columns >= start) & (columns < start + fed[:, None])
        living = self._alive[:, None]
        self._cache = self._cache._replace(valid=self._cache.valid | ((in_chunk | in_answer) & living))
        self._columns = start + self._engine.answer_tokens - 1
        last = np.take_along_axis(tokens, fed[:, None], axis=1)[:, 0]
        self._pending = np.where(self._alive, last, self._pending).astype(np.int32)
        self._positions = (self._positions + lengths + fed).astype(np.int32)

    def _make_room(self, columns: int) -> None:
        """Grows the cache by doubling: decoding costs what is used, not what could be."""
        needed, have = self._columns + columns, self._cache.valid.shape[1]
        if needed <= have:
            return
        wider = have
        while wider < needed:
            wider *= 2
        valid = np.pad(self._cache.valid, [(0, 0), (0, wider - have)])
        self._cache = Cache(widen(self._cache.layers, wider - have), valid)


def round_up(width: int) -> int:
    """The next of 2, 3, 4, 6, 8, 12, 16, 24, ...: few shapes to compile, little padding."""
    size = 2
    while size < width:
        size = size + 1 if size < 4 else size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


_compile_lock = threading.Lock()
_compiled: set[Hashable] = set()


@contextmanager
def _compiling(shapes: Hashable) -> Iterator[None]:
    """Lets one thread at a time meet new shapes: two cohorts that start together would each compile the same."""
    if shapes in _compiled:
        yield
        return
    with _compile_lock:
        yield
        _compiled.add(shapes)


@partial(jax.jit, static_argnums=0)
def _prefill(config: ModelConfig, params: Params, prompts: jax.Array, lengths: jax.Array) -> Prefix:
    return prefill(bind(config, params), prompts, lengths)


class _Decoding(NamedTuple):
    step: jax.Array
    layers: Layers
    valid: jax.Array  # bool [B, S]
    last: jax.Array  # int32 [B]
    position: jax.Array  # int32 [B], of `last`
    running: jax.Array  # bool [B]
    tokens: jax.Array  # int32 [B, N]
    logprobs: jax.Array  # float32 [B, N]
    counts: jax.Array  # int32 [B]


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnames="layers")
def _decode(
    config: ModelConfig,
    sampling: SamplingRecord,
    answer_tokens: int,
    greedy: bool,
    stop_ids: tuple[int, ...],
    params: Params,
    prefix: Prefix,
    layers: Layers,
    valid: jax.Array,
    column: jax.Array,
    chunk: jax.Array,
    lengths: jax.Array,
    positions: jax.Array,
    seeds: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, Layers]:
    """Runs a chunk [B, C], then decodes up to `answer_tokens` tokens of each row, all in one compiled call.

    Returns tokens [B, N], logprobs [B, N], counts [B] and the cache's keys and values with the new columns.
    """
    model = bind(config, params)
    rows, width = chunk.shape

    def sample(hidden, position):
        logits = model.logits(hidden)
        logprobs = sampling_logprobs(logits, sampling)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32) if greedy else draw(logprobs, seeds, position)
        return token, jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]

    def is_stop(token):
        return jnp.isin(token, jnp.array(stop_ids, jnp.int32))

    offsets = jnp.arange(width)
    chunk_valid = offsets[None] < lengths[:, None]
    chunk_positions = positions[:, None] + offsets[None]
    hidden, new = extend(model, prefix, Cache(layers, valid), chunk, chunk_positions, chunk_valid)
    last = jnp.maximum(lengths - 1, 0)
    first_position = positions + last + 1
    token, logprob = sample(hidden[jnp.arange(rows), last], first_position)
    layers = write(layers, new, column)
    tokens = jnp.zeros((rows, answer_tokens), jnp.int32).at[:, 0].set(token)
    logprobs = jnp.zeros((rows, answer_tokens), jnp.float32).at[:, 0].set(logprob)
    if answer_tokens == 1:
        return tokens, logprobs, jnp.ones(rows, jnp.int32), layers

    def go_on(s: _Decoding):
        return (s.step < answer_tokens) & s.running.any()

    def one_token(s: _Decoding) -> _Decoding:
        at = column + width + s.step - 1
        cache = Cache(s.layers, s.valid)
        hidden, new = extend(model, prefix, cache, s.last[:, None], s.position[:, None], s.running[:, None])
        token, logprob = sample(hidden[:, 0], s.position + 1)
        return _Decoding(
            step=s.step + 1,
            layers=write(s.layers, new, at),
            valid=jax.lax.dynamic_update_slice(s.valid, s.running[:, None], (0, at)),
            last=jnp.where(s.running, token, s.last),
            position=s.position + s.running,
            running=s.running & ~is_stop(token),
            tokens=s.tokens.at[:, s.step].set(jnp.where(s.running, token, 0)),
            logprobs=s.logprobs.at[:, s.step].set(jnp.where(s.running, logprob, 0.0)),
            counts=s.counts + s.running,
        )

    start = _Decoding(
        step=jnp.int32(1),
        layers=layers,
        valid=jax.lax.dynamic_update_slice(valid, chunk_valid, (0, column)),
        last=token,
        position=first_position,
        running=(lengths > 0) & ~is_stop(token),
        tokens=tokens,
        logprobs=logprobs,
        counts=jnp.ones(rows, jnp.int32),
    )
    end = jax.lax.while_loop(go_on, one_token, start)
    return end.tokens, end.logprobs, end.counts, end.layers
